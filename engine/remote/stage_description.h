// What the master tells a worker about its stage, and what it asks of a worker first.
//
// Thread safety: stateless.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/remote/remote_engine_options.h"

namespace treadle {

namespace control {
class Configure;
class WorkerHello;
}  // namespace control

// Whether the worker can be that stage. FailedPrecondition: another version, device, arithmetic or
// file, or too few GPUs; ResourceExhausted: no memory for the weights.
absl::Status CheckHello(const RemoteEngineOptions& options, const std::string& fingerprint,
                        size_t stage, const control::WorkerHello& hello);

// All but the directory of tensors.
void DescribeStage(const RemoteEngineOptions& options, size_t stage, const std::string& fingerprint,
                   control::Configure& out);

// Pages for the stage's cache, of `available` bytes if the options do not say how many. Errors:
// PlanKvMemory's.
absl::StatusOr<int64_t> PagesOf(const RemoteEngineOptions& options, size_t stage, int64_t kv_heads,
                                uint64_t available);

}  // namespace treadle
