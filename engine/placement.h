// Assigns layers to stages: contiguous ranges, balanced by cost, within the memory of a
// device.
//
// An iteration takes as long as its slowest stage, so the slowest is made as fast as it can be.
// Costs are measured on this machine, on a model's last layer and its head: the head of a small
// model can cost as much as a dozen of its layers, and layers of one file can differ.
//
// Thread safety: pure functions, but for MeasureCosts: as the backend's.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/defaults.h"
#include "kernels/backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

// The costs of one rank; ranks of a stage are alike.
struct PlacementCosts {
  // Seconds of one iteration, and bytes of packed weights.
  struct Part {
    double seconds = 0;
    uint64_t weight_bytes = 0;
  };
  Part embedding;             // of the first stage
  std::vector<Part> layers;   // at least one
  Part head;                  // of the last stage: norm, head and sampling
  uint64_t shared_bytes = 0;  // that embedding and head have in common where one stage has both

  // A later layer begins no stage, because it reads K/V of an earlier one.
  int64_t last_begin = std::numeric_limits<int64_t>::max();
  uint64_t table_bytes = 0;         // of weights in every stage, such as rotary tables
  uint64_t kv_bytes_per_token = 0;  // of one layer
  uint64_t activation_bytes = 0;    // of any stage: an iteration's buffers
  uint64_t link_bytes = 0;          // more of any stage, if there are several
};

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

// Loads the last layer with the head (and the first with the embedding, where that is a matrix of
// its own), runs each a few times, and takes the fastest. Layers are taken to cost what they weigh
// in the file, in proportion to the measured one. Errors: those of Model::Load.
absl::StatusOr<PlacementCosts> MeasureCosts(const Checkpoint& checkpoint, Backend& backend,
                                            const CostOptions& options);

// How much a rank's device holds.
struct PlacementMemory {
  uint64_t device_bytes = 0;             // 0: as much as it takes
  int64_t page_size = kDefaultPageSize;  // tokens; a stage that fits has room for at least one page
};

struct PlacedStage {
  LayerRange layers;
  double seconds = 0;
  uint64_t weight_bytes = 0;
  uint64_t other_bytes = 0;         // activations and link
  uint64_t kv_bytes_per_token = 0;  // of the stage's layers

  // The K/V that fits beside weights and activations, in tokens of whole pages. 0 if nothing.
  uint64_t KvBytes(const PlacementMemory& memory) const;
  int64_t KvTokens(const PlacementMemory& memory) const;
};

// `stages` contiguous ranges of at least one layer each, in order, covering all layers. Among all
// those that fit, one whose slowest stage is fastest; among these, one whose times differ least
// (their squares sum up to the least), so that layers which make no difference are spread. Equal
// costs give equal placements.
//
// InvalidArgument if there are not that many layers, naming how many stages can be;
// ResourceExhausted if none fits, naming the number of stages that does, or what the largest part
// needs if none can.
absl::StatusOr<std::vector<PlacedStage>> PlaceLayers(const PlacementCosts& costs, int stages,
                                                     const PlacementMemory& memory = {});

// Mean over slowest stage: 1 if all are busy all the time once the pipeline is full.
double Balance(const std::vector<PlacedStage>& stages);

}  // namespace treadle
