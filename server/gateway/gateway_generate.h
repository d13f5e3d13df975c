// VllmEngine.Generate and Abort: each answer is a Session.
//
// Thread safety: any thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "server/access/api_keys.h"
#include "server/grpc/calls.h"

namespace treadle {

// Calls under way by the ids that clients gave their requests. A caller finds those of its own
// owner (ApiKey::Terms) only. Ids need not be unique.
class NamedCalls {
 public:
  using Name = std::pair<std::string, std::string>;  // owner, and the id

  void Add(const Name& name, std::weak_ptr<Session> call) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const Name& name, const Session* call) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::shared_ptr<Session>> Find(const Name& name) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  std::multimap<Name, std::pair<const Session*, std::weak_ptr<Session>>> calls_
      ABSL_GUARDED_BY(mutex_);
};

StreamReactor* StartGatewayGenerate(CallEnvironment& environment, NamedCalls& calls,
                                    RpcContext* context, const ByteBuffer* request);

// The calls of that name end with the reason "abort".
void AbortGatewayCalls(const NamedCalls& calls, const NamedCalls::Name& name);

}  // namespace treadle
