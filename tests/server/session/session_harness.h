// A front end without any protocol, which keeps what it is given and is as slow as the test wants,
// over an engine that is held.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/serving_stack.h"
#include "server/session/session.h"
#include "tests/server/letter_tokenizer.h"
#include "tests/support/assert_ok.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_time.h"

namespace treadle {

using std::chrono::milliseconds;

inline constexpr std::chrono::seconds kPatience{60};
inline constexpr int32_t kVocab = 64;

class FakeFrontEnd final : public Session {
 public:
  FakeFrontEnd(SessionEnvironment& environment, bool slow) : Session(environment), slow_(slow) {}

  // Events that it was given so far.
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
    ASSERT_OK_AND_ASSIGN(auto stack,
                         ServingStack::Create(std::move(model), std::move(made), scheduling));
    stack_ = std::move(stack);
    ASSERT_TRUE(stack_->Start().ok());
    const LogSink sink = [this](LogEvent event) {
      MutexLock lock(log_mutex_);
      logged_.push_back(std::move(event));
    };
    environment_.reset(new SessionEnvironment{.model = stack_->model(),
                                              .pool = stack_->pool(),
                                              .stall_timeout = stall_timeout,
                                              .keys = keys,
                                              .request_log = RequestLog(sink, "fake"),
                                              .store = store_.get()});
  }
  void TearDown() override { Close(); }
  // Ends what Open began.
  void Close() {
    if (!environment_) return;
    stack_->Stop(absl::UnavailableError("the test is over"));
    for (auto& session : sessions_) session->WaitOver();
    for (auto& session : sessions_) session->Release();
    EXPECT_TRUE(environment_->calls.WaitZero(Clock::now()));
    sessions_.clear();
    environment_.reset();
    stack_.reset();
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
  // Tokens that the engine answers to it.
  std::vector<int32_t> Answer(const GenerateRequest& request) const {
    const auto valid = ValidateRequest(request, stack_->model(), {}, 0);
    return ReferenceOutput(valid->spec, 0);
  }
  bool WaitLoad(int64_t running, int64_t waiting) {
    return ComesTrue([&] {
      const PoolLoad load = stack_->pool().Load();
      return load.running == running && load.waiting == waiting;
    });
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
    ComesTrue([&] { return engine_->Complete(); });
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
  std::unique_ptr<RequestStore> store_;              // of the environment that Open makes
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<ServingStack> stack_;
  std::unique_ptr<SessionEnvironment> environment_;
  std::vector<std::shared_ptr<FakeFrontEnd>> sessions_;
  Mutex log_mutex_;
  std::vector<LogEvent> logged_ ABSL_GUARDED_BY(log_mutex_);
};

}  // namespace treadle
