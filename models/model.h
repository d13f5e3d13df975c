// A loaded model, or a contiguous range of its layers, on one rank.
//
// Tokens of all requests lie flat in one [num_tokens, hidden] tensor: every operation is batched
// over tokens, and only attention knows sequences (selective batching, ORCA section 3.2).
//
// Thread safety: Load may run on any thread; Forward and Head are called from the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "models/architectures/model_config.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/weight_plan.h"
#include "models/expert_use.h"

namespace treadle {

class Adapter;
class AdapterFile;
class SharedConversion;

// One iteration's tokens on this rank.
struct Batch {
  std::span<const int32_t> token_ids;       // [num_tokens]; used by the first stage, or by all
                                            // where layers have embeddings of their own
  std::span<const int32_t> positions;       // [num_tokens]
  std::span<const SequenceSpan> sequences;  // cover [0, num_tokens), ascending, without overlap
  // The same with the pages of layers that see a window; empty: all layers' pages are alike.
  std::span<const SequenceSpan> window_sequences = {};
  // [num_tokens] or none: of each row, what it adds to the weights (null: nothing).
  std::span<const Adapter* const> adapters = {};
};

// The pages of this stage's layers, by layer index within the stage.
struct KvPages {
  KvLayout layout;
  std::span<std::byte* const> layers;  // [layers of this stage]
  KvLayout window_layout = {};         // of layers that see a window; no pages: as the others
};

struct LayerRange {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive
};

// The part of each layer that a rank holds (tensor parallelism; ORCA section 4.1).
struct Shard {
  int rank = 0;
  int size = 1;
};

// A contiguous part of [0, total): of heads, features or vocabulary.
struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive
  int64_t size() const { return end - begin; }
};

// A rank's part of the states that some layers keep.
StateLayout StateLayoutOf(const ModelConfig& config, Shard shard = {});

struct LoadOptions {
  LayerRange layers;                     // begin == end: all layers
  Shard shard;                           // the whole by default; checked by CheckShard
  int64_t max_batch_tokens = 0;          // activation buffers are sized once, from this
  int64_t max_head_rows = 64;            // rows of one Head call
  int64_t max_context = 0;               // 0: the model's
  std::function<void(double)> progress;  // fraction of bytes loaded; may be empty

  bool without_layers = false;  // embedding, final norm and head alone; on a host backend
  WeightPlan weights;           // empty: as stored
  int threads = 0;              // that convert weights; 0: one per CPU of this process
  // LLM.int8() matrices, made here or stored. Unset: what the checkpoint says, else 6. 0: no
  // decomposition.
  std::optional<float> outlier_threshold;
  OutlierRule outlier_rule = OutlierRule::kPerRow;
  SharedConversion* conversion = nullptr;  // with other ranks that load now (LoadModelRanks)
};

class Model {
 public:
  // Reads, checks and packs the tensors of the layer range. `backend` must outlive the model;
  // `checkpoint` need not.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const Checkpoint& checkpoint, Backend& backend,
                                                     const LoadOptions& options);
  virtual ~Model() = default;

  const ModelConfig& config() const { return config_; }
  LayerRange layers() const { return layers_; }
  bool first_stage() const { return layers_.begin == 0; }
  bool last_stage() const { return layers_.end == config_.layers; }
  Shard shard() const { return shard_; }
  // This rank's part of the vocabulary: rows of embedding and head.
  ShardRange vocab() const { return vocab_; }
  // This rank's K/V heads: all, a part, or one that several ranks hold.
  int64_t kv_heads() const { return kv_heads_; }
  // The same of layers that see a window.
  int64_t local_kv_heads() const { return local_kv_heads_; }
  // This rank's part of a page of states; without them: as by default.
  StateLayout state_layout() const { return StateLayoutOf(config_, shard_); }
  uint64_t weight_bytes() const { return weight_bytes_; }  // packed, on the device
  // Bytes outside of layers: embedding, final norm, head, and what every range of layers has.
  uint64_t outside_bytes() const { return outside_bytes_; }
  uint64_t table_bytes() const { return table_bytes_; }
  uint64_t activation_bytes() const { return activation_bytes_; }

  // `observer` is told a layer's number before each of a Forward, and layers().end before Head and
  // Normalize: for whoever must know what ops belong to. On the rank's thread; before the first op.
  void ObserveLayers(std::function<void(int64_t layer)> observer) {
    observer_ = std::move(observer);
  }

  // hidden: [num_tokens, hidden] f32. The first stage fills it from token ids; others read the
  // previous stage's output from it. Afterwards it holds this range's output (the residual stream),
  // the same on all ranks. `ranks`: those that share the layers, this one included; null if
  // shard().size is 1. Errors are the communicator's and, of mixtures of experts, which
  // wait for it, the device's.
  virtual absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                               Tensor hidden) = 0;

  // The use of experts in the last Forward.
  const ExpertUse& expert_use() const { return expert_use_; }

  // Last stage only: final norm alone, in place, of rows that Head is not given. hidden: [rows,
  // hidden] f32
  virtual void Normalize(Tensor hidden) = 0;

  // Last stage only: final norm and head. hidden: [rows, hidden]; logits: [rows, vocab().size()]
  // f32, of this rank's part of the vocabulary; rows <= max_head_rows. May overwrite `hidden`.
  // adapters: as Batch::adapters.
  virtual void Head(Tensor hidden, Tensor logits, std::span<const Adapter* const> adapters) = 0;
  void Head(Tensor hidden, Tensor logits) { Head(hidden, logits, {}); }

  // This rank's part of an adapter, for batches of this model. Any thread, batches may run
  // meanwhile. Unimplemented: the model takes none, or none of an embedding's rank;
  // ResourceExhausted: no memory.
  virtual absl::StatusOr<std::shared_ptr<const Adapter>> LoadAdapter(const AdapterFile& file) const;

 protected:
  ModelConfig config_;
  LayerRange layers_;
  Shard shard_;
  ShardRange vocab_;
  int64_t kv_heads_ = 0, local_kv_heads_ = 0;
  uint64_t weight_bytes_ = 0, outside_bytes_ = 0, table_bytes_ = 0;
  uint64_t activation_bytes_ = 0;
  ExpertUse expert_use_;
  std::function<void(int64_t)> observer_;  // may be empty
};

// Loads the shards of all ranks of this process at once, so that what they share is read and
// converted once: rank i's model on backends[i]. `options` as for Model::Load, but that the shard
// is set here, that `threads` are those of one rank, and that `progress` is of all (called from any
// rank's thread, one call at a time). Errors: the first rank's that failed by itself. Thread
// safety: a pure function; its threads have ended when it returns.
absl::StatusOr<std::vector<std::unique_ptr<Model>>> LoadModelRanks(
    const Checkpoint& checkpoint, std::span<Backend* const> backends, const LoadOptions& options);

}  // namespace treadle
