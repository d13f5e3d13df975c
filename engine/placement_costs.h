// What the parts of a model cost on this machine: measured on its last layer and its head.
//
// Thread safety: as the backend's.
#pragma once

#include "absl/status/statusor.h"
#include "engine/placement.h"
#include "kernels/backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

struct CostOptions {
  // As the model will be loaded; `layers` and `max_head_rows` are not read. With a shard, what its
  // rank alone does is measured, without the waiting for others.
  LoadOptions load;
  // The iteration that is measured: so many decoding sequences, with so many tokens before each,
  // and a chunk of a prompt. Only what is sampled passes through the head, so a mix with longer
  // prompts makes layers dearer against it. The default: prompts four times as long as answers.
  int64_t rows = 8;
  int64_t position = 128;
  int64_t prompt_tokens = 32;
  DType kv_dtype = DType::kF16;
};

// Loads the last layer with the head (and one more layer or the embedding where that is needed to
// tell bytes apart), runs each a few times, and takes the fastest. Layers are taken to cost
// what they weigh in the file, in proportion to the measured one. Errors: those of Model::Load.
absl::StatusOr<PlacementCosts> MeasureCosts(const Checkpoint& checkpoint, Backend& backend,
                                            const CostOptions& options);

}  // namespace treadle
