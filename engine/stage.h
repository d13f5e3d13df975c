// A stage runs one plan at a time on one rank: the whole of an iteration, and nothing that decides.
//
// Selective batching (ORCA section 3.2): the tokens of all steps, whatever their phase and length,
// are flattened into one batch; every operation of the model runs over all of them together, and
// only attention, through SequenceSpan, sees where one sequence ends and the next begins.
// Afterwards the rows that give output are gathered, and head and sampling run over those alone, in
// tiles of at most kMaxHeadRows, so that prompt log probabilities do not need [prompt, vocab]
// logits.
//
// Memory: activations, logits and the flat batch are sized once from max_batch_tokens.
// Thread safety: confined to the rank's thread after Create.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/iteration_plan.h"
#include "engine/kv_cache.h"
#include "engine/sequence_table.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

class Stage {
 public:
  static constexpr int64_t kMaxHeadRows = 64;

  // The model holds all layers and was loaded with the same max_batch_tokens and at least
  // kMaxHeadRows. Both outlive the stage. Errors are those of KvCache::Create and of allocation.
  static absl::StatusOr<std::unique_ptr<Stage>> Create(Backend& backend, Model& model,
                                                       int64_t max_batch_tokens,
                                                       const KvCache::Options& kv);

  // What a stage allocates beside the cache (and the model its own activations).
  static int64_t ActivationBytes(const ModelConfig& config, int64_t max_batch_tokens) {
    const int64_t rows = (max_batch_tokens + kMaxHeadRows) * config.hidden;
    return (rows + kMaxHeadRows * config.vocab) * static_cast<int64_t>(sizeof(float));
  }

  // Applies releases, page copies, starts and steps, in this order. A plan that cannot be applied
  // is an error before anything was touched; the caller ends the epoch. A plan without steps does
  // not touch the model. Fills timings.compute and timings.sample.
  absl::StatusOr<IterationResult> Run(const IterationPlan& plan);

  // A new epoch: no sequences. The cache keeps its bytes, which nobody reads.
  void Reset() { sequences_.Clear(); }

 private:
  // A row of the batch that gives output: the next token of its step, or a log probability of a
  // prompt token (`target`), or both.
  struct OutputRow {
    int32_t row = 0;   // in the batch
    int32_t step = 0;  // in the plan
    bool sample = false;
    int32_t target = -1;
  };

  Stage(Backend& backend, Model& model, int64_t max_batch_tokens, KvCache cache);
  absl::Status AllocateActivations(int64_t max_batch_tokens);

  void Flatten(const IterationPlan& plan);
  void CollectOutputs(const IterationPlan& plan);
  void RunOutputs(const IterationPlan& plan, std::span<const OutputRow> tile,
                  IterationResult& result);
  SampleRow MakeSampleRow(const Step& step, const OutputRow& output) const;

  Backend& backend_;
  Model& model_;
  KvCache cache_;
  SequenceTable sequences_;

  Buffer hidden_;       // [max_batch_tokens, hidden] f32
  Buffer head_hidden_;  // [kMaxHeadRows, hidden] f32
  Buffer logits_;       // [kMaxHeadRows, vocab] f32

  // The flat batch of the current plan; capacities are reserved once.
  std::vector<int32_t> token_ids_;      // [num_tokens]
  std::vector<int32_t> positions_;      // [num_tokens]
  std::vector<SequenceSpan> spans_;     // [steps]
  std::vector<LiveSequence*> live_;     // [steps]
  std::vector<OutputRow> outputs_;      // ascending by row
  std::vector<int32_t> tile_rows_;      // [rows of the tile]
  std::vector<SampleRow> sample_rows_;  // [rows of the tile]
  std::vector<SampleResult> samples_;   // [kMaxHeadRows]
};

}  // namespace treadle
