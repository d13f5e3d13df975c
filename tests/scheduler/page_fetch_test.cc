// Prompts that begin with pages from files (engine/kv/page_files.h), in the serving loop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/status.h"
#include "kernels/op_cases/random.h"
#include "tests/scheduler/prefix_requests.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kPageSize = 4;
constexpr Clock::duration kPatience = std::chrono::seconds(60);

std::unique_ptr<PageFiles> Files(
    const std::string& folder, int64_t max_bytes = 64 << 20, std::string* warning = nullptr,
    std::function<double()> seconds = [] { return 0.0; }) {
  const auto warn = [warning](const std::string& what) {
    if (warning != nullptr) *warning += what;
  };
  return PageFiles::Open({.folder = folder,
                          .max_bytes = max_bytes,
                          .model = "fake",
                          .contents = "the fake engine",
                          .page_size = kPageSize,
                          .page_bytes = kPageSize * FakeEngine::kSlotBytes,
                          .warn = warn,
                          .seconds = std::move(seconds)})
      .value();
}

HarnessOptions Options(PageFiles* files) {
  HarnessOptions options = TwoTenants();
  options.files = files;
  return options;
}

class PageFetchTest : public testing::Test {
 protected:
  // Tokens of the prompt that a new server with these files finds.
  int32_t CachedAfterRestart(const RequestSpec& spec) {
    const auto files = Files(folder_.path());
    LoopHarness harness(Options(files.get()));
    const Client& client = harness.Submit(spec);
    harness.RunToIdle();
    EXPECT_EQ(TakeInputs(harness),
              std::ssize(spec.prompt) + spec.max_new_tokens - 1 - client.stream->cached_tokens());
    return client.stream->cached_tokens();
  }
  void Serve(const RequestSpec& spec) {
    const auto files = Files(folder_.path());
    LoopHarness harness(Options(files.get()));
    harness.Submit(spec);
    harness.RunToIdle();
  }

  Random random_{1};
  const TestFolder folder_;
};

TEST_F(PageFetchTest, ASecondTurnAfterARestartRunsWhatIsNew) {
  std::vector<int32_t> words = Draw(random_, 30);
  Serve(Ask(words, 2, 10));
  const std::vector<int32_t> answer = ReferenceOutput(Ask(words, 2, 10), 0);
  words.insert(words.end(), answer.begin(), answer.end());
  // 39 rows of the first turn, in pages of 4: 36 are whole.
  EXPECT_EQ(CachedAfterRestart(Ask(words, 4, 1)), 36);
}

TEST_F(PageFetchTest, OtherSaltsFindNothing) {
  const std::vector<int32_t> words = Draw(random_, 30);
  Serve(Ask(words, 1));
  EXPECT_EQ(CachedAfterRestart(Ask(words, 2)), 0);
  EXPECT_EQ(CachedAfterRestart(Ask(words, 3)), 28);
}

// Each page that is damaged, cut short, exchanged with another, of another version or gone ends
// what is found, and is counted.
TEST_F(PageFetchTest, WhatIsNotWholeIsAMiss) {
  const std::vector<int32_t> words = Draw(random_, 41);
  const auto pages = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      if (std::string name = entry.path().filename(); name.size() == 64) names.push_back(name);
    }
    std::ranges::sort(names);
    return names;
  };
  Serve(Ask(words, 0, 1));
  ASSERT_EQ(pages().size(), 10u);
  for (int way = 0; way < 40; ++way) {
    const std::vector<std::string> names = pages();
    const std::string& name = names[static_cast<size_t>(random_.Below(10))];
    std::string bytes = folder_.Read(name);
    if (way % 5 == 0) bytes.resize(static_cast<size_t>(random_.Below(std::ssize(bytes))));
    if (way % 5 == 1) bytes[static_cast<size_t>(random_.Below(std::ssize(bytes)))] ^= 1;
    if (way % 5 == 2) bytes += '\0';
    if (way % 5 == 3) bytes = folder_.Read(names[name == names[0] ? 1 : 0]);
    if (way % 5 == 4) {
      std::filesystem::remove(folder_ / name);
    } else {
      folder_.Write(name, bytes);
    }
    std::string warning;
    const auto files = Files(folder_.path(), 64 << 20, &warning);
    LoopHarness harness(Options(files.get()));
    const Client& client = harness.Submit(Ask(words, 2, 1));
    harness.RunToIdle();
    EXPECT_LT(client.stream->cached_tokens(), 40) << "way " << way;
    ASSERT_TRUE(files->WaitIdle(Clock::now() + kPatience));
    EXPECT_EQ(pages().size(), 10u) << "it is stored again";
    if (way % 5 == 4) continue;  // what is not listed is not looked for
    EXPECT_EQ(files->counters().misses, 1) << "way " << way;
    EXPECT_THAT(warning, HasSubstr(name + " is damaged or gone"));
  }
}

// The clock of files whose reading stands still while it is closed.
class Gate {
 public:
  double Seconds() {
    MutexLock lock(mutex_);
    while (closed_) opened_.Wait(mutex_);
    return 0;
  }
  void Set(bool closed) {
    MutexLock lock(mutex_);
    closed_ = closed;
    opened_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar opened_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// While pages are read for the first that waits, those behind it wait, too, and who runs goes on.
// It waits no longer than it may.
TEST_F(PageFetchTest, NobodyIsOvertakenAndWhoRunsGoesOn) {
  const std::vector<int32_t> words = Draw(random_, 30);
  Serve(Ask(words, 2));
  for (const bool in_time : {true, false}) {
    Gate gate;
    const auto files = Files(folder_.path(), 64 << 20, nullptr, [&] { return gate.Seconds(); });
    LoopHarness harness(Options(files.get()));
    const Client& running = harness.Submit(Ask(Draw(random_, 5), 4, 20));
    harness.Turn();
    gate.Set(true);
    const Client& first = harness.Submit(Ask(words, 6));
    harness.Submit(Ask(Draw(random_, 5), 8));
    const size_t before = running.tokens[0].size();
    for (int turn = 0; turn < 5; ++turn) harness.Turn();
    EXPECT_EQ(harness.pool.Load().waiting, 2);
    EXPECT_GT(running.tokens[0].size(), before);
    if (!in_time) harness.clock.Advance(PageFetches::kMaxWait);
    if (!in_time) harness.Turn();
    gate.Set(false);
    harness.RunToIdle();
    EXPECT_EQ(first.stream->cached_tokens(), in_time ? 28 : 0);
  }
}

// Iterations of 30 rows that take a millisecond a row, and a clock by which reading a page takes
// more or less than its four.
TEST_F(PageFetchTest, NothingIsReadThatIsComputedSooner) {
  const std::vector<int32_t> words = Draw(random_, 30);
  for (const double step : {0.005, 0.003}) {
    const TestFolder folder;
    double now = 0;
    const auto seconds = [&] { return now += step; };
    auto files = Files(folder.path(), 64 << 20, nullptr, seconds);
    {
      HarnessOptions options = Options(files.get());
      options.limits.max_batch_tokens = 64;
      LoopHarness harness(options);
      harness.engine.SetTimings({.compute = 0.030});
      harness.Submit(Ask(words, 0, 1));
      harness.RunToIdle();
      EXPECT_NEAR(files->costs().compute, 0.004, 1e-9);
    }
    files.reset();
    files = Files(folder.path(), 64 << 20, nullptr, seconds);
    LoopHarness harness(Options(files.get()));
    const Client& client = harness.Submit(Ask(words, 2, 1));
    harness.RunToIdle();
    EXPECT_EQ(client.stream->cached_tokens(), step > 0.004 ? 0 : 28);
  }
}

// The loop is drained once the engine has given what is to be stored.
TEST_F(PageFetchTest, ADrainWaitsForWhatIsStored) {
  const std::vector<int32_t> words = Draw(random_, 30);
  {
    const auto files = Files(folder_.path());
    HarnessOptions options = Options(files.get());
    options.engine.manual = true;
    LoopHarness harness(options);
    const Client& client = harness.Submit(Ask(words, 0, 1));
    harness.Turn();
    harness.pool.Drain();
    while (!client.ended) {
      EXPECT_FALSE(harness.loop->drained());
      harness.CompleteAndTurn();
    }
    EXPECT_FALSE(harness.loop->drained());
    harness.CompleteAndTurn();
    EXPECT_TRUE(harness.loop->drained());
  }
  EXPECT_EQ(CachedAfterRestart(Ask(words, 2)), 28);
}

TEST_F(PageFetchTest, WhatIsFlushedIsGoneFromFiles) {
  const std::vector<int32_t> words = Draw(random_, 30);
  {
    const auto files = Files(folder_.path());
    LoopHarness harness(Options(files.get()));
    harness.Submit(Ask(words, 0, 1));
    harness.RunToIdle();
    harness.pool.ForgetCached();
    harness.RunToIdle();
    const Client& client = harness.Submit(Ask(words, 2, 1));
    ASSERT_TRUE(files->WaitIdle(Clock::now() + kPatience));
    harness.RunToIdle();
    EXPECT_EQ(client.stream->cached_tokens(), 0);
    harness.pool.ForgetCached();
    harness.RunToIdle();
  }
  EXPECT_EQ(CachedAfterRestart(Ask(words, 4)), 0);
}

// Requests of tenants with prompts in common, a cache too small for them, files that make room for
// others, are damaged, and outlive servers; engines that fail, clients that leave.
TEST_F(PageFetchTest, RandomHistoriesHold) {
  int64_t hits = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const TestFolder folder;
    const std::vector<int32_t> system = Draw(random, 24);
    std::vector<std::vector<int32_t>> said(6, system);
    for (int server = 0; server < 3; ++server) {
      for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        const std::string name = entry.path().filename();
        if (name.size() != 64 || random.Below(8) > 0) continue;
        std::string bytes = folder.Read(name);
        bytes[static_cast<size_t>(random.Below(std::ssize(bytes)))] ^= 4;
        folder.Write(name, bytes);
      }
      const auto files = Files(folder.path(), (1 + random.Below(40)) * 4096);
      HarnessOptions options = Options(files.get());
      options.engine.total_pages = 40;
      options.engine.manual = random.Below(2) == 0;
      options.engine.depth = static_cast<int>(1 + random.Below(2));
      options.limits.max_batch_tokens = 5 + random.Below(30);
      LoopHarness harness(options);
      for (int round = 0; round < 12; ++round) {
        const auto who = static_cast<size_t>(random.Below(std::ssize(said)));
        std::vector<int32_t>& words = said[who];
        const auto more = Draw(random, 1 + random.Below(6));
        words.insert(words.end(), more.begin(), more.end());
        RequestSpec spec = Ask(words, who, static_cast<int32_t>(1 + random.Below(8)));
        if (random.Below(4) == 0) spec.candidates = 2;
        if (random.Below(8) == 0) spec.prompt_logprobs = 0;
        harness.Submit(spec);
        if (std::ssize(words) > 70) words = system;
        for (int64_t turns = random.Below(4); turns > 0; --turns) {
          harness.Turn();
          if (options.engine.manual) harness.engine.Complete();
        }
        if (random.Below(6) == 0) harness.engine.Fail(absl::DataLossError("a test"));
        if (random.Below(6) == 0) harness.RunToIdle();
        if (random.Below(12) == 0) {
          harness.pool.Cancel(harness.clients.back()->id, absl::CancelledError("a test"));
        }
      }
      harness.RunToIdle();
      EXPECT_THAT(harness.Mistakes(), IsEmpty()) << "seed " << seed;
      ASSERT_TRUE(files->WaitIdle(Clock::now() + kPatience));
      EXPECT_LE(files->counters().bytes, 40 * 4096);
      hits += files->counters().hits;
    }
  }
  EXPECT_GT(hits, 600);
}

}  // namespace
}  // namespace treadle
