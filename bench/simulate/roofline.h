// Seconds of an iteration on a stage, by a roofline.
//
//   products    max(bytes of weights / bandwidth, operations / operations per second)
//   attention   max(bytes of K/V / bandwidth, its operations / operations per second)
//   all-reduces 2 a layer and rank: latency + 2 (n - 1) / n * bytes of all rows / link
//   overheads   seconds of each layer, of each plan, and of each sample
//
// summed over the stage's layers, and the head's product on the last stage. Bandwidths and
// operations are a data sheet's times an Efficiency (hardware.h). Williams, Waterman, Patterson:
// Roofline (2009); costs of a ring all-reduce: Thakur, Rabenseifner, Gropp (2005).
//
// Thread safety: constant once made.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/simulate/hardware.h"
#include "engine/memory_plan.h"
#include "engine/plan/iteration_plan.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/weight_plan.h"

namespace treadle {

struct RooflineOptions {
  Hardware hardware;
  Efficiency efficiency;
  int64_t stages = 1;
  int64_t tensor_parallel = 1;  // ranks of each stage, within a host
  WeightPlan weights;
  DType kv_dtype = DType::kF16;
  int64_t max_context = 0;  // tokens of a request; 0: the model's
  int64_t max_batch_tokens = kDefaultBatchTokens;
};

class Roofline {
 public:
  // InvalidArgument for a split that the model cannot have, ResourceExhausted for one that does not
  // fit, with what would.
  static absl::StatusOr<Roofline> Of(const Checkpoint& checkpoint, const RooflineOptions& options);

  // `padding`: rows beside the plan's, which read as many positions as these.
  double Seconds(const IterationPlan& plan, int64_t padding, int stage) const;
  const RooflineOptions& options() const { return options_; }
  int64_t max_context() const {
    return options_.max_context > 0 ? options_.max_context : config_.context;
  }
  const KvMemoryPlan& kv() const { return kv_; }            // of all layers and ranks
  double weight_bytes() const { return fullest_weights_; }  // on a GPU of the fullest stage
  double kv_bytes() const;                                  // likewise
  // The terms of a plan of so many decoding sequences at this position, in words: "weights 60 %".
  std::string Bound(int64_t sequences, int64_t position) const;
  // Every number and where it is from, a line each.
  std::string ToString() const;

 private:
  struct Stage {
    int64_t layers = 0, local_layers = 0;
    double weights = 0;       // bytes on each rank, without the experts'
    double experts = 0;       // bytes of all of them on each rank
    double operations = 0;    // of each row
    double head_weights = 0;  // bytes on each rank; last stage only
    double head_operations = 0;
  };
  struct Terms {
    double weights = 0, operations = 0, kv = 0, attention = 0, all_reduce = 0, overhead = 0;
    double Seconds() const;
  };
  Terms TermsOf(const IterationPlan& plan, int64_t padding, int stage) const;

  RooflineOptions options_;
  ModelConfig config_;
  std::vector<Stage> stages_;
  KvMemoryPlan kv_;
  double fullest_weights_ = 0;
};

}  // namespace treadle
