// Conversations through the serving loop and a real engine, in a prefix cache that is too small for
// them, and with guesses of the next tokens: every token and log probability is that of a server
// that computes all of it anew, one token after the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <tuple>

#include "base/status.h"
#include "engine/memory_plan.h"
#include "kernels/op_cases/instrumented.h"
#include "kernels/op_cases/random.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "scheduler/policy.h"
#include "scheduler/serving_loop.h"
#include "tests/engine/engine_kinds.h"
#include "tests/scheduler/oracle_drafter.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 16, kPages = 40, kBatchTokens = 32;

class Server {
 public:
  // `disk`: a folder for the second tier; empty: none.
  Server(const EngineKind& kind, const std::string& path, bool cached, const MakeDrafter& drafter,
         const std::string& disk) {
    auto checkpoint = Checkpoint::Open(path).value();
    const KvPaging paging = KvPaging::Of(checkpoint->config(), kPageSize, kBatchTokens);
    const PageCounts pages = {paging.whole ? kPages : 0, paging.ring > 0 ? kPages : 0};
    engine_ = MakeEngine(
        kind, path, {.max_batch_tokens = kBatchTokens, .page_size = kPageSize, .kv_pages = pages});
    if (!disk.empty()) files_ = OpenFiles(disk, checkpoint->config());
    kv_.emplace(pages, paging, cached ? pages : PageCounts(), nullptr, files_.get());
    ServingLoop::Options loop;
    loop.limits = {.max_batch_size = 6, .max_batch_tokens = kBatchTokens};
    if (drafter) loop.drafter = drafter;
    loop_.emplace(*engine_, *kv_, pool_, *policy_, ledger_, TimeSource::Steady(), loop);
    TREADLE_CHECK(loop_->Start().ok());
  }
  ~Server() { loop_->Stop(absl::UnavailableError("the test is over")); }

  PageFiles* files() { return files_.get(); }

  RequestPool::Submitted Submit(const RequestSpec& spec) { return *pool_.Submit(spec); }

 private:
  static std::unique_ptr<PageFiles> OpenFiles(const std::string& disk, const ModelConfig& config) {
    const KvMemoryRequest memory = {.page_size = kPageSize};
    return PageFiles::Open(
               {.folder = disk,
                .max_bytes = 64 << 20,
                .model = "tiny",
                .contents = "tiny",
                .page_size = kPageSize,
                .page_bytes = KvMemoryOf(config, memory, kPages).bytes_per_page[PageKind::kWhole],
                .seconds = [] { return 0.0; }})
        .value();
  }

  std::unique_ptr<PageFiles> files_;
  std::unique_ptr<Engine> engine_;
  std::optional<KvSlotManager> kv_;
  RequestPool pool_{1000};
  const std::unique_ptr<Policy> policy_ = *Policy::Create("fcfs");
  Ledger ledger_;
  std::optional<ServingLoop> loop_;
};

// A token of a candidate, and what was told of it.
using Told = std::tuple<uint32_t, int32_t, float, std::vector<std::pair<int32_t, float>>>;

struct Answer {
  std::vector<Told> told;       // by candidate
  std::vector<float> prompt;    // log probabilities
  std::vector<int32_t> tokens;  // of the first candidate
  int32_t cached = 0;
  int32_t accepted = 0;  // guesses
};

// The tokens of candidates by prompt and seed.
using Known =
    std::map<std::pair<std::vector<int32_t>, uint64_t>, std::vector<std::vector<int32_t>>>;

Answer Await(const RequestPool::Submitted& submitted) {
  Answer answer;
  std::vector<StreamToken> tokens;
  EXPECT_TRUE(ComesTrue([&] {
    StreamBatch batch = submitted.stream->Take();
    for (StreamToken& token : batch.tokens) tokens.push_back(std::move(token));
    for (const TokenDetail& detail : batch.prompt_detail) answer.prompt.push_back(detail.logprob);
    if (!batch.ended) return false;
    EXPECT_EQ(batch.status, absl::OkStatus());
    answer.accepted = batch.timings.accepted_draft_tokens;
    return true;
  }));
  for (const StreamToken& token : tokens) {
    if (token.token < 0) continue;
    std::vector<std::pair<int32_t, float>> top;
    for (const TokenLogprob& best : token.detail.top) top.push_back({best.token, best.logprob});
    answer.told.push_back({token.candidate, token.token, token.detail.logprob, top});
    if (token.candidate == 0) answer.tokens.push_back(token.token);
  }
  std::ranges::stable_sort(answer.told, {}, [](const Told& told) { return std::get<0>(told); });
  answer.cached = submitted.stream->cached_tokens();
  return answer;
}

RequestSpec RandomRequest(Random& random, std::vector<int32_t> prompt) {
  RequestSpec spec;
  spec.prompt = std::move(prompt);
  spec.max_new_tokens = static_cast<int32_t>(1 + random.Below(20));
  spec.candidates = random.Below(4) == 0 ? 2 : 1;
  spec.top_logprobs = static_cast<int32_t>(random.Below(3));
  spec.sampling.seed = random.Below(1000);
  spec.sampling.temperature = random.Below(2) == 0 ? 0.0f : 1.0f;
  if (random.Below(3) == 0) spec.sampling.repetition_penalty = 1.3f;
  if (random.Below(8) == 0) spec.prompt_logprobs = 1;
  return spec;
}

// The answers of conversations whose turns come together. What is asked depends on the seed and on
// the answers alone. Those are guessed as they are `known`; without it they are entered there, and
// nothing is guessed. With a `disk` the server is another one for each third of the rounds, and
// `hits` gets the tokens that files had.
std::vector<Answer> Converse(const EngineKind& kind, const std::string& path, bool cached,
                             bool guessed, int rounds, Known& known, const std::string& disk = "",
                             int64_t* hits = nullptr) {
  const MakeDrafter drafter = [&](const Request& request, const Sequence& sequence) {
    const auto& answers = known.at({request.spec.prompt, request.spec.sampling.seed});
    return std::make_unique<OracleDrafter>(answers[sequence.candidate], sequence.output.size(),
                                           request.id, TinyVocabulary());
  };
  std::optional<Server> server;
  Random random(7);
  const auto draw = [&](int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) {
      ids.push_back(static_cast<int32_t>(random.Below(TinyVocabulary())));
    }
    return ids;
  };
  const std::vector<int32_t> system = draw(50);
  std::map<int, std::vector<int32_t>> said;  // by conversation
  std::vector<Answer> answers;
  for (int round = 0; round < rounds; ++round) {
    if (!server || (!disk.empty() && round % (rounds / 3) == 0)) {
      server.reset();
      server.emplace(kind, path, cached, drafter, disk);
    }
    std::map<int, RequestPool::Submitted> asked;
    std::map<int, RequestSpec> specs;
    const int64_t requests = 1 + random.Below(6);
    for (int64_t i = 0; i < requests; ++i) {
      const auto who = static_cast<int>(random.Below(8));
      if (asked.contains(who)) continue;
      std::vector<int32_t>& words = said[who];
      if (words.empty() || words.size() > 180) {
        words = random.Below(2) == 0 ? system : draw(1 + random.Below(70));
      } else if (random.Below(5) == 0) {  // an earlier point of it
        words.resize(static_cast<size_t>(1 + random.Below(std::ssize(words))));
      }
      const std::vector<int32_t> next = draw(1 + random.Below(24));
      words.insert(words.end(), next.begin(), next.end());
      specs[who] = RandomRequest(random, words);
      if (guessed) specs[who].speculate = Speculate::kNgram;
      asked[who] = server->Submit(specs[who]);
    }
    for (const auto& [who, submitted] : asked) {
      answers.push_back(Await(submitted));
      auto& tokens_of = known[{specs[who].prompt, specs[who].sampling.seed}];
      if (tokens_of.empty()) {
        tokens_of.resize(static_cast<size_t>(specs[who].candidates));
        for (const Told& told : answers.back().told) {
          tokens_of[std::get<0>(told)].push_back(std::get<1>(told));
        }
      }
      const std::vector<int32_t>& tokens = answers.back().tokens;
      said[who].insert(said[who].end(), tokens.begin(), tokens.end());
    }
    if (hits != nullptr && (round + 1) % (rounds / 3) == 0) {
      *hits += server->files()->counters().hits;
      EXPECT_EQ(server->files()->counters().misses, 0);
    }
  }
  return answers;
}

// How long a conversation is worth its time, where threads and processes wait for each other.
int Rounds(const EngineKind& kind) {
  if (kind.stages > 0 || kThreadSanitized) return 10;
  return kind.ranks > 2 ? 40 : 120;
}

class Reuse : public testing::TestWithParam<EngineKind> {};
class ReuseFromFiles : public testing::TestWithParam<EngineKind> {};

TEST_P(Reuse, AnswersAreThoseWithoutIt) {
  const TestFolder folder;
  // Layers that see everything, a window each, both in turn, and states in turn with everything.
  for (const auto& [architecture, window] :
       {std::pair("llama", 0), std::pair("llama", 18), std::pair("gemma3", 0),
        std::pair("qwen35", 0), std::pair("lfm2", 0), std::pair("granitehybrid", 0)}) {
    if (GetParam().gpus && FindArchitecture(architecture)->states != StateKind::kNone) continue;
    SCOPED_TRACE(Str(architecture, ", window ", window));
    TinyModelOptions options;
    options.layers = 4;
    options.window = window;
    ASSERT_OK_AND_ASSIGN(const auto path,
                         WriteTinyGguf(*FindArchitecture(architecture), folder.path(), options));
    const int rounds = Rounds(GetParam());
    Known known;
    const auto plain = Converse(GetParam(), path, false, false, rounds, known);
    for (const auto& [cached, guessed] :
         {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
      SCOPED_TRACE(Str("cached ", cached, ", guessed ", guessed));
      const auto answers = Converse(GetParam(), path, cached, guessed, rounds, known);
      ASSERT_EQ(answers.size(), plain.size());
      int64_t reused = 0, accepted = 0;
      for (size_t i = 0; i < answers.size(); ++i) {
        ASSERT_EQ(answers[i].told, plain[i].told) << "answer " << i;
        ASSERT_EQ(answers[i].prompt, plain[i].prompt) << "answer " << i;
        reused += answers[i].cached > 0;
        accepted += answers[i].accepted;
      }
      EXPECT_EQ(reused > 0, cached) << "of " << answers.size();
      EXPECT_EQ(accepted > 0, guessed) << "of " << answers.size();
    }
  }
}

// Prompts part where a ring has been overwritten: from the third on, requests begin there.
TEST_P(Reuse, OthersBeginWhereTwoHaveParted) {
  const TestFolder folder;
  for (const auto& [architecture, window] :
       {std::pair("llama", 18), std::pair("gemma3", 0), std::pair("qwen35", 0),
        std::pair("lfm2", 0), std::pair("granitehybrid", 0)}) {
    SCOPED_TRACE(architecture);
    TinyModelOptions options;
    options.layers = 4;
    options.window = window;
    ASSERT_OK_AND_ASSIGN(const auto path,
                         WriteTinyGguf(*FindArchitecture(architecture), folder.path(), options));
    std::vector<std::vector<Told>> told[2];
    for (const bool cached : {false, true}) {
      Server server(GetParam(), path, cached, {}, "");
      for (int32_t i = 0; i < 4; ++i) {
        RequestSpec spec;
        for (int32_t k = 0; k < 100; ++k) spec.prompt.push_back((k * k + 3) % 29);
        for (int32_t k = 0; k < 80; ++k) spec.prompt.push_back(i + k % 7);
        spec.max_new_tokens = 8;
        spec.top_logprobs = 3;
        const Answer answer = Await(server.Submit(spec));
        told[cached].push_back(answer.told);
        EXPECT_EQ(answer.cached, cached && i > 1 ? 96 : 0) << "request " << i;
      }
    }
    EXPECT_EQ(told[0], told[1]);
  }
}

// A draft model guesses what it would say itself, whatever was said instead of its guesses.
TEST(DraftModelOfAnEngine, GuessesWhatItWouldSay) {
  const EngineKind kind = EngineKinds().front();  // one rank of this process
  const TestFolder folder;
  for (const auto& [architecture, window] :
       {std::pair("llama", 0), std::pair("gemma3", 0), std::pair("qwen35", 0),
        std::pair("granitehybrid", 0)}) {
    SCOPED_TRACE(architecture);
    TinyModelOptions options;
    options.window = window;
    const std::string path =
        *WriteTinyGguf(*FindArchitecture(architecture), folder.path(), options);
    Server server(kind, path, false, {}, "");
    const KvPaging paging =
        KvPaging::Of((*Checkpoint::Open(path))->config(), kPageSize, kBatchTokens);
    const PageCounts pages = {kPages, paging.ring > 0 ? kPages : 0};
    DraftModel model(MakeEngine(kind, path,
                                {.max_batch_tokens = kBatchTokens,
                                 .page_size = kPageSize,
                                 .kv_pages = pages,
                                 .depth = 3}),
                     {.pages = pages,
                      .paging = paging,
                      .context = options.context,
                      .max_batch_tokens = kBatchTokens});
    ASSERT_EQ(model.Start(), absl::OkStatus());
    Random random(3);
    for (int i = 0; i < 6; ++i) {
      Request request;
      for (int64_t k = 0; k < 50; ++k) {
        request.spec.prompt.push_back(static_cast<int32_t>(random.Below(TinyVocabulary())));
      }
      request.spec.max_new_tokens = 60;
      request.spec.sampling = {.temperature = i % 2 == 0 ? 0.0f : 1.0f, .seed = 5};
      Sequence sequence;
      sequence.output = {7};
      const std::unique_ptr<Drafter> drafter = model.Make(request, sequence);
      std::vector<int32_t> said = request.spec.prompt;
      said.push_back(7);
      const std::vector<DraftModel::Wanted> wanted = {{drafter.get(), 5}};
      model.Draft(wanted);  // the prompt is longer than an iteration
      for (int round = 0; round < 6; ++round) {
        model.Draft(wanted);
        RequestSpec asked = request.spec;
        asked.prompt = said;
        asked.max_new_tokens = 5;
        std::vector<int32_t> guesses;
        for (const Guess& guess : drafter->Next(5)) guesses.push_back(guess.token);
        ASSERT_EQ(guesses, Await(server.Submit(asked)).tokens) << i << ", " << round;
        guesses.resize(static_cast<size_t>(random.Below(6)));
        guesses.push_back(static_cast<int32_t>(random.Below(TinyVocabulary())));
        for (const int32_t token : guesses) {
          drafter->Append(token);
          said.push_back(token);
        }
      }
    }
  }
}

// With files, within memory that is too small, and after restarts.
TEST_P(ReuseFromFiles, AnswersAreThoseWithoutThem) {
  const TestFolder folder;
  TinyModelOptions options;
  options.layers = 4;
  ASSERT_OK_AND_ASSIGN(const auto path,
                       WriteTinyGguf(*FindArchitecture("llama"), folder.path(), options));
  const int rounds = Rounds(GetParam()) / 3 * 3;
  Known known;
  const auto plain = Converse(GetParam(), path, false, false, rounds, known);
  for (const bool guessed : {false, true}) {
    int64_t hits = 0;
    const auto answers = Converse(GetParam(), path, true, guessed, rounds, known,
                                  folder / Str("disk", guessed), &hits);
    ASSERT_EQ(answers.size(), plain.size());
    for (size_t i = 0; i < answers.size(); ++i) {
      ASSERT_EQ(answers[i].told, plain[i].told) << "answer " << i;
      ASSERT_EQ(answers[i].prompt, plain[i].prompt) << "answer " << i;
    }
    EXPECT_GT(hits, 0);
  }
}

// Emulated GPUs would take minutes; PlanDriver takes sequences from the cache there, too.
std::vector<EngineKind> Kinds() {
  std::vector<EngineKind> kinds = EngineKinds();
  std::erase_if(kinds, [](const EngineKind& kind) { return kind.gpus || kind.stages > 3; });
  return kinds;
}

// One rank in this process: others have no second tier.
std::vector<EngineKind> FileKinds() {
  std::vector<EngineKind> kinds = EngineKinds();
  std::erase_if(kinds, [](const EngineKind& kind) {
    return kind.stages > 0 || kind.ranks > 1 || kind.asynchronous();
  });
  return kinds;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ReuseFromFiles);  // remote_kinds.cc has none
INSTANTIATE_TEST_SUITE_P(Kinds, ReuseFromFiles, testing::ValuesIn(FileKinds()),
                         [](const auto& info) { return info.param.Name(); });

INSTANTIATE_TEST_SUITE_P(Kinds, Reuse, testing::ValuesIn(Kinds()),
                         [](const auto& info) { return info.param.Name(); });

}  // namespace
}  // namespace treadle
