// A checkpoint with planted outlier features: the same function, but some features of the inputs
// of every layer's matrices are as large as in models of many billion parameters (LLM.int8(),
// section 2.3).
//
// How: of some features, the norm's weight is multiplied by a power of two and the columns of the
// matrices that read the norm are divided by it. Powers of two change no other bit of a product, so
// exact arithmetic gives the same results; 8-bit arithmetic does not.
//
// Thread safety: as Checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

struct OutlierPlan {
  int64_t features = 6;  // of each norm; those with the largest norm weights
  float factor = 8;      // a power of two
};

// Norms and what reads them, of the llama architecture; those matrices become 32-bit floats.
// `checkpoint` outlives the result. Errors: another architecture; a plan that cannot be.
absl::StatusOr<std::unique_ptr<Checkpoint>> PlantOutliers(const Checkpoint& checkpoint,
                                                          const OutlierPlan& plan);

}  // namespace treadle
