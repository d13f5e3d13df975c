#include "tests/scheduler/loop_harness.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {

void Client::Receive() {
  StreamBatch batch = stream->Take();
  prompt.insert(prompt.end(), batch.prompt_detail.begin(), batch.prompt_detail.end());
  for (const StreamToken& token : batch.tokens) {
    if (token.token >= 0) tokens[token.candidate].push_back(token.token);
    if (token.finish != FinishReason::kNone) finish[token.candidate] = token.finish;
  }
  if (batch.ended) {
    ended = true;
    status = batch.status;
    timings = batch.timings;
  }
}

std::string Client::Mistake() const {
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    const std::vector<int32_t> expected = ReferenceOutput(spec, i);
    const std::vector<int32_t>& got = tokens[i];
    if (got.size() > expected.size() || !std::equal(got.begin(), got.end(), expected.begin())) {
      return Str("request ", id, " candidate ", i, ": not the reference's tokens");
    }
    if (!ended || !status.ok() || finish[i] == FinishReason::kStopString) continue;
    if (got.size() != expected.size()) {
      return Str("request ", id, " candidate ", i, ": ", got.size(), " tokens, expected ",
                 expected.size());
    }
    const auto& ends = spec.end_tokens;
    const bool by_token = std::find(ends.begin(), ends.end(), got.back()) != ends.end();
    if (finish[i] != (by_token ? FinishReason::kEndToken : FinishReason::kLength)) {
      return Str("request ", id, " candidate ", i, ": wrong finish reason");
    }
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (i + 1 >= spec.prompt.size() ||
        prompt[i].logprob !=
            ReferencePromptLogprob(static_cast<int32_t>(i) + 1, spec.prompt[i + 1])) {
      return Str("request ", id, ": prompt log probability ", i, " is wrong");
    }
  }
  if (ended && status.ok() && spec.prompt_logprobs >= 0 && finish[0] != FinishReason::kStopString &&
      prompt.size() + 1 != spec.prompt.size()) {
    return Str("request ", id, ": ", prompt.size(), " prompt log probabilities");
  }
  return "";
}

std::unique_ptr<Drafter> MakeOracleDrafter(const Request& request, const Sequence& sequence) {
  return std::make_unique<OracleDrafter>(ReferenceOutput(request.spec, sequence.candidate),
                                         sequence.output.size(), request.spec.sampling.seed);
}

LoopHarness::LoopHarness(const HarnessOptions& o)
    : options(o),
      engine(o.engine),
      kv(o.engine.total_pages, o.engine.paging(),
         o.prefix_cache ? o.engine.total_pages : PageCounts(), nullptr, o.files),
      policy(Policy::Create(o.policy).value()),
      pool(o.max_queue) {
  ServingLoop::Options loop_options;
  loop_options.limits = o.limits;
  loop_options.max_ttft = o.max_ttft;
  loop_options.recover = o.recover;
  loop_options.compute_padding = o.compute_padding;
  loop_options.give_up = o.give_up;
  loop_options.drafter = o.drafter;
  if (o.draft_engine) {
    auto made = std::make_unique<FakeEngine>(*o.draft_engine);
    draft_engine = made.get();
    draft_engine->SetTimings({.compute = 1e-3});  // of the loop's engine nothing is known
    draft_model = std::make_unique<DraftModel>(
        std::move(made), DraftModel::Options{.pages = o.draft_engine->total_pages,
                                             .paging = o.draft_engine->paging(),
                                             .context = o.draft_context,
                                             .max_batch_tokens = o.draft_engine->max_batch_tokens,
                                             .on_failure = [this](const absl::Status& why) {
                                               draft_failures.push_back(why);
                                             }});
    TREADLE_CHECK(draft_model->Start().ok());
    loop_options.draft_model = draft_model.get();
  }
  loop = std::make_unique<LoopCore>(engine, kv, pool, *policy, ledger, clock, loop_options);
  free_at_first_ = kv.Capacity().free_pages;
  const absl::Status started = engine.Start([this] { pool.Wake(); });
  TREADLE_CHECK(started.ok());
}

RequestSpec LoopHarness::Spec(int32_t prompt, int32_t max_new, uint64_t seed) {
  RequestSpec spec;
  for (int32_t i = 0; i < prompt; ++i) {
    spec.prompt.push_back(static_cast<int32_t>((seed * 7 + static_cast<uint64_t>(i) * 13) % 61));
  }
  spec.max_new_tokens = max_new;
  spec.sampling.seed = seed;
  return spec;
}

Client& LoopHarness::Submit(RequestSpec spec) {
  auto submitted = pool.Submit(spec).value();
  auto client = std::make_unique<Client>();
  client->id = submitted.id;
  client->stream = submitted.stream;
  client->tokens.resize(static_cast<size_t>(spec.candidates));
  client->finish.resize(static_cast<size_t>(spec.candidates), FinishReason::kNone);
  client->spec = std::move(spec);
  clients.push_back(std::move(client));
  return *clients.back();
}

bool LoopHarness::Turn() {
  const bool busy = loop->Turn();
  CheckCounts();
  for (const auto& client : clients) client->Receive();
  return busy;
}

void LoopHarness::RunToIdle() {
  bool busy = true;
  while (busy) {
    busy = Turn();
    if (options.engine.manual) busy = engine.Complete() || busy;
    const bool reading = std::ranges::any_of(
        pool.live(), [](const auto& request) { return request->fetch != nullptr; });
    if (!reading) continue;
    TREADLE_CHECK(options.files->WaitIdle(Clock::now() + std::chrono::seconds(60)));
    busy = true;
  }
}

// The pool's counts are those of its requests.
void LoopHarness::CheckCounts() {
  PoolLoad counted;
  for (const auto& request : pool.live()) {
    if (request->state == RequestState::kFinished) continue;
    const bool begun = request->begun != Clock::time_point();
    ++(begun ? counted.running : counted.waiting);
    if (!begun && request->state == RequestState::kRunning) ++counted.reserved;
  }
  const PoolLoad said = pool.Load();
  if (said.waiting == counted.waiting && said.reserved == counted.reserved &&
      said.running == counted.running) {
    return;
  }
  miscounts_.push_back(Str("the pool says ", said.waiting, " (", said.reserved, ") wait and ",
                           said.running, " run, but they are ", counted.waiting, " (",
                           counted.reserved, ") and ", counted.running));
}

LoopHarness::~LoopHarness() {
  if (options.as_reference) EXPECT_THAT(Mistakes(), testing::IsEmpty());
}

std::vector<std::string> LoopHarness::Mistakes() const {
  std::vector<std::string> mistakes = engine.violations();
  mistakes.insert(mistakes.end(), miscounts_.begin(), miscounts_.end());
  bool live = false;
  for (const auto& client : clients) {
    if (const std::string mistake = client->Mistake(); !mistake.empty()) {
      mistakes.push_back(mistake);
    }
    live = live || !client->ended;
  }
  if (!live && engine.running_plans() == 0 && held_pages() != 0) {
    mistakes.push_back(Str(held_pages(), " pages are held by nobody"));
  }
  if (draft_model) {
    std::ranges::copy(draft_engine->violations(), std::back_inserter(mistakes));
    const KvCapacity capacity = draft_model->capacity();
    if (!live && engine.running_plans() == 0 && capacity.free_pages != capacity.total_pages) {
      mistakes.push_back("pages of the draft model are held by nobody");
    }
  }
  return mistakes;
}

std::vector<std::string> LoopHarness::TakePlanNames() {
  std::vector<std::string> names;
  for (const IterationPlan& plan : engine.TakePlans()) {
    std::string name;
    for (const SequenceStart& start : plan.starts) seeds[start.sequence] = start.sampling.seed;
    for (const Step& step : plan.steps) {
      name += static_cast<char>('A' + static_cast<int>(seeds.at(step.sequence)));
    }
    names.push_back(name);
  }
  return names;
}

LedgerEnd LoopHarness::EndOf(RequestId id) const {
  uint64_t next = 0;
  uint64_t lost = 0;
  for (const auto& record : ledger.Read(next, 1 << 16, lost)) {
    for (const LedgerEnd& end : record->ends) {
      if (end.request == id) return end;
    }
  }
  return {};
}

}  // namespace treadle
