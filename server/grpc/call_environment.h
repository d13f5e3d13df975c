// What every call on the server needs to know of its surroundings.
//
// Thread safety: constant, or as the parts say; CallCount from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "base/sync.h"
#include "server/access/api_keys.h"
#include "server/session/courier.h"
#include "server/observe/ledger_follower.h"
#include "server/observe/request_log.h"
#include "server/serving_stack.h"
#include "server/session/request_validation.h"

namespace grpc {
class CallbackServerContext;
}

namespace treadle {

// Calls under way, so that shutting down can let the last bytes go out.
class CallCount {
 public:
  void Add() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    ++count_;
  }
  void Remove() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    --count_;
    changed_.NotifyAll();
  }
  // False if `deadline` came before the last call ended.
  bool WaitZero(Clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    while (count_ > 0) {
      if (!changed_.WaitUntil(mutex_, deadline)) return count_ == 0;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

struct CallEnvironment {
  ServingStack& stack;
  LedgerFollower& follower;
  const RequestLimits limits;
  const std::chrono::milliseconds stall_timeout;
  const ApiKeys* const keys = nullptr;  // null: everybody may call
  const RequestLog request_log;
  Courier courier{};
  CallCount calls{};
  std::atomic<bool> closing{false};  // ledger watchers end
};

// Whose call it is, by its bearer token; null if everybody may call. Unauthenticated or
// PermissionDenied otherwise.
absl::StatusOr<std::shared_ptr<ApiKey>> Authorize(const CallEnvironment& environment,
                                                  const grpc::CallbackServerContext& context);

// What the call says of its sender, but for the key.
RequestOrigin OriginOf(const grpc::CallbackServerContext& context);

}  // namespace treadle
