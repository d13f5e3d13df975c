// The CPU backend: packed weights in their stored format, one pinned thread pool, one instruction
// set chosen at start.
//
// kAuto means kInt12; dense formats run exact. Mean KL divergence from exact on the default model:
// docs/quantization.md. kInt8 is faster, but where two tokens are nearly as likely its rounding can
// choose between them.
//
// Formats with a codebook (NF4, FP4, FP8, k-bit) run kInt16 too, if the places along k where a row
// changes its scale are multiples of 32: the codebook is rounded to codes c = value * (4095 /
// largest), half to even, with the largest magnitude of its values, and the scale of c is scale *
// (largest / 4095), rounded once; zeros are minima, m = -(scale * zero). A weight is then off by at
// most scale * largest / 8190, which is all that this mode adds to the rounding of activations. FP8
// (E4M3) is rounded to eighths, c = floor(8 * value + 1/2), at scale / 8: values from 1 (of 448) on
// are exact, others off by at most scale / 16. Codebooks with NaN, and all of them under kInt8, run
// exact.
//
// GGUF's formats run as the mode says, with integers that are never rounded; so do those of apart
// formats (HasIntegers: GPTQ and AWQ), with 0.3 bits a weight for scales and zeros in blocks of
// 128, 1.25 in others. One of GGUF's without a layout of its own here lies as codes of four bits
// with f32 scales if sixteen values and no offsets are all it has (5 bits a weight; 6.25 with a
// scale for 16, and under kInt8), else as bytes (12 bits).
//
// k-bit codebooks too large for an instruction set to look up as quickly as bf16 weights are read
// (6 to 8 bits on AVX2, 8 bits on AVX-512 without VBMI) are packed as those codes c, 13 bits each:
// the same results in more memory (13.5 bits a weight with blocks of 64).
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace treadle {

// ComputeMode::kAuto's meaning.
inline constexpr ComputeMode kCpuAuto = ComputeMode::kInt12;

struct CpuBackendOptions {
  int threads = 0;  // 0: one per CPU that this process may use
  bool pin = false;
  int first_cpu = 0;  // with pin: thread i runs on CPU number first_cpu + i of the process's
  ComputeMode compute = ComputeMode::kAuto;
  std::optional<CpuIsa> isa = {};  // unset: ChooseIsa()
};

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

}  // namespace treadle
