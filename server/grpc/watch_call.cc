#include <grpcpp/support/server_callback.h>

#include <utility>

#include "server/grpc/calls.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/rpc_status.h"

namespace treadle {
namespace {

class WatchCall final : public grpc::ServerWriteReactor<v1::LedgerRecord>,
                        public std::enable_shared_from_this<WatchCall> {
 public:
  WatchCall(CallEnvironment& environment, bool from_start)
      : environment_(environment), next_(from_start ? 0 : environment.stack.ledger().end()) {}

  // `caller`: whether it may watch.
  void Begin(const absl::Status& caller) {
    environment_.sessions.calls.Add();
    {
      MutexLock lock(mutex_);
      self_ = shared_from_this();
      if (!caller.ok()) return End(caller);
    }
    environment_.follower.Subscribe([weak = weak_from_this()] {
      const auto call = weak.lock();
      if (call) call->OnRecords();
      return call != nullptr;
    });
    OnRecords();  // those that are there
  }

  void OnRecords() {
    MutexLock lock(mutex_);
    Advance();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    gone_ = gone_ || !ok;
    Advance();
  }
  void OnCancel() override {
    MutexLock lock(mutex_);
    gone_ = true;
    Advance();
  }
  void OnDone() override {
    environment_.sessions.calls.Remove();
    std::shared_ptr<WatchCall> last;  // released after the lock
    MutexLock lock(mutex_);
    last = std::move(self_);
  }

 private:
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    Finish(ToGrpcStatus(status));
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    uint64_t lost = 0;
    const auto records = environment_.stack.ledger().Read(next_, gone_ ? 0 : 1, lost);
    // From the start means what is still in the ring; only what slips away later is a loss.
    if (!std::exchange(began_, true)) lost = 0;
    if (!records.empty()) {
      message_.Clear();
      FillLedgerRecord(*records.front(), lost, message_);
      writing_ = true;
      StartWrite(&message_);
    } else if (gone_ || environment_.closing.load()) {
      End(absl::OkStatus());
    }
  }

  CallEnvironment& environment_;

  Mutex mutex_;
  std::shared_ptr<WatchCall> self_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_);
  v1::LedgerRecord message_ ABSL_GUARDED_BY(mutex_);
  bool began_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::LedgerRecord>* StartWatchLedger(
    CallEnvironment& environment, const grpc::CallbackServerContext& context, bool from_start) {
  auto call = std::make_shared<WatchCall>(environment, from_start);
  call->Begin(environment.sessions.Authorize(Authorization(context)).status());
  return call.get();
}

}  // namespace treadle
