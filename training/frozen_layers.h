// Layers of a frozen model, forward and back: a batch runs forward once, of which the input of
// every layer is kept; then each layer, last first, runs again on a tape (tape.h) and back (Chen et
// al. 2016, "Training deep nets with sublinear memory cost"). Sequences lie flat beside each other,
// without padding.
//
// Thread safety: confined to the thread that calls the backend's ops.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "models/decoder.h"
#include "training/tape.h"
#include "training/trained_adapter.h"

namespace treadle {

// The layers that a Trainer trains through, wherever they run. The updates are an adapter's, which
// is up to its values (TrainedAdapter::Refresh) and does not change from BeginStep to EndStep.
class Layers {
 public:
  virtual ~Layers() = default;

  // Begins a step, or begins it anew: the sums of the updates' gradients are zeros. Errors of this
  // and what follows: Unavailable, after which the step may begin anew; others are final.
  virtual absl::Status BeginStep() = 0;
  // Runs a batch of sequences of these lengths, side by side: the inputs of the first layer become
  // the outputs of the last one. hidden: [rows, hidden].
  virtual absl::Status Forward(std::span<const int32_t> lengths, std::span<float> hidden) = 0;
  // Goes back over the batch that went forward last: the gradient by the outputs becomes that by
  // the inputs, and those by the updates are added up. gradient: [rows, hidden].
  virtual absl::Status Backward(std::span<float> gradient) = 0;
  // Puts the sums into the adapter's gradients.
  virtual absl::Status EndStep() = 0;
};

class FrozenLayers {
 public:
  // The most that batches have.
  struct Room {
    int64_t tokens = 0, pages = 0;  // pages: of the K/V cache of a layer
    // Room for so many sequences of at most max_length tokens each, together.
    static Room For(int64_t sequences, int64_t max_length);
    // Room for what Pass::SliceFrom gives.
    static Room ForSlices(int64_t max_length);
  };

  // `model` is on `tape`, and has room for as many tokens. Both outlive the object.
  static absl::StatusOr<std::unique_ptr<FrozenLayers>> Create(Tape& tape, Decoder& model,
                                                              const Room& room);

  // Some of the sequences of a batch, by number. How a batch is cut never changes a bit: sums over
  // its rows go on where they were.
  struct Slice {
    size_t begin = 0;
    size_t end = 0;  // exclusive
  };
  static constexpr int64_t kSliceTokens = 256;

  // A batch on its way forward and back.
  struct Pass {
    LayerRange layers;             // that it passes
    std::vector<int32_t> lengths;  // of its sequences
    std::vector<float> states;     // [layers + 1, rows, hidden]: each layer's input, and the output
    std::vector<float> gradient;   // [rows, hidden]
    Slice All() const { return {0, lengths.size()}; }
    // The sequences from `begin` on that have kSliceTokens together, or one that has more.
    Slice SliceFrom(size_t begin) const;
    // The input of a layer, or the output of the one before. [rows, hidden]
    std::span<float> State(int64_t layer) {
      return std::span(states).subspan(static_cast<size_t>(layer - layers.begin) * gradient.size(),
                                       gradient.size());
    }
  };
  // Begins a batch in some of the model's layers; the caller sets the first of its states.
  void Begin(LayerRange layers, std::span<const int32_t> lengths, Pass& pass) const;
  // Runs one layer, and makes these rows of the next state.
  absl::Status Forward(int64_t layer, Slice slice, Pass& pass);
  // Goes back over one layer: in these rows pass.gradient, by its output, becomes that by its
  // input.
  absl::Status Backward(int64_t layer, Slice slice, Pass& pass);

  const Decoder& model() const { return model_; }
  Tape& tape() { return tape_; }

 private:
  FrozenLayers(Tape& tape, Decoder& model) : tape_(tape), model_(model) {}
  // Makes the batch, of which the tape keeps views.
  void MakeBatch(const Pass& pass, Slice slice);
  // The slice's part of a pass' rows.
  std::span<float> RowsOf(const Pass& pass, Slice slice, std::span<float> rows) const;
  // Runs a layer from its state, in hidden_, whose rows it gives.
  absl::StatusOr<Tensor> Run(int64_t layer, Slice slice, Pass& pass);

  Tape& tape_;
  Decoder& model_;
  KvLayout layout_;
  Buffer hidden_;  // [max tokens, hidden]
  Buffer pages_;   // of one layer, which all use in turn
  // The batch that runs.
  std::vector<int32_t> tokens_, positions_;  // [rows]; nothing reads the tokens
  std::vector<int32_t> page_ids_;            // [pages]
  std::vector<SequenceSpan> sequences_;
};

// All layers of a model in this process.
class LocalLayers final : public Layers {
 public:
  // `adapter`, of the model's layers, is attached to the tape, and outlives this.
  LocalLayers(std::unique_ptr<FrozenLayers> layers, TrainedAdapter& adapter);

  absl::Status BeginStep() override;
  absl::Status Forward(std::span<const int32_t> lengths, std::span<float> hidden) override;
  absl::Status Backward(std::span<float> gradient) override;
  absl::Status EndStep() override { return absl::OkStatus(); }

 private:
  const std::unique_ptr<FrozenLayers> layers_;
  TrainedAdapter& adapter_;
  FrozenLayers::Pass pass_;
};

}  // namespace treadle
