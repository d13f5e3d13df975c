// What a model's weights cost in bits, constants included, as a file keeps them.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/weight_plan.h"

namespace treadle {

struct WeightBits {
  int64_t converted = 0;      // weights that the plan converts
  double converted_bits = 0;  // of all of them
  int64_t kept = 0;           // the others: as stored
  double kept_bits = 0;

  // Bits per converted weight, if there are any.
  double PerConverted() const {
    return converted > 0 ? converted_bits / static_cast<double>(converted) : 0;
  }
  double PerParameter() const {
    return (converted_bits + kept_bits) / static_cast<double>(converted + kept);
  }
};

// Quantizes one matrix of each shape, not all: bits do not depend on values. Thread safety: pure.
absl::StatusOr<WeightBits> CountWeightBits(const Checkpoint& checkpoint, const WeightPlan& plan);

}  // namespace treadle
