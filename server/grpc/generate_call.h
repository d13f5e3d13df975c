// Generate and GenerateStream: one object per call, between gRPC's reactors and the pool.
//
// A call validates, submits, and from then on is driven by its TokenStream's notifier through the
// courier. Cancellation (by the client, by its deadline, by a stalled write) goes to the pool; the
// call itself ends when the loop has ended the request.
//
// Thread safety: the functions are called by gRPC's threads; each call's state is under its own
// mutex, which also shows ThreadSanitizer the hand-offs between gRPC's threads and ours.
#pragma once

#include "server/grpc/call_environment.h"

namespace grpc {
class ByteBuffer;
class CallbackServerContext;
class ServerUnaryReactor;
template <class W>
class ServerWriteReactor;
}  // namespace grpc

namespace treadle {

// Requests come as bytes, so that a malformed one gets a proper answer (wire_format.h).
grpc::ServerUnaryReactor* StartGenerate(CallEnvironment& environment,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response);
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGenerateStream(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);

}  // namespace treadle
