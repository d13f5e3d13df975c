// An adapter on disk, checked against the model that it is for: LoRA factors (Hu et al. 2021) in a
// PEFT folder (adapter_config.json, adapter_model.safetensors) or llama.cpp's .gguf, or a soft
// prompt (Lester et al. 2021, "The power of scale for parameter-efficient prompt tuning") in a PEFT
// folder: rows that stand for the embeddings of a sequence's first positions.
//
// Nothing is ignored: a tensor that is no factor of one of the model's matrices or prompt, or a
// setting that changes what the factors mean (DoRA, trained biases, whole modules that were saved),
// is an error that names it. Files are mapped, and read again by each rank that loads them.
//
// Thread safety: constant after Open.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// The two factors of one matrix [n, k]: scale * b a is added to it. Values and rows as in the file.
struct AdapterFactors {
  std::string name;                // of the matrix, in the file
  const TensorRow* row = nullptr;  // of the model's architecture
  int64_t layer = 0;               // 0 outside of layers
  int64_t expert = 0;
  int64_t rank = 0;
  float scale = 1;          // alpha / rank, or as rsLoRA says alpha / sqrt(rank)
  StoredTensor a;           // [rank, k]; of an embedding's in llama.cpp's files [k, rank]
  StoredTensor b;           // [n, rank]
  bool a_by_token = false;  // that other order

  // The type that holds both factors as they are, the scale being the second's.
  DType LoadedType() const;
};

// An adapter that came otherwise than as files: what one says of itself.
struct AdapterContents {
  std::string path, hash;
  Container kind = Container::kHuggingFace;
  std::vector<AdapterFactors> factors;  // but for what the model says of them
  std::optional<StoredTensor> soft_prompt = {};
  std::shared_ptr<const void> memory;  // of their data
};

class AdapterFile {
 public:
  static constexpr int64_t kMaxRank = 512;

  // config: of the model. NotFound, or InvalidArgument with the file, the tensor or the setting,
  // what was found and what was expected.
  static absl::StatusOr<std::shared_ptr<const AdapterFile>> Open(const std::string& path,
                                                                 const ModelConfig& config);

  // Checked as files are.
  static absl::StatusOr<std::shared_ptr<const AdapterFile>> Make(AdapterContents contents,
                                                                 const ModelConfig& config);

  const std::string& path() const { return path_; }
  Container kind() const { return kind_; }
  // 64 hexadecimal digits: the SHA-256 of all that decides what it adds.
  const std::string& hash() const { return hash_; }
  // The first 16 of them as a number: a plan's name for it. Never 0.
  uint64_t id() const { return id_; }
  // The model that the adapter says it was trained for; empty: it does not say.
  const std::string& base() const { return base_; }
  int64_t rank() const { return rank_; }  // the largest
  // Bytes that it takes when loaded, by one rank whose Backend::low_rank_type is `floats`.
  uint64_t memory(DType floats) const { return memory_ - (floats == DType::kF32 ? 0 : halved_); }
  const std::vector<AdapterFactors>& factors() const { return factors_; }
  // [virtual_tokens, hidden], as transformers' `inputs_embeds`; no shape: it has none.
  const StoredTensor& soft_prompt() const { return soft_prompt_; }
  int32_t virtual_tokens() const {
    return soft_prompt_.shape.empty() ? 0 : static_cast<int32_t>(soft_prompt_.shape[0]);
  }
  // The model's own embeddings, which PEFT may write beside their factors: they are not loaded.
  const std::vector<std::string>& left_aside() const { return left_aside_; }
  // Errors if the weights' file was written to (mapped_file.h). Call CheckUnchanged after reading
  // factors, and Revalidate before reading them again after a while.
  absl::Status CheckUnchanged() const;
  absl::Status Revalidate() const;
  // Whether opening its path again would give the same adapter. False of one that came otherwise
  // than as files.
  bool IsAtItsPath() const;

 private:
  friend class AdapterReader;
  AdapterFile() = default;

  std::string path_, hash_, base_;
  Container kind_ = Container::kHuggingFace;
  uint64_t id_ = 0;
  int64_t rank_ = 0;
  uint64_t memory_ = 0, halved_ = 0;  // as floats, and what 16 bits spare
  std::vector<AdapterFactors> factors_;
  StoredTensor soft_prompt_;
  std::vector<std::string> left_aside_;
  std::vector<std::shared_ptr<const MappedFile>> files_;    // that its factors lie in
  std::vector<std::shared_ptr<const MappedFile>> sources_;  // that it was made from
  std::shared_ptr<const void> contents_;                    // instead of files
};

}  // namespace treadle
