// What a master is told of its workers and their model. Thread safety: values.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/data_plane.h"
#include "engine/defaults.h"
#include "engine/remote/control_streams.h"
#include "engine/wire_codec.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

struct RemoteEngineOptions {
  struct Place {
    std::string address;        // the worker's control address: host:port, or unix:path
    LayerRange layers;          // contiguous, in the order of stages, all layers together
    uint64_t weight_bytes = 0;  // that loading them will take at least; 0: not known
  };
  std::vector<Place> stages;
  int tensor_parallel = 1;

  // The master's own copy. Workers' files must be the same, or they are sent its tensors.
  std::shared_ptr<const Checkpoint> checkpoint;
  bool weights_from_master = false;

  // How stages load and run: a worker is told all of it.
  int64_t max_batch_tokens = kDefaultBatchTokens;
  int64_t max_context = 0;      // 0: the model's
  std::string backend = "cpu";  // or "cuda": a GPU for each rank
  DType dtype = DType::kBF16;   // of products on a GPU
  bool deterministic = false;   // on a GPU
  ComputeMode compute = ComputeMode::kAuto;
  std::string weights;  // as WeightPlan::Parse
  std::optional<float> outlier_threshold;
  OutlierRule outlier_rule = OutlierRule::kPerRow;
  WireType wire = WireType::kF32;
  DataPlane data_plane = DataPlane::kGloo;  // kNccl: stages on GPUs, and the f32 wire

  // The cache. Pages are those of the tightest stage.
  int64_t page_size = kDefaultPageSize;
  DType kv_dtype = DType::kF16;
  int64_t kv_pages = 0;              // 0: from the next two
  std::optional<int64_t> kv_memory;  // bytes of each stage; unset: as much as PlanKvMemory's "auto"
  int64_t max_batch_size = kDefaultBatchSize;  // sequences that auto provides for

  int depth = 0;  // plans in flight; 0: as many as stages, but 2 with a single one
  // A baseline to measure: a stage passes a plan on only once it has run it and sent its
  // activations, as where control messages travel with the data (ORCA, section 4.2, argues against
  // it). Answers are the same.
  bool late_plans = false;
  std::chrono::milliseconds iteration_deadline{120'000};
  std::chrono::milliseconds silence{10'000};  // a worker that says nothing for so long is lost
  std::chrono::milliseconds connect_deadline{30'000};  // for workers to be there, at every epoch
  std::string version;                                 // empty: this program's
  ControlCredentials credentials;                      // towards the workers

  std::function<void(double)> progress;  // of loading, during Create, on any thread; may be empty
  // Called by Restart when the epoch before it never came to stand, as if workers that are there
  // hang: kills them, so that others take their places. May be empty.
  std::function<void()> replace_workers;
};

}  // namespace treadle
