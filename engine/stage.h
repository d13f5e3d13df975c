// A stage's part of an iteration on one rank, one plan at a time: all of it, and nothing that
// decides. Ranks of a stage hold shards of its layers and run the same plans (StageRanks).
//
// Selective batching (ORCA section 3.2): the tokens of all steps, whatever their phase and length,
// are flattened into one batch; every operation of the model runs over all of them together, and
// only attention, through SequenceSpan, sees where one sequence ends and the next begins.
// Afterwards the rows that give output are gathered, and head and sampling run over those alone, in
// tiles of at most kMaxHeadRows, so that prompt log probabilities do not need [prompt, vocab]
// logits. With a vocabulary in shards, ranks on the host merge the shards' candidates; where that
// is not enough (CanMergeShards), and on devices, where the host would have to wait for them, the
// shards' logits are gathered and every rank samples.
//
// Stages of a pipeline hand the residual stream on through an ActivationLink; only the last one has
// head and results. A device with a memory of its own copies it from and to the link's buffers in
// the order of its other work. Where rank 0 alone has a link, it tells the others what it received.
//
// On an asynchronous device, whose ranks have an asynchronous communicator if there are several, a
// stage that waits for no other stage can begin a plan before the one before it has finished, so
// that the device never waits for the host: tokens that the host has not seen stay on the device
// (LiveSequence::previous_sample). Batches of decoding rows alone are padded to few shapes and go
// through Backend::RunGraph, collectives included: ranks run the same plans, so that all of them
// capture, replay and communicate in the same order.
//
// Masked outputs wait for their masks between the forward pass and sampling; on a device that does
// a plan's work without the host, before both, and without beginning ahead.
//
// Rows that a stage did not compute since a sequence's start (another candidate's, or of an epoch
// before) are looked up by their tags (slot_tags.h) before anything reads them. DataLoss names the
// first position that is not there.
//
// Memory: activations, logits and the flat batch are sized once from max_batch_tokens.
// Thread safety: confined to the rank's thread after Create.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/activation_link.h"
#include "engine/kv/kv_cache.h"
#include "engine/mask_board.h"
#include "engine/plan/iteration_plan.h"
#include "engine/plan/sequence_table.h"
#include "engine/replay_log.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "models/model.h"

namespace treadle {

class Stage {
 public:
  static constexpr int64_t kMaxHeadRows = 64;

  // The model was loaded with the same max_batch_tokens and at least kMaxHeadRows. Both outlive the
  // stage. Errors are those of KvCache::Create and of allocation.
  static absl::StatusOr<std::unique_ptr<Stage>> Create(Backend& backend, Model& model,
                                                       int64_t max_batch_tokens,
                                                       const KvCache::Options& kv);

  // The bytes that a rank allocates beside the cache (and the model's own activations).
  static int64_t ActivationBytes(const ModelConfig& config, int64_t max_batch_tokens) {
    const int64_t rows = (max_batch_tokens + kMaxHeadRows) * config.hidden;
    return (rows + kMaxHeadRows * config.vocab) * static_cast<int64_t>(sizeof(float));
  }

  // Where the adapters are that starts name: null for one that is not there. Without, there are
  // none.
  using FindAdapter = std::function<std::shared_ptr<const Adapter>(uint64_t id)>;
  void SetAdapters(FindAdapter find) { find_adapter_ = std::move(find); }

  // Begins an epoch: no sequences. The cache keeps its bytes, which plans may count on
  // (IterationPlan::stages). `ranks`: null for one rank; `link`: null for a single stage, and on
  // ranks above 0 unless it is on the device. `masks`: null if no step will be masked. `stage`: its
  // number. `log`: what is sent is kept there; with a link in the host's memory, or null. All
  // outlive the epoch.
  void BeginEpoch(Communicator* ranks, ActivationLink* link, MaskBoard* masks = nullptr,
                  int stage = 0, ReplayLog* log = nullptr);
  // Nothing of the epoch runs on the device any more: its communicators and link may go.
  void EndEpoch();

  // Applies the parts of a plan in their order (IterationPlan) and gives the work to the device. A
  // plan that cannot be applied is an error before anything was touched; other errors come from the
  // communicators. The caller ends the epoch. A plan without steps touches neither the model nor
  // the data plane. `plan` must stay until its Finish. `before_output` is called after the forward
  // pass (or once it is on its way), while others may be waiting for this stage's next receive to
  // be announced.
  absl::Status Begin(const IterationPlan& plan, const std::function<void()>& before_output = {});
  // Waits for the earliest plan that was begun and not finished, and sends what is left to send.
  // Errors are the device's and the link's.
  absl::StatusOr<IterationResult> Finish();
  // Whether a plan may begin while another is begun: no more than one, if nothing of `plan` depends
  // on what the host has yet to see.
  bool CanBeginAhead(const IterationPlan& plan);
  // Has the receive for a plan that will run later be posted. Nothing without a link.
  absl::Status Announce(const IterationPlan& plan);

  // When the phases of the last finished plan with steps ended. If a device ran them on its own,
  // only the end is known: all phases have it.
  struct Times {
    using Clock = std::chrono::steady_clock;
    Clock::time_point began, received, forwarded, sent, sampled;
  };
  const Times& times() const { return times_; }

 private:
  // Where a plan asks for something of the head: plan.steps[step].outputs[output].
  struct OutputRow {
    int32_t step = 0;
    int32_t output = 0;
  };
  // A plan from Begin to Finish.
  struct Begun {
    const IterationPlan* plan = nullptr;
    std::vector<OutputRow> outputs;     // ascending by row
    std::vector<SampleResult> samples;  // of outputs, and of padding
    bool takes_hidden = false;          // some sequences are pooled, or give hidden states
    std::vector<std::vector<std::byte>> stored_pages;
    std::vector<std::vector<float>> hidden;  // of outputs that ask for it, in order
    Tensor message;                          // of the link: what came from it and goes on by it
    bool to_send = false;                    // once the ops have been waited for
    MaskBoard::Masks masks;                  // of its masked outputs: sampling reads them
    Times times;
    ExpertUse experts;
  };

  Stage(Backend& backend, Model& model, int64_t max_batch_tokens, KvCache cache);
  absl::Status AllocateActivations(int64_t max_batch_tokens);

  // Whether the device does a plan's work without the host, which looks again in Finish.
  bool DetachesWork() const {
    return backend_.asynchronous() && (ranks_ == nullptr || ranks_->asynchronous());
  }
  absl::StatusOr<std::vector<std::shared_ptr<const Adapter>>> AdaptersOf(
      const IterationPlan& plan) const;
  void Flatten(const IterationPlan& plan);
  Batch FlatBatch() const { return {token_ids_, positions_, spans_, window_spans_, row_adapters_}; }
  void CollectOutputs(Begun& begun);
  void Pad(const IterationPlan& plan, Begun& begun);
  absl::StatusOr<Tensor> ReceiveHidden(const IterationPlan& plan, Begun& begun);
  absl::Status Launch(const IterationPlan& plan, Begun& begun,
                      const std::function<void()>& before_output);
  absl::Status LaunchDetached(Tensor hidden, Begun& begun,
                              const std::function<void()>& before_output);
  // The link's memory for copies; null: ops read and write its buffers, or there is no link.
  Staging* staging() { return link_ == nullptr ? nullptr : backend_.staging(link_->place()); }
  // Rows of the input that a stage gets from the one before it.
  static int64_t RowsTo(int stage, const IterationPlan& plan) {
    return plan.stages.Contains(stage) ? plan.num_tokens() : 0;
  }
  absl::Status CheckPageBytes(const IterationPlan& plan) const;
  void LoadPage(const PageLoad& load);
  absl::Status CheckHeld(const IterationPlan& plan);
  absl::Status CheckTags(LiveSequence& sequence, PageKind kind, int64_t first, int64_t end);
  void NoteRows(const Begun& begun, bool again = false);
  absl::Status CheckPassing(const IterationPlan& plan);
  absl::Status PassBy(const IterationPlan& plan, Begun& begun);
  absl::Status HandOver(Tensor hidden, Begun& begun);
  absl::Status SendMessage(Begun& begun);
  absl::Status AwaitMasks(Begun& begun);
  absl::Status RunOutputs(Tensor hidden, Begun& begun);
  absl::Status TakeHidden(Tensor hidden, Begun& begun);
  absl::Status SampleTile(Tensor logits, std::span<const SampleRow> rows,
                          std::span<SampleResult> samples);
  absl::Status GatherLogits(Tensor logits, std::span<const SampleRow> rows,
                            std::span<SampleResult> samples);
  static const RowOutput& AskedOf(const Begun& begun, const OutputRow& output) {
    return begun.plan->steps[output.step].outputs[output.output];
  }
  SampleRow MakeSampleRow(const Step& step, const RowOutput& asked, const LiveSequence& live);
  IterationResult TakeResult(Begun& begun);

  Backend& backend_;
  Model& model_;
  const int64_t max_batch_tokens_;
  KvCache cache_;
  SequenceTable sequences_;

  // Given by the epoch:
  Communicator* ranks_ = nullptr;
  ActivationLink* link_ = nullptr;
  MaskBoard* masks_ = nullptr;
  int stage_ = 0;
  ReplayLog* log_ = nullptr;
  FindAdapter find_adapter_;  // not of the epoch; may be empty

  Buffer hidden_;              // [max_batch_tokens, hidden] f32; unused where the link's are used
  Buffer head_hidden_;         // [kMaxHeadRows, hidden] f32; this and below: last stage only
  Buffer logits_;              // [kMaxHeadRows, largest shard of the vocabulary] f32
  int64_t shard_columns_ = 0;  // that largest shard
  Buffer gathered_;            // [ranks][kMaxHeadRows, shard_columns_] f32; several ranks only
  Buffer all_logits_;          // [kMaxHeadRows, vocab] f32; several ranks only

  // The flat batch of the current plan; capacities are reserved once.
  std::vector<int32_t> token_ids_;   // [num_tokens]
  std::vector<int32_t> positions_;   // [num_tokens]
  std::vector<SequenceSpan> spans_;  // [steps]
  // The same with window pages, where layers of both kinds are; else spans_ has the pages there
  // are.
  std::vector<SequenceSpan> window_spans_;
  std::vector<const Adapter*> row_adapters_;   // [num_tokens], or none
  std::vector<const Adapter*> head_adapters_;  // of the rows of a call of the head, likewise
  std::vector<LiveSequence*> live_;            // [steps]
  std::vector<int32_t> output_rows_;           // [outputs, padding included]
  std::vector<SampleRow> sample_rows_;         // as output_rows_
  // Counts for sampled rows that are not their steps' last ones; sample_rows_ points to them.
  std::deque<std::vector<TokenCount>> earlier_counts_;
  std::vector<int32_t> hidden_rows_;    // of the step whose hidden states are being taken
  std::vector<float> host_states_;      // [at most kMaxHeadRows, hidden] of them
  GraphKey graph_;                      // rows = 0: not a batch for RunGraph
  std::vector<ShardSample> own_part_;   // [kMaxHeadRows]; this and below: several ranks only
  std::vector<ShardSample> all_parts_;  // [ranks * kMaxHeadRows]
  std::vector<ShardSample> row_parts_;  // [ranks], of one row

  std::array<Begun, 2> begun_;
  uint64_t num_begun_ = 0;  // plan i is in begun_[i % 2]
  uint64_t num_finished_ = 0;
  Times times_;
};

}  // namespace treadle
