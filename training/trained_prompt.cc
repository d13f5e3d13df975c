// A TrainedAdapter that is a soft prompt.
#include "base/status.h"
#include "kernels/sampling.h"
#include "models/checkpoints/write/hf_matrix_writer.h"
#include "training/trained_adapter.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<TrainedAdapter>> TrainedAdapter::CreateSoftPrompt(
    Decoder& model, Tape& tape, const SoftPromptOptions& options, uint64_t seed) {
  std::unique_ptr<TrainedAdapter> adapter(new TrainedAdapter());
  const ModelConfig& config = model.config();
  const int64_t rows = options.virtual_tokens;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < rows; ++i) {
    const auto drawn =
        static_cast<int32_t>(CounterUniform(seed, 0, i) * static_cast<double>(config.vocab));
    ids.push_back(options.begin.empty()
                      ? drawn
                      : options.begin[static_cast<size_t>(i) % options.begin.size()]);
  }
  adapter->values_.resize(static_cast<size_t>(rows * config.hidden));
  adapter->gradients_.resize(adapter->values_.size());
  adapter->soft_prompt_ = model.NewAdapter(std::span(adapter->values_).size_bytes());
  adapter->soft_prompt_->SetVirtualTokens(static_cast<int32_t>(rows));
  TREADLE_RETURN_IF_ERROR(adapter->soft_prompt_->AddSoftPrompt(tape, adapter->values_));
  const Tensor table = adapter->soft_prompt_->soft_prompt();
  TREADLE_RETURN_IF_ERROR(model.ReadEmbedding(ids, table));
  adapter->soft_prompt_scale_ = model.SoftPromptScale();
  adapter->soft_prompt_growth_ = adapter->soft_prompt_scale_ * model.EmbeddingScale();
  for (size_t i = 0; i < adapter->values_.size(); ++i) {
    adapter->values_[i] = table.Row<float>(0)[i] / adapter->soft_prompt_scale_;
  }
  adapter->Refresh();
  return adapter;
}

void TrainedAdapter::AddGradient(Tensor rows, std::span<const int32_t> lengths) {
  if (!soft_prompt_) return;
  const auto growth = static_cast<float>(soft_prompt_growth_);
  int64_t first = 0;
  for (const int32_t length : lengths) {
    const float* const from = rows.Row<float>(first);
    for (size_t i = 0; i < gradients_.size(); ++i) gradients_[i] += from[i] * growth;
    first += length;
  }
}

absl::Status TrainedAdapter::WriteSoftPrompt(const std::string& folder,
                                             const std::string& base) const {
  const Tensor& table = soft_prompt_->soft_prompt();
  TREADLE_ASSIGN_OR_RETURN(const auto writer,
                           SafetensorsWriter::Create(folder + "/adapter_model.safetensors", 4096));
  TREADLE_RETURN_IF_ERROR(writer->Add("prompt_embeddings", "F32", {table.rows, table.cols},
                                      std::as_bytes(std::span(values_))));
  TREADLE_RETURN_IF_ERROR(writer->Finish({{"format", "pt"}}));
  return WriteConfig(folder + "/adapter_config.json", base);
}

}  // namespace treadle
