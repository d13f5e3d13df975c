// The CPU backend: packed weights in their stored format, one pinned thread pool, one instruction
// set chosen at start.
//
// kAuto means kInt16 for formats with integer codes and exact for dense formats. Mean KL divergence
// from exact on the default model: see bench/results. kInt8 is faster, but where two tokens are
// nearly as likely its rounding can choose between them.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace treadle {

struct CpuBackendOptions {
  int threads = 0;  // 0: one per CPU that this process may use
  bool pin = false;
  ComputeMode compute = ComputeMode::kAuto;
  std::optional<CpuIsa> isa = {};  // unset: ChooseIsa()
};

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

}  // namespace treadle
