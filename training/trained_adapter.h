// An adapter in training: the low-rank updates (LoRA, Hu et al. 2021) of a model's linear layers,
// or a soft prompt (Lester et al. 2021), rows that stand before a text's embeddings. Their numbers,
// gradients, and the folder that PEFT reads.
//
// Thread safety: confined to the thread that calls the backend's ops.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"
#include "models/decoder.h"
#include "training/tape.h"

namespace treadle {

struct LoraOptions {
  int64_t rank = 16;  // 0: there are no updates
  double alpha = 32;  // updates are multiplied by alpha / rank
  std::string targets = "q,k,v,o,gate,up,down";
};

struct SoftPromptOptions {
  int64_t virtual_tokens = 0;  // rows; 0: there is none
  // Tokens whose embeddings the rows begin as, again from the first where they are too few. Empty:
  // tokens drawn from the whole vocabulary.
  std::vector<int32_t> begin = {};
};

// Ok if a model's layers have gradients and its targets are matrices of their own: families with
// Llama's layer, without experts, states and fused matrices. Unimplemented otherwise, with what is
// in the way; InvalidArgument for targets that are none.
// `name`: the model's, for errors.
absl::Status CheckTrainable(const ModelConfig& config, const std::string& name,
                            const LoraOptions& options);
inline absl::Status CheckTrainable(const Checkpoint& checkpoint, const LoraOptions& options) {
  return CheckTrainable(checkpoint.config(), checkpoint.path(), options);
}

class TrainedAdapter {
 public:
  // The update of one matrix.
  struct Module {
    std::string name;  // "model.layers.0.self_attn.q_proj"
    int64_t layer = 0;
    Linear LayerWeights::*linear = nullptr;  // the matrix
    size_t begin = 0;                        // in values
    LowRankUpdate update;
    std::vector<int32_t> row_order;  // FileRowOrder of folders
    // Memory of update: both of factors, and b.
    std::vector<float> a_transposed, b_transposed, b;
  };

  // Makes updates for a model's layers. They begin as PEFT's: A uniform in +-1 / sqrt(k), drawn by
  // `seed` (kernels/sampling.h, CounterUniform), B zeros. REQUIRES: CheckTrainable.
  static std::unique_ptr<TrainedAdapter> Create(const ModelConfig& config, LayerRange layers,
                                                const LoraOptions& options, uint64_t seed);

  // Makes a soft prompt instead, for the beginning of every sequence. Errors: of memory. REQUIRES:
  // that model and tape stay as long as it.
  static absl::StatusOr<std::unique_ptr<TrainedAdapter>> CreateSoftPrompt(
      Decoder& model, Tape& tape, const SoftPromptOptions& options, uint64_t seed);

  // Gives `tape`, the backend of `model`, the updates of these layers, which are some of both.
  // REQUIRES: that nothing runs on `tape` with them once the adapter is gone.
  void Attach(const Decoder& model, LayerRange layers, Tape& tape) const;

  // Batch::adapters of every row; null: updates need none.
  const Adapter* soft_prompt() const { return soft_prompt_.get(); }
  // Adds to the gradients of a soft prompt those of what enters the first layer, [rows,
  // hidden], of sequences of these lengths.
  void AddGradient(Tensor rows, std::span<const int32_t> lengths);

  const std::vector<Module>& modules() const { return modules_; }
  // The numbers of all updates, one after the other: A [rank, k], then B transposed [rank, n]; or a
  // soft prompt's, [virtual_tokens, hidden], as PEFT has them.
  std::span<float> values() { return values_; }
  std::span<float> gradients() { return gradients_; }
  // Sizes of the tensors that values are made of: the factors, or the prompt.
  std::vector<size_t> Tensors() const;
  // The part of either that is of these layers.
  std::span<float> Part(std::span<float> numbers, LayerRange layers) const;
  // Brings the factors that the tape multiplies with, or the rows that it embeds, up to values.
  void Refresh();

  // Writes adapter_config.json and adapter_model.safetensors into the folder, with rows in the
  // order of Hugging Face's folders. base: a path or name that the first shall name. Errors: a
  // file that is there already, or cannot be written.
  absl::Status Write(const std::string& folder, const std::string& base) const;

 private:
  TrainedAdapter() = default;
  absl::Status WriteConfig(const std::string& path, const std::string& base) const;
  absl::Status WriteSoftPrompt(const std::string& folder, const std::string& base) const;

  LoraOptions options_;
  std::unique_ptr<Adapter> soft_prompt_;
  float soft_prompt_scale_ = 1;    // of values, in the table of embeddings
  double soft_prompt_growth_ = 1;  // of what enters the first layer, by values
  std::vector<Module> modules_;
  std::vector<float> values_, gradients_;
};

}  // namespace treadle
