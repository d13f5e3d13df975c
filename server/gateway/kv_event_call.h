// VllmEngine.SubscribeKvEvents: what the prefix cache holds, and each change of it, for gateways
// that send a request where most of its prompt is cached.
//
// Thread safety: any thread.
#pragma once

#include <memory>

#include "server/grpc/calls.h"

namespace treadle {

inline constexpr int kMaxKvSubscribers = 16;

// `subscribers`: calls of a server under way; each holds a reference.
StreamReactor* StartSubscribeKvEvents(CallEnvironment& environment,
                                      const std::shared_ptr<void>& subscribers,
                                      const RpcContext& context, const ByteBuffer& request);

}  // namespace treadle
