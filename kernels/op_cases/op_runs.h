// The OpRun of every op. Private to tests/support; contracts: op_cases.h.
#pragma once

#include <algorithm>
#include <memory>

#include "kernels/op_cases/op_cases.h"

namespace treadle::op_runs {

// Tolerances count in units of float's rounding, 2^-24 of a magnitude.
inline constexpr double kFloatUnit = 0x1p-24;

// What rounding a number of this magnitude once to `type` may change: half the distance of its
// neighbours; f16 has subnormals that matter.
inline double RoundingError(double magnitude, DType type) {
  switch (type) {
    case DType::kF16:
      return std::max(0x1p-11 * magnitude, 0x1p-25);
    case DType::kBF16:
      return 0x1p-8 * magnitude;
    default:
      return 0;
  }
}
// Errors of either sign that are independent and at most e_i add up to more than this times the
// root of the sum of e_i^2 with a probability below 10^-10 (Hoeffding's inequality).
inline constexpr double kSurely = 7;

using Factory = std::unique_ptr<OpRun> (*)(const OpCase& op_case, Backend& backend, uint64_t seed);

// op_cases.cc
// The type of rows that an op without weights leaves for products: [*, cols].
DType OutputType(const OpCase& op_case, Backend& backend, int64_t cols);
// feature_op_runs.cc
std::unique_ptr<OpRun> MakeNorm(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeActivation(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeGather(const OpCase& op_case, Backend& backend, uint64_t seed);
// weight_op_runs.cc
std::unique_ptr<OpRun> MakeEmbed(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeMatMul(const OpCase& op_case, Backend& backend, uint64_t seed);
// kv_op_runs.cc
std::unique_ptr<OpRun> MakeRotateAndStoreKv(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeAttention(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeCopyPages(const OpCase& op_case, Backend& backend, uint64_t seed);
// sample_op_run.cc
std::unique_ptr<OpRun> MakeSample(const OpCase& op_case, Backend& backend, uint64_t seed);
std::unique_ptr<OpRun> MakeSampleShard(const OpCase& op_case, Backend& backend, uint64_t seed);

}  // namespace treadle::op_runs
