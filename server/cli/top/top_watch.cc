#include "server/cli/top/top_watch.h"

#include <grpcpp/grpcpp.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "net/client_channel.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::hours kStreamDeadline{1};
constexpr size_t kBacklog = 256;  // reports that nobody took

// Another try would end the same.
bool IsFinal(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnimplemented(status) || absl::IsInvalidArgument(status) ||
         absl::IsNotFound(status);
}

}  // namespace

class TopWatch::State {
 public:
  explicit State(Options options)
      : options_(std::move(options)),
        news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE)) {
    TREADLE_CHECK(news_ >= 0);
    thread_ = std::thread([this] { Run(); });
  }
  ~State() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      if (call_ != nullptr) call_->TryCancel();
      stopped_.NotifyAll();
    }
    thread_.join();
    close(news_);
  }

  int news() const { return news_; }

  std::optional<TopReport> Take() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    uint64_t count = 0;
    if (read(news_, &count, sizeof count) < 0) return std::nullopt;  // nothing new
    TopReport report = std::move(reports_.front());
    reports_.pop_front();
    return report;
  }

 private:
  // One WatchLedger stream, read into a state on a thread of its own. `from_start`: with what the
  // server still has of the time before.
  class LedgerReader {
   public:
    LedgerReader(State& watch, v1::Inference::Stub& stub, Mutex& mutex, TopState& state,
                 bool from_start) {
      v1::WatchLedgerRequest request;
      request.set_from_start(from_start);
      watch.While(context_, kStreamDeadline,
                  [&] { stream_ = stub.WatchLedger(&context_, request); });
      thread_ = std::thread([this, &mutex, &state] {
        for (v1::LedgerRecord record; stream_->Read(&record);) {
          MutexLock lock(mutex);
          state.Add(record, SteadyClock::now());
        }
        const absl::Status status = FromGrpcStatus(stream_->Finish());
        MutexLock lock(mutex_);
        ended_ = status;
      });
    }
    ~LedgerReader() {
      context_.TryCancel();
      thread_.join();
    }

    // How it ended, once it has.
    std::optional<absl::Status> ended() ABSL_LOCKS_EXCLUDED(mutex_) {
      MutexLock lock(mutex_);
      return ended_;
    }

   private:
    grpc::ClientContext context_;
    std::unique_ptr<grpc::ClientReader<v1::LedgerRecord>> stream_;
    Mutex mutex_;
    std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mutex_);
    std::thread thread_;
  };

  // Below: on the thread.
  void Run() {
    std::chrono::milliseconds pause = options_.first_pause;
    while (true) {
      bool answered = false;
      const absl::Status status = Connect(answered);
      if (answered) pause = options_.first_pause;
      TopReport report = NewReport();
      report.trouble = status;
      if (options_.retry && !IsFinal(status)) report.retry_in = pause;
      const bool again = report.retry_in.has_value();
      Publish(std::move(report));
      if (!again || !SleepUntil(SteadyClock::now() + pause)) return;
      pause = std::min(2 * pause, options_.longest_pause);
    }
  }

  // One connection, until it fails or the watch is stopped.
  absl::Status Connect(bool& answered) {
    grpc::ChannelArguments arguments;
    // A connection of our own, whose failures and pauses are not those of the one before.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = v1::Inference::NewStub(
        OpenChannel(options_.target, options_.access.credentials, arguments));
    TREADLE_RETURN_IF_ERROR(AskModel(*stub));
    answered = true;

    Mutex mutex;
    TopState state(SteadyClock::now(), options_.window);  // guarded by `mutex`
    auto ledger = std::make_unique<LedgerReader>(*this, *stub, mutex, state, false);
    SteadyClock::time_point next = SteadyClock::now();
    for (bool first = true;; first = false) {
      v1::GetLoadResponse load;
      TREADLE_RETURN_IF_ERROR(Call([&](grpc::ClientContext& context) {
        return stub->GetLoad(&context, v1::GetLoadRequest(), &load);
      }));
      if (const auto ended = ledger->ended()) {
        if (!ended->ok() && !absl::IsDeadlineExceeded(*ended)) return *ended;
        ledger = std::make_unique<LedgerReader>(*this, *stub, mutex, state, true);
      }
      TopReport report = NewReport();
      {
        MutexLock lock(mutex);
        report.numbers = state.Close(load, SteadyClock::now());
      }
      if (first) report.numbers->seconds = 0;  // a blink is no interval
      Publish(std::move(report));
      next = std::max(next + options_.interval, SteadyClock::now());
      if (!SleepUntil(next)) return absl::OkStatus();
    }
  }

  absl::Status AskModel(v1::Inference::Stub& stub) {
    v1::GetModelInfoResponse info;
    TREADLE_RETURN_IF_ERROR(Call([&](grpc::ClientContext& context) {
      return stub.GetModelInfo(&context, v1::GetModelInfoRequest(), &info);
    }));
    model_ = {.name = info.name(),
              .architecture = info.architecture(),
              .backend = info.backend(),
              .version = info.version(),
              .sha256 = info.sha256(),
              .parameters = info.parameters(),
              .max_context = info.max_context()};
    return absl::OkStatus();
  }

  template <typename Ask>
  absl::Status Call(const Ask& ask) {
    grpc::ClientContext context;
    grpc::Status status;
    While(context, options_.call_deadline, [&] { status = ask(context); });
    return FromGrpcStatus(status);
  }

  // `ask` makes a call with this context; stopping cancels it.
  template <typename Ask>
  void While(grpc::ClientContext& context, std::chrono::milliseconds timeout, const Ask& ask)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    const std::string& authorization = options_.access.authorization;
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    {
      MutexLock lock(mutex_);
      call_ = &context;
      if (stopping_) context.TryCancel();
    }
    ask();
    MutexLock lock(mutex_);
    call_ = nullptr;
  }

  // False if the watch was stopped instead.
  bool SleepUntil(SteadyClock::time_point time) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    while (!stopping_ && SteadyClock::now() < time) stopped_.WaitUntil(mutex_, time);
    return !stopping_;
  }

  TopReport NewReport() const {
    return {.target = options_.target, .interval = options_.interval, .model = model_};
  }

  void Publish(TopReport report) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    if (reports_.size() == kBacklog) {
      reports_.pop_front();  // and its place in the count of news is this one's
    } else {
      const uint64_t one = 1;
      TREADLE_CHECK(write(news_, &one, sizeof one) == sizeof one);
    }
    reports_.push_back(std::move(report));
  }

  const Options options_;
  const int news_;

  Mutex mutex_;
  CondVar stopped_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;  // that the thread waits for
  std::deque<TopReport> reports_ ABSL_GUARDED_BY(mutex_);

  TopModel model_;  // the thread's
  std::thread thread_;
};

TopWatch::TopWatch(Options options) : state_(std::make_unique<State>(std::move(options))) {}
TopWatch::~TopWatch() = default;
int TopWatch::news() const { return state_->news(); }
std::optional<TopReport> TopWatch::Take() { return state_->Take(); }

}  // namespace treadle
