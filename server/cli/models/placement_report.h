// treadle inspect --placement: how a model would lie over stages and ranks, measured here.
//
// Thread safety: a pure function but for the measurement, which takes the machine's cores.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/plan/defaults.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/weight_plan.h"

namespace treadle {

struct PlacementRequest {
  int pipeline_parallel = 1;                   // stages
  int tensor_parallel = 1;                     // ranks of a stage
  int64_t device_memory = 0;                   // bytes of each rank's device; 0: not said
  int threads = 0;                             // of one rank; 0: one per CPU
  int64_t batch = 8;                           // decoding sequences of the measured iteration,
  int64_t prompt_tokens = 32;                  // and tokens of prompts in it
  int64_t batch_tokens = kDefaultBatchTokens;  // sizes activations
  int64_t page_size = kDefaultPageSize;
  WeightPlan weights = {};
};

// Text, or one JSON object, that ends with a newline. Errors: a grid that cannot be (the nearest
// one that can is named), a device memory that is too small (a number of stages that fits is), and
// those of loading.
absl::StatusOr<std::string> PlacementReport(const Checkpoint& checkpoint,
                                            const PlacementRequest& request, bool json);

}  // namespace treadle
