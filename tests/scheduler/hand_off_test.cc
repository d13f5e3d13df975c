// Parts that cross threads: the pool, the token stream, the ledger, and the loop on its own thread.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/status.h"
#include "kernels/op_cases/random.h"
#include "scheduler/serving_loop.h"
#include "tests/scheduler/loop_harness.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using testing::HasSubstr;

TEST(TokenStream, GivesEverythingOnceAndKeepsTheEnd) {
  TokenStream stream(3);
  int notified = 0;
  stream.Push({.candidate = 0, .token = 7, .detail = {}, .finish = FinishReason::kNone});
  stream.SetNotifier([&] { ++notified; });
  EXPECT_EQ(notified, 1) << "at once, with what is there";
  stream.Push({.candidate = 0, .token = 8, .detail = {}, .finish = FinishReason::kNone});
  EXPECT_EQ(notified, 1) << "the reader was told";
  EXPECT_EQ(stream.Take().tokens.size(), 2u);
  EXPECT_TRUE(stream.Take().tokens.empty());
  stream.PushPrompt(std::vector<TokenDetail>(1));
  EXPECT_EQ(notified, 2);
  stream.End(absl::CancelledError("gone"), {.queued = 1, .first_token = 2, .total = 3});
  EXPECT_EQ(notified, 3);
  EXPECT_EQ(stream.Take().prompt_detail.size(), 1u);
  const StreamBatch last = stream.Take();
  EXPECT_TRUE(last.ended && last.tokens.empty());
  EXPECT_EQ(last.status.message(), "gone");
  EXPECT_EQ(last.timings.total, 3);
}

TEST(RequestPool, BoundCountsWhatTheLoopHasNotTakenYet) {
  RequestPool pool(2);
  const RequestSpec spec = LoopHarness::Spec(1, 1, 0);
  EXPECT_TRUE(pool.Submit(spec).ok());
  EXPECT_TRUE(pool.Submit(spec).ok());
  EXPECT_EQ(pool.Submit(spec).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.TakeInbox().arrivals.size(), 2u);
  EXPECT_EQ(pool.Load().waiting, 2);
  EXPECT_EQ(pool.Submit(spec).status().code(), absl::StatusCode::kResourceExhausted);
  pool.NoteCounts(1, 0, 1);
  EXPECT_TRUE(pool.Submit(spec).ok());
  EXPECT_EQ(pool.Load().running, 1);
}

TEST(RequestPool, WaitEndsWithNewsAWakeOrTheDeadline) {
  RequestPool pool(2);
  pool.WaitForNews(Clock::now());
  pool.Wake();
  pool.WaitForNews(Clock::now() + hours(1));
  pool.Cancel(5, absl::CancelledError(""));
  pool.WaitForNews(Clock::now() + hours(1));
  EXPECT_EQ(pool.TakeInbox().commands.size(), 1u);
  std::thread other([&] { ASSERT_TRUE(pool.Submit(LoopHarness::Spec(1, 1, 0)).ok()); });
  pool.WaitForNews(Clock::now() + hours(1));
  other.join();
}

TEST(Ledger, ReaderThatFellBehindLearnsWhatItMissed) {
  Ledger ledger(4);
  uint64_t next = 0;
  uint64_t lost = 0;
  for (uint64_t i = 0; i < 6; ++i) {
    LedgerRecord record;
    record.iteration = i;
    ledger.Append(std::move(record));
  }
  const auto records = ledger.Read(next, 3, lost);
  EXPECT_EQ(lost, 2u);
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0]->iteration, 2u);
  EXPECT_EQ(next, 5u);
  EXPECT_TRUE(ledger.WaitFor(5, Clock::now()));
  EXPECT_FALSE(ledger.WaitFor(6, Clock::now()));
  std::atomic<bool> stop = false;
  std::thread stopper([&] {
    stop = true;
    ledger.Wake();
  });
  EXPECT_FALSE(ledger.WaitFor(6, Clock::now() + hours(1), &stop));
  stopper.join();
}

TEST(Ledger, JsonIsOneEscapedLine) {
  LedgerRecord record;
  record.arrivals = {{2, 9}, {3, 4}};
  record.members = {{1, 5, true}, {2, 1, false}};
  record.ends.resize(1);
  record.ends[0].client_id = "a\"b\\c\n";
  record.ends[0].reason = "stop";
  const std::string json = Ledger::ToJson(record);
  EXPECT_THAT(json, HasSubstr("\"request_id\":\"a\\\"b\\\\c\\u000a\""));
  EXPECT_THAT(json, HasSubstr("\"arrivals\":[{\"request\":2,\"prompt_tokens\":9},{\"request\":3,"));
  EXPECT_THAT(json, HasSubstr("{\"request\":2,\"tokens\":1,\"phase\":\"increment\"}]"));
  EXPECT_EQ(json.find('\n'), std::string::npos);
}

TEST(Ledger, JsonSaysWhereTheTimeOfAPipelineWent) {
  LedgerRecord record;
  record.receive = 0.25;
  record.bubble = 0.5;
  record.stages = 3;
  const std::string json = Ledger::ToJson(record);
  EXPECT_THAT(json, HasSubstr(",\"receive\":0.25,"));
  EXPECT_THAT(json, HasSubstr(",\"bubble\":0.5"));
  EXPECT_THAT(json, HasSubstr(",\"stages\":3,"));
}

TEST(Ledger, JsonSaysHowRowsWereSpreadOverExperts) {
  LedgerRecord record;
  EXPECT_EQ(Ledger::ToJson(record).find("experts"), std::string::npos);
  record.experts = {.layers = 4, .rows = 256, .used = 90, .most_rows = 7};
  EXPECT_THAT(Ledger::ToJson(record),
              HasSubstr(",\"experts\":{\"layers\":4,\"rows\":256,\"used\":90,\"most_rows\":7}"));
}

// A serving loop on its own thread.
struct Threaded {
  explicit Threaded(const TimeSource& time, int64_t max_queue = 10'000)
      : kv(64, 4), pool(max_queue), policy(Policy::Create("fcfs").value()) {
    ServingLoop::Options options;
    options.limits = {.max_batch_size = 8, .max_batch_tokens = 64};
    loop = std::make_unique<ServingLoop>(engine, kv, pool, *policy, ledger, time, options);
  }

  FakeEngine engine{{.depth = 2, .page_size = 4, .total_pages = 64}};
  KvSlotManager kv;
  RequestPool pool;
  Ledger ledger;
  std::unique_ptr<Policy> policy;
  std::unique_ptr<ServingLoop> loop;
};

// Everything of one request, as an in-process client reads it.
StreamBatch ReadAll(TokenStream& stream) {
  StreamBatch all;
  struct Bell {
    Mutex mutex;
    CondVar rung;
    bool news = false;
  };
  const auto bell = std::make_shared<Bell>();  // the last ring may outlast the reader
  stream.SetNotifier([bell] {
    MutexLock lock(bell->mutex);
    bell->news = true;
    bell->rung.NotifyAll();
  });
  while (!all.ended) {
    {
      MutexLock lock(bell->mutex);
      while (!bell->news) {
        EXPECT_TRUE(bell->rung.WaitUntil(bell->mutex, Clock::now() + seconds(60)));
      }
      bell->news = false;
    }
    StreamBatch batch = stream.Take();
    for (StreamToken& token : batch.tokens) all.tokens.push_back(std::move(token));
    all.ended = batch.ended;
    all.status = batch.status;
  }
  return all;
}

TEST(ServingLoop, ManyClientsSubmitCancelAndFinish) {
  Threaded server(TimeSource::Steady());
  ASSERT_TRUE(server.loop->Start().ok());
  std::vector<std::thread> clients;
  for (uint64_t c = 0; c < 6; ++c) {
    clients.emplace_back([&server, c] {
      Random random(c);
      for (uint64_t i = 0; i < 40; ++i) {
        RequestSpec spec =
            LoopHarness::Spec(static_cast<int32_t>(1 + random.Below(9)),
                              static_cast<int32_t>(1 + random.Below(20)), 100 * c + i);
        ASSERT_OK_AND_ASSIGN(const auto submitted, server.pool.Submit(spec));
        const int64_t fate = random.Below(4);
        if (fate == 0) server.pool.Cancel(submitted.id, absl::CancelledError("gone"));
        if (fate == 1) server.pool.FinishCandidate(submitted.id, 0);
        std::vector<int32_t> tokens;
        const StreamBatch all = ReadAll(*submitted.stream);
        for (const StreamToken& token : all.tokens) {
          if (token.token >= 0) tokens.push_back(token.token);
        }
        std::vector<int32_t> expected = ReferenceOutput(spec, 0);
        if (fate > 1) {
          EXPECT_TRUE(all.status.ok());
          EXPECT_EQ(tokens, expected);
        }
        ASSERT_LE(tokens.size(), expected.size());
        expected.resize(tokens.size());
        EXPECT_EQ(tokens, expected);
      }
    });
  }
  std::thread watcher([&server] {
    uint64_t next = 0;
    uint64_t lost = 0;
    while (server.ledger.WaitFor(next, Clock::now() + seconds(60))) {
      const auto records = server.ledger.Read(next, 100, lost);
      if (server.pool.Load().draining) return;
    }
  });
  for (std::thread& client : clients) client.join();
  server.pool.Drain();
  EXPECT_TRUE(server.loop->WaitDrained(Clock::now() + seconds(60)));
  EXPECT_GT(server.loop->turns(), 0u);
  server.loop->Stop(absl::UnavailableError("done"));
  watcher.join();
  EXPECT_THAT(server.engine.violations(), testing::IsEmpty());
  EXPECT_EQ(server.kv.Capacity().free_pages, 64);
}

TEST(ServingLoop, DeadlineOfAnInjectedClockEndsARequestThatWaits) {
  FakeClock clock;
  Threaded server(clock);
  ASSERT_TRUE(server.loop->Start().ok());
  // More pages than there are: the server would refuse it, the loop lets it wait.
  RequestSpec spec = LoopHarness::Spec(200, 100, 0);
  spec.deadline = clock.Now() + hours(1);
  ASSERT_OK_AND_ASSIGN(const auto submitted, server.pool.Submit(spec));
  clock.Advance(hours(1));
  server.pool.Wake();
  EXPECT_EQ(ReadAll(*submitted.stream).status.code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ServingLoop, StopEndsWhatIsLeftAndRefusesTheRest) {
  FakeClock clock;
  Threaded server(clock);
  const auto before = server.pool.Submit(LoopHarness::Spec(200, 100, 0));
  ASSERT_TRUE(server.loop->Start().ok());
  EXPECT_FALSE(server.loop->WaitDrained(Clock::now()));
  server.loop->Stop(absl::UnavailableError("stopping"));
  server.loop->Stop(absl::UnavailableError("again"));
  EXPECT_EQ(ReadAll(*before->stream).status.message(), "stopping");
  EXPECT_EQ(server.pool.Submit(LoopHarness::Spec(1, 1, 0)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(ServingLoop, StopWithoutStartEndsWhatIsQueued) {
  FakeClock clock;
  Threaded server(clock);
  const auto queued = server.pool.Submit(LoopHarness::Spec(2, 2, 0));
  server.loop.reset();
  EXPECT_EQ(ReadAll(*queued->stream).status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace treadle
