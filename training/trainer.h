// Trains an adapter over a frozen model: QLoRA (Dettmers et al. 2023, section 3), with the base in
// any format that the CPU backend multiplies, in exact arithmetic.
//
// The layers run in this process, or where TrainingOptions::connect finds them (frozen_layers.h);
// embedding, head, adapter and optimizer are here. A step that loses its layers runs again.
//
// Deterministic: the same examples, options and seed give the same bits, on any number of threads
// and wherever the layers are.
//
// Thread safety: confined to one thread, which the backend's pool joins.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/ops/cpu_ops.h"
#include "models/checkpoints/checkpoint.h"
#include "models/decoder.h"
#include "training/adamw.h"
#include "training/examples.h"
#include "training/frozen_layers.h"
#include "training/tape.h"
#include "training/trained_adapter.h"

namespace treadle {

struct TrainingOptions {
  LoraOptions lora;
  AdamWOptions optimizer;      // its steps are all steps of the run
  int64_t batch_size = 4;      // examples that run together
  int64_t accumulation = 1;    // batches whose gradients make one step
  int64_t max_length = 512;    // tokens of an example
  bool keep_order = false;     // examples come as they are listed; else each epoch shuffles them
  uint64_t seed = 0;           // of A, and of the order of examples
  WeightPlan weights = {};     // of the base; empty: as stored
  int threads = 0;             // 0: one for each CPU of this process
  std::string checkpoint_key;  // identity of model and examples, equal to resume
  std::function<void(double)> loading = {};  // fraction of the model loaded; may be empty
  // Stands before each example, within the model's context; lora.rank is 0 then.
  SoftPromptOptions soft_prompt = {};
  // Finds the layers for an adapter, which outlives them; empty: this process loads them.
  std::function<absl::StatusOr<std::unique_ptr<Layers>>(TrainedAdapter&)> connect = {};
};

struct StepReport {
  int64_t step = 0;    // done so far, this one included
  double loss = 0;     // mean over the counted tokens, before the step
  int64_t tokens = 0;  // of all its examples, with a soft prompt's
  double learning_rate = 0;
  double gradient_norm = 0;
};

// Steps that see each example `epochs` times.
int64_t StepsOf(double epochs, size_t examples, const TrainingOptions& options);

class Trainer {
 public:
  // `folder` is for the optimizer's memory. examples: at most max_length tokens each. Errors:
  // CheckTrainable's, and of loading.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const Checkpoint& checkpoint,
                                                         std::vector<Example> examples,
                                                         const TrainingOptions& options,
                                                         const std::string& folder);

  // One step of the optimizer, on the next batch_size * accumulation examples. Internal if the loss
  // is no number any longer. Errors of Layers, after which nothing of the step is done.
  absl::StatusOr<StepReport> Step();
  int64_t steps_done() const { return step_; }

  // Writes the state of the run to a file that replaces `path` once it is whole.
  absl::Status WriteCheckpoint(const std::string& path) const;
  // Goes on from there, bit for bit. Errors: no such file, or one of other options, by name.
  absl::Status Resume(const std::string& path);

  TrainedAdapter& adapter() { return *adapter_; }
  std::string description() const { return tape_->description(); }

 private:
  explicit Trainer(const TrainingOptions& options) : options_(options) {}
  absl::Status Allocate();
  // Positions of a sequence at most.
  int64_t MaxPositions() const { return options_.max_length + options_.soft_prompt.virtual_tokens; }
  // The number-th example of the run, from 0.
  const Example& ExampleAt(int64_t number);
  // Runs the batches of a step; gives the sum of losses, and sets the adapter's gradients to those
  // of that sum times `scale`.
  absl::StatusOr<double> RunBatches(std::span<const Example* const> examples, float scale);
  // Runs a batch forward and back; gives the sum of its losses.
  absl::StatusOr<double> RunBatch(std::span<const Example* const> batch, float scale);
  // Sets Gradient(hidden) of the last layer's output, and gives the sum of losses.
  double RunHead(std::span<const Example* const> batch, Tensor hidden, float scale);
  // The settings that a checkpoint must share, as JSON.
  std::string Settings() const;

  const TrainingOptions options_;
  std::vector<Example> examples_;  // behind the soft prompt's positions
  std::unique_ptr<Tape> tape_;
  std::unique_ptr<Model> model_;  // a Decoder
  Decoder* decoder_ = nullptr;
  std::unique_ptr<TrainedAdapter> adapter_;
  std::unique_ptr<Layers> layers_;
  std::unique_ptr<AdamW> optimizer_;
  int64_t step_ = 0;
  int64_t epoch_ = -1;          // that order_ is of
  std::vector<int32_t> order_;  // [examples]

  int64_t head_rows_ = 0;
  Buffer hidden_;            // [max tokens, hidden]
  Buffer head_in_, logits_;  // [head_rows_, hidden], [head_rows_, vocab]
};

}  // namespace treadle
