// A session as a front end meets it, without any protocol: a front end that keeps what it is given
// and is as slow as the test wants, over an engine that is held.
#include "server/session/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "base/status.h"
#include "server/constraint/constraint_compiler.h"
#include "server/serving_stack.h"
#include "tests/server/letter_tokenizer.h"
#include "tests/support/fake_engine.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};
constexpr int32_t kVocab = 64;

class FakeFrontEnd final : public Session {
 public:
  FakeFrontEnd(SessionEnvironment& environment, bool slow) : Session(environment), slow_(slow) {}

  // What it was given so far.
  struct Seen {
    int writes = 0;
    bool prompt_first = true;  // with the first event, and only there
    std::string text;
    std::vector<int32_t> ids;
    std::vector<size_t> sizes;  // ids in each write
    OutputPart last;
    uint64_t seed = 0;
    int32_t max_new_tokens = 0;
    std::optional<SessionEvent::End> end;
    std::optional<absl::Status> failed;
    bool broken = false;

    bool over() const { return end.has_value() || failed.has_value(); }
  };
  Seen seen() {
    MutexLock lock(seen_mutex_);
    return seen_;
  }
  // Waits until `enough` is true of it; what it was then, or at the end of the patience.
  template <typename Enough>
  Seen WaitFor(const Enough& enough) {
    const auto deadline = Clock::now() + kPatience;
    MutexLock lock(seen_mutex_);
    while (!enough(seen_) && changed_.WaitUntil(seen_mutex_, deadline)) {
    }
    return seen_;
  }
  Seen WaitOver() {
    return WaitFor([](const Seen& seen) { return seen.over(); });
  }

 private:
  bool Write(const SessionEvent& event) override {
    MutexLock lock(seen_mutex_);
    EXPECT_FALSE(seen_.over());
    seen_.prompt_first &= (event.prompt != nullptr) == (seen_.writes == 0);
    ++seen_.writes;
    if (event.prompt) {
      seen_.seed = event.prompt->request.sampling.seed;
      seen_.max_new_tokens = event.prompt->request.max_new_tokens;
    }
    if (event.output) {
      seen_.last = *event.output;
      seen_.text += event.output->text;
      seen_.ids.insert(seen_.ids.end(), event.output->token_ids.begin(),
                       event.output->token_ids.end());
      seen_.sizes.push_back(event.output->token_ids.size());
    }
    if (event.end) seen_.end = *event.end;
    changed_.NotifyAll();
    return !slow_;
  }
  void Fail(const absl::Status& status) override {
    MutexLock lock(seen_mutex_);
    EXPECT_FALSE(seen_.over());
    seen_.failed = status;
    changed_.NotifyAll();
  }
  void BreakWrite() override {
    MutexLock lock(seen_mutex_);
    seen_.broken = true;
    changed_.NotifyAll();
  }

  const bool slow_;
  Mutex seen_mutex_;
  CondVar changed_;
  Seen seen_ ABSL_GUARDED_BY(seen_mutex_);
};

class SessionTest : public testing::Test {
 protected:
  void Open(FakeEngineOptions engine, SchedulingOptions scheduling = {},
            milliseconds stall_timeout = kPatience, const ApiKeys* keys = nullptr) {
    ServedModel model;
    model.name = "fake";
    model.vocab = kVocab;
    model.max_context = 200;
    model.kv_pages = engine.total_pages;
    model.paging.page_size = engine.page_size;
    model.tokenizer = LetterTokenizer::Make(kVocab);
    model.end_ids = model.tokenizer->spec().end_ids;
    model.constraints = std::move(constraints_);
    auto made = std::make_unique<FakeEngine>(engine);
    engine_ = made.get();
    auto stack = ServingStack::Create(std::move(model), std::move(made), scheduling);
    ASSERT_TRUE(stack.ok());
    stack_ = *std::move(stack);
    ASSERT_TRUE(stack_->Start().ok());
    const LogSink sink = [this](LogEvent event) {
      MutexLock lock(log_mutex_);
      logged_.push_back(std::move(event));
    };
    environment_.reset(new SessionEnvironment{.model = stack_->model(),
                                              .pool = stack_->pool(),
                                              .stall_timeout = stall_timeout,
                                              .keys = keys,
                                              .request_log = RequestLog(sink, "fake")});
  }
  void TearDown() override {
    if (!environment_) return;
    stack_->Stop(absl::UnavailableError("the test is over"));
    for (auto& session : sessions_) session->WaitOver();
    for (auto& session : sessions_) session->Release();
    EXPECT_TRUE(environment_->calls.WaitZero(Clock::now()));
  }

  FakeFrontEnd& Ask(const GenerateRequest& request, Caller caller = {}, bool slow = false) {
    sessions_.push_back(std::make_shared<FakeFrontEnd>(*environment_, slow));
    sessions_.back()->Start(std::move(caller), 100, [request] { return request; });
    // So that requests come in the order in which they are asked.
    while (environment_->pool_of_work.bytes() > 0) std::this_thread::yield();
    return *sessions_.back();
  }
  static GenerateRequest Request(int32_t new_tokens) {
    GenerateRequest request{.prompt = std::vector<int32_t>{3, 1, 4, 1, 5}};
    request.sampling.seed = 77;
    request.stopping.max_new_tokens = new_tokens;
    request.stopping.ignore_eos = true;
    return request;
  }
  // What the engine answers to it.
  std::vector<int32_t> Answer(const GenerateRequest& request) const {
    const auto valid = ValidateRequest(request, stack_->model(), {}, 0);
    return ReferenceOutput(valid->spec, 0);
  }
  bool WaitLoad(int64_t running, int64_t waiting) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      const PoolLoad load = stack_->pool().Load();
      if (load.running == running && load.waiting == waiting) return true;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return false;
  }
  // Lets plans complete until `enough` is true of what the session gave; what that was.
  template <typename Enough>
  FakeFrontEnd::Seen RunUntil(FakeFrontEnd& session, const Enough& enough) {
    const auto deadline = Clock::now() + kPatience;
    while (!enough(session.seen()) && Clock::now() < deadline) {
      if (!engine_->Complete()) std::this_thread::sleep_for(milliseconds(1));
    }
    return session.seen();
  }
  // One plan, and waits until the session has given so many tokens.
  void CompleteOne(FakeFrontEnd& session, size_t tokens) {
    const auto deadline = Clock::now() + kPatience;
    while (!engine_->Complete() && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    session.WaitFor([=](const auto& seen) { return seen.ids.size() >= tokens; });
  }
  FakeFrontEnd::Seen Run(FakeFrontEnd& session) {
    return RunUntil(session, [](const auto& seen) { return seen.over(); });
  }
  LogEvent Logged(size_t i) {
    MutexLock lock(log_mutex_);
    return i < logged_.size() ? logged_[i] : LogEvent{};
  }

  std::unique_ptr<ConstraintCompiler> constraints_;  // of the model that Open makes
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<ServingStack> stack_;
  std::unique_ptr<SessionEnvironment> environment_;
  std::vector<std::shared_ptr<FakeFrontEnd>> sessions_;
  Mutex log_mutex_;
  std::vector<LogEvent> logged_ ABSL_GUARDED_BY(log_mutex_);
};

// Takes as long as the test wants, and then refuses.
class SlowCompiler final : public ConstraintCompiler {
 public:
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
  const auto begin = [this](const std::string& constraint) -> FakeFrontEnd& {
    GenerateRequest request = Request(4);
    if (!constraint.empty()) {
      request.stopping.ignore_eos = false;
      request.constraint = Constraint{.kind = Constraint::Kind::kRegex, .text = constraint};
    }
    sessions_.push_back(std::make_shared<FakeFrontEnd>(*environment_, false));
    sessions_.back()->Start({}, 100, [request] { return request; });
    return *sessions_.back();
  };
  FakeFrontEnd& waits = begin("a");
  FakeFrontEnd& waits_too = begin("a");
  while (environment_->pool_of_work.counts()->running < 1) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(begin("").WaitOver().end.has_value());
  EXPECT_TRUE(begin("kept").WaitOver().failed.has_value());
  EXPECT_FALSE(waits.seen().over());
  go.set_value();
  for (FakeFrontEnd* each : {&waits, &waits_too}) {
    EXPECT_THAT(std::string(each->WaitOver().failed->message()), HasSubstr("refused in the end"));
  }
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
  const auto keys = ApiKeys::Open(path, {});
  ASSERT_TRUE(keys.ok()) << keys.status();
  Open({}, {}, kPatience, keys->get());
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
