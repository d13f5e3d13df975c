// A session as a front end meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "base/status.h"
#include "server/constraint/constraint_compiler.h"
#include "tests/server/session/session_harness.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Takes as long as the test wants, and then refuses.
class SlowCompiler final : public ConstraintCompiler {
 public:
  bool Works() const override { return true; }
  void ReadAhead(std::function<void()>) override {}
  bool Keeps(const Constraint& constraint) override { return constraint.text == "kept"; }
  absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(
      const Constraint& constraint) override {
    if (!Keeps(constraint)) gone_.wait();
    return InvalidArgument("is refused in the end");
  }
  std::promise<void>& go() { return go_; }

 private:
  std::promise<void> go_;
  const std::shared_future<void> gone_ = go_.get_future().share();
};

TEST_F(SessionTest, NobodyWaitsForAnothersConstraint) {
  auto slow = std::make_unique<SlowCompiler>();
  std::promise<void>& go = slow->go();
  constraints_ = std::move(slow);
  Open({});
  const auto begin = [this](const std::string& constraint, size_t bytes = 100) -> FakeFrontEnd& {
    GenerateRequest request = Request(4);
    if (!constraint.empty()) {
      request.stopping.ignore_eos = false;
      request.constraint = Constraint{.kind = Constraint::Kind::kRegex, .text = constraint};
    }
    sessions_.push_back(std::make_shared<FakeFrontEnd>(*environment_, false));
    sessions_.back()->Start({}, bytes, [request] { return request; });
    return *sessions_.back();
  };
  FakeFrontEnd& waits = begin("a");
  FakeFrontEnd& waits_too = begin("a");
  while (environment_->pool_of_work.counts()->running < 1) std::this_thread::yield();
  for (const size_t bytes : {100, 100, 100'000}) {  // a long one, too
    EXPECT_TRUE(begin("", bytes).WaitOver().end.has_value());
  }
  EXPECT_TRUE(begin("kept").WaitOver().failed.has_value());
  EXPECT_FALSE(waits.seen().over());
  go.set_value();
  for (FakeFrontEnd* each : {&waits, &waits_too}) {
    EXPECT_THAT(std::string(each->WaitOver().failed->message()), HasSubstr("refused in the end"));
  }
}

TEST(FairShare, IsOfAKeyOrOfAnAddress) {
  RequestOrigin origin{.client = "ipv4:10.0.0.1:5000"};
  EXPECT_EQ(FairShareOf(origin), "ipv4:10.0.0.1");
  origin.client = "ipv6:[2001:db8::1]:5000";
  EXPECT_EQ(FairShareOf(origin), "ipv6:[2001:db8::1]");
  origin.key = "team";
  origin.owner = "name team";
  EXPECT_EQ(FairShareOf(origin), "name team");
}

TEST_F(SessionTest, TheAnswerComesInOrder) {
  Open({.manual = true});
  const GenerateRequest request = Request(12);
  FakeFrontEnd& session = Ask(request);
  for (size_t tokens = 1; tokens <= 12; ++tokens) {
    RunUntil(session, [=](const auto& seen) { return seen.ids.size() >= tokens; });
  }
  const auto seen = session.WaitOver();
  EXPECT_FALSE(seen.failed) << *seen.failed;
  EXPECT_TRUE(seen.prompt_first);
  EXPECT_EQ(seen.seed, 77u);
  EXPECT_EQ(seen.max_new_tokens, 12);
  EXPECT_EQ(seen.ids, Answer(request));
  EXPECT_EQ(seen.last.finish, FinishReason::kLength);
  ASSERT_TRUE(seen.end);
  EXPECT_EQ(seen.end->prompt_tokens, 5);
  EXPECT_EQ(seen.end->completion_tokens, 12);
  EXPECT_GE(seen.end->timings.total, seen.end->timings.first_token);
  EXPECT_EQ(Logged(0).name, "request_finished");
}

TEST_F(SessionTest, SeedsAreDrawnFromAll64Bits) {
  Open({});
  GenerateRequest request = Request(1);
  request.sampling.seed.reset();
  uint64_t high = 0;
  std::set<uint64_t> seeds;
  for (int i = 0; i < 8; ++i) {
    const uint64_t seed = Ask(request).WaitOver().seed;
    high |= seed >> 32;
    seeds.insert(seed);
  }
  EXPECT_NE(high, 0u);
  EXPECT_EQ(seeds.size(), 8u);
}

TEST_F(SessionTest, WhatIsWrongIsRefusedAtOnce) {
  Open({.manual = true}, {.max_batch_size = 1, .max_batch_tokens = 32, .max_queue = 1});
  GenerateRequest wrong = Request(5);
  wrong.request_id = "wrong";
  wrong.sampling.parameters.top_p = 1.5f;
  const auto seen = Ask(wrong).seen();
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(*seen.failed, absl::InvalidArgumentError("sampling.top_p is 1.5, expected (0, 1]"));
  EXPECT_EQ(seen.writes, 0);
  EXPECT_EQ(Logged(0).name, "request_refused");
  EXPECT_EQ(std::get<std::string>(Logged(0).fields.at(0).value), "wrong");

  FakeFrontEnd& runs = Ask(Request(5));
  ASSERT_TRUE(WaitLoad(1, 0));
  FakeFrontEnd& waits = Ask(Request(5));
  ASSERT_TRUE(WaitLoad(1, 1));
  const auto full = Ask(Request(5)).seen();
  ASSERT_TRUE(full.failed);
  EXPECT_EQ(full.failed->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Run(runs).end);
  EXPECT_TRUE(Run(waits).end);
}

TEST_F(SessionTest, OfSomebodyUnknownNothingIsRead) {
  const std::string path = testing::TempDir() + "session_test_keys";
  std::ofstream(path) << "alice-0123456789abcdef alice - 20\n";
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(path, {}));
  Open({}, {}, kPatience, keys.get());
  bool read = false;
  sessions_.push_back(std::make_shared<FakeFrontEnd>(*environment_, false));
  sessions_[0]->Start({.origin = {}, .authorization = "Bearer nobody-0123456789abcdef"}, 1, [&] {
    read = true;
    return Request(5);
  });
  ASSERT_TRUE(sessions_[0]->seen().failed);
  EXPECT_EQ(sessions_[0]->seen().failed->code(), absl::StatusCode::kUnauthenticated);
  EXPECT_FALSE(read);

  // The prompt is charged before, the answer after: 5 + 100 of 20 tokens are a debt.
  const Caller alice{.origin = {}, .authorization = "Bearer alice-0123456789abcdef"};
  EXPECT_TRUE(Ask(Request(100), alice).WaitOver().end);
  const auto seen = Ask(Request(1), alice).seen();
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(seen.failed->code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(SessionTest, ADeadlineInTheQueueIsAnEnd) {
  Open({.manual = true}, {.max_batch_size = 1, .max_batch_tokens = 32});
  FakeFrontEnd& runs = Ask(Request(5));
  ASSERT_TRUE(WaitLoad(1, 0));
  Caller caller;
  caller.deadline = caller.arrival + milliseconds(50);
  const auto seen = Ask(Request(5), caller).WaitOver();
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(seen.failed->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(seen.writes, 0);
  EXPECT_TRUE(Run(runs).end);
}

TEST_F(SessionTest, AfterCancelNothingIsWritten) {
  Open({.manual = true});
  FakeFrontEnd& session = Ask(Request(50));
  for (size_t tokens = 1; tokens <= 3; ++tokens) CompleteOne(session, tokens);
  session.Cancel();
  const int writes = session.seen().writes;
  const auto seen = Run(session);
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(seen.failed->code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(seen.failed->message()), HasSubstr("cancelled or disconnected"));
  EXPECT_EQ(seen.writes, writes);
  EXPECT_EQ(Logged(0).name, "request_finished");
  EXPECT_TRUE(WaitLoad(0, 0));
  EXPECT_EQ(engine_->violations(), std::vector<std::string>{});
}

// The stream told of its end during the write, and does not tell again.
TEST_F(SessionTest, AWriteThatFailsOnceTheEndHasComeEndsTheSession) {
  Open({.manual = true});
  GenerateRequest request = Request(4);
  request.sampling.num_candidates = 2;
  FakeFrontEnd& session = Ask(request, {}, /*slow=*/true);
  const auto complete = [&](int plans) {
    const auto deadline = Clock::now() + kPatience;
    while (plans > 0 && Clock::now() < deadline) {
      engine_->Complete() ? void(--plans) : std::this_thread::sleep_for(milliseconds(1));
    }
    std::this_thread::sleep_for(milliseconds(20));  // so that the courier has been here
  };
  complete(1);
  session.WaitFor([](const auto& seen) { return seen.writes >= 1; });
  complete(2);
  session.Written(true);  // what is new of both candidates: two writes
  complete(2);
  EXPECT_TRUE(WaitLoad(0, 0));
  session.Written(false);
  const auto seen = session.WaitFor([](const auto& what) { return what.over(); });
  EXPECT_TRUE(seen.failed);
}

// A client whose own timer rings just before ours waited for the deadline.
TEST_F(SessionTest, HangingUpAtTheDeadlineIsTheDeadline) {
  Open({.manual = true});
  Caller caller;
  caller.arrival = Clock::now() - std::chrono::minutes(10);
  caller.deadline = Clock::now() + std::chrono::seconds(5);
  FakeFrontEnd& session = Ask(Request(50), caller);
  session.Cancel();
  const auto seen = Run(session);
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(*seen.failed, absl::DeadlineExceededError("the deadline passed"));
}

TEST_F(SessionTest, AStopStringAcrossTokensEndsTheAnswer) {
  Open({});
  GenerateRequest request = Request(100);
  const std::vector<int32_t> ids = Answer(request);
  std::string text;
  size_t border = 0;  // where token 20 begins
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i == 20) border = text.size();
    text += stack_->model().tokenizer->TokenBytes(ids[i], false);
  }
  const std::string stop = text.substr(border - 2, 4);
  request.stopping.stop_strings = {"not there", stop};
  const auto seen = Ask(request).WaitOver();
  ASSERT_TRUE(seen.end);
  EXPECT_EQ(seen.text, text.substr(0, text.find(stop)));
  EXPECT_EQ(seen.last.finish, FinishReason::kStopString);
  EXPECT_EQ(seen.last.stop_string, stop);
  EXPECT_LE(seen.ids.size(), 24u);
  EXPECT_EQ(seen.end->completion_tokens, static_cast<int32_t>(seen.ids.size()));
}

TEST_F(SessionTest, WhatComesDuringAWriteComesTogetherAfterIt) {
  Open({.manual = true});
  const GenerateRequest request = Request(30);
  FakeFrontEnd& session = Ask(request, {}, /*slow=*/true);
  RunUntil(session, [](const auto& seen) { return seen.writes > 0; });
  while (stack_->pool().Load().running > 0) {  // the loop waits for nobody
    if (!engine_->Complete()) std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(session.seen().writes, 1);
  for (int writes = 1; !session.seen().over(); ++writes) {
    session.Written(true);
    session.WaitFor([=](const auto& seen) { return seen.writes > writes; });
  }
  const auto seen = session.seen();
  EXPECT_LE(seen.writes, 3);  // the end may come alone
  EXPECT_EQ(seen.ids, Answer(request));
  EXPECT_TRUE(seen.prompt_first);
}

TEST_F(SessionTest, AReaderThatStallsIsCutOff) {
  Open({.manual = true}, {}, milliseconds(50));
  FakeFrontEnd& session = Ask(Request(190), {}, /*slow=*/true);
  RunUntil(session, [](const auto& seen) { return seen.writes == 1; });
  EXPECT_TRUE(session.WaitFor([](const auto& seen) { return seen.broken; }).broken);
  EXPECT_FALSE(session.seen().over());  // the write is still under way
  session.Written(false);
  const auto seen = Run(session);
  ASSERT_TRUE(seen.failed);
  EXPECT_EQ(*seen.failed, absl::CancelledError("the client did not read (--stream-stall-timeout)"));
  EXPECT_EQ(seen.writes, 1);
  EXPECT_TRUE(WaitLoad(0, 0));
}

}  // namespace
}  // namespace treadle
