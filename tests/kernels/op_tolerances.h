// The tolerances of op_checks.h by op.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/kernels/op_checks.h"

namespace treadle {

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

// row_tolerances.cc
std::vector<float> NormTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> ActivationTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> RouteTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> MixTolerance(const OpRun& run, const Arithmetic& arithmetic);
// weight_tolerances.cc
std::vector<float> EmbedTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> MatMulTolerance(const OpRun& run, const Arithmetic& arithmetic);
// kv_tolerances.cc
std::vector<float> RotationTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> AttentionTolerance(const OpRun& run, const Arithmetic& arithmetic);
// Where Output puts a page's element of K.
int64_t OutputKey(const KvLayout& layout, int64_t head, int64_t slot, int64_t i);
// sample_tolerances.cc
std::vector<float> SampleTolerance(const OpRun& run, const Arithmetic& arithmetic);
std::vector<float> ShardTolerance(const OpRun& run, const Arithmetic& arithmetic);

}  // namespace treadle
