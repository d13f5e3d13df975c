// A checkpoint on disk: GGUF v3, or a Hugging Face folder (config.json, model.safetensors or the
// sharded index, tokenizer.json), plain or quantized (hf_quantization.h). Files are memory-mapped;
// nothing is trusted: every length, offset, shape and type is checked against the file before use,
// and an error names the file, the tensor or key, what was found and what was expected.
//
// Thread safety: constant after Open; the mapping lives as long as the object.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "kernels/formats/matrix_source.h"
#include "models/architectures/architecture.h"
#include "models/text/tokenizer.h"

namespace treadle {

// One stored tensor. `shape` is outermost first: a matrix is [out_features, in_features].
struct StoredTensor {
  std::string name;  // as in the file
  const WeightFormat* format = nullptr;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  uint64_t bytes = 0;           // at data
  uint64_t constant_bytes = 0;  // apart formats: of the constants in the file
  // Apart formats: reads, decodes and checks the constants, when the tensor is loaded (all of a
  // large model's at once would be a lot of memory). Errors name the tensor that holds them.
  std::function<absl::StatusOr<MatrixConstants>()> constants = {};
  // If set: makes the `bytes` bytes, which lie in another order in the file; `data` is then null.
  // Not of apart formats.
  std::function<std::vector<std::byte>()> arranged = {};

  int64_t Elements() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
};

// How a model's authors recommend to sample.
struct RecommendedSampling {
  std::string source;                    // where the files say it, for errors
  std::map<std::string, double> values;  // by name, of kSamplingNames; of any value
};

// The parameters that files recommend: generation_config.json's name, and llama.cpp's key
// (gguf-py/gguf/constants.py).
inline constexpr std::pair<const char*, const char*> kSamplingNames[] = {
    {"temperature", "general.sampling.temp"},
    {"top_k", "general.sampling.top_k"},
    {"top_p", "general.sampling.top_p"},
    {"min_p", "general.sampling.min_p"},
    {"repetition_penalty", "general.sampling.penalty_repeat"},
};

std::string ShapeText(std::span<const int64_t> shape);  // "[2, 3]"

// The tensor as a matrix [n, k], with constants (and codes, where the file has others) that are
// kept in `constants`. Thread safety: a pure function.
absl::StatusOr<MatrixSource> SourceOf(const StoredTensor& tensor, int64_t n, int64_t k,
                                      MatrixConstants& constants);

// Values of a 1-D tensor.
std::vector<float> DecodeVector(const StoredTensor& tensor);

// Files by name.
using TextFiles = std::map<std::string, std::shared_ptr<const MappedFile>>;

class Checkpoint {
 public:
  using Kind = Container;

  // `path` is a .gguf file, or a folder with config.json, or a random model's shape
  // (random_checkpoint.h).
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);
  virtual ~Checkpoint() = default;

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  // Model name from the metadata, or the file's name.
  const std::string& model_name() const { return model_name_; }
  const ModelConfig& config() const { return config_; }
  // Null when the checkpoint has no tokenizer: the model then serves token ids only.
  const TokenizerSpec* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  // Generation stops at any of these; known without a tokenizer too.
  const std::vector<int32_t>& end_ids() const {
    return tokenizer_ ? tokenizer_->end_ids : end_ids_;
  }
  // Jinja source; empty when there is none.
  const std::string& chat_template() const { return chat_template_; }
  // Read when it is asked. Errors: a value that is no number.
  virtual absl::StatusOr<RecommendedSampling> Sampling() const { return RecommendedSampling(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  uint64_t file_bytes() const { return file_bytes_; }
  // Parts of a folder's model that are not of text, as "vision_tower": none of them is loaded.
  const std::vector<std::string>& left_aside() const { return left_aside_; }
  // The files that hold the tensors, in order; none of random weights.
  const std::vector<std::shared_ptr<const MappedFile>>& weight_files() const {
    return weight_files_;
  }
  // config.json of a folder; null otherwise.
  const std::shared_ptr<const MappedFile>& config_file() const { return config_file_; }
  // The files of a folder beside weights, as they were when it was opened (text_files.h). Errors:
  // ReadTextFiles's.
  const absl::StatusOr<TextFiles>& text_files() const { return text_files_; }
  // Where no file does: all that decides the weights, as text.
  const std::string& recipe() const { return recipe_; }

  // MappedFile::CheckUnchanged of all weight files. Call it after reading tensors.
  absl::Status CheckUnchanged() const;
  // MappedFile::Revalidate of all weight files. Call it before reading tensors again after a while.
  absl::Status Revalidate() const;

  // Null if there is none of that name.
  const StoredTensor* Find(std::string_view name) const;
  // As Find, but an error that names the tensor if it is missing or its shape is another. From here
  // on, and until the next Require, its bytes can be read. An error, too, if its file has changed
  // since it was opened.
  absl::StatusOr<const StoredTensor*> Require(std::string_view name,
                                              std::initializer_list<int64_t> shape) const;

 protected:
  Checkpoint() = default;
  // Makes the tensor's bytes readable, where a file mapping does not do it.
  virtual absl::Status Fetch(const StoredTensor& tensor) const { return absl::OkStatus(); }
  // Why a tensor cannot be had.
  absl::Status Missing(std::string_view name) const;
  // As Require, for any matrix.
  absl::StatusOr<const StoredTensor*> RequireMatrix(std::string_view name) const;
  void AddTensors(std::vector<StoredTensor> tensors);
  // Once all has been read: each layer's experts are as many as the model says, and their matrices
  // come one after the other, in ascending order.
  absl::Status ArrangeExperts();
  // Once tokenizer and template are read. Whatever ends a turn in the template is an end, too,
  // whatever ids the files name: control tokens that llama.cpp as well knows by their texts.
  void AddTurnEnds();
  // Sizes in range and in harmony: what every loader relies on.
  absl::Status CheckConsistency() const;
  absl::Status CheckLayers() const;
  absl::Status CheckStates(const Architecture& architecture) const;
  absl::Status CheckRope(const Architecture& architecture) const;

  Kind kind_ = Kind::kGguf;
  std::string path_;
  std::string model_name_;
  ModelConfig config_;
  std::optional<TokenizerSpec> tokenizer_;
  std::vector<int32_t> end_ids_;  // without a tokenizer
  std::string chat_template_;
  std::vector<std::string> left_aside_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  // Entries of the files that are no tensor of ours, and their types.
  std::map<std::string, std::string, std::less<>> unread_;
  std::vector<std::shared_ptr<const MappedFile>> weight_files_;
  std::shared_ptr<const MappedFile> config_file_;
  absl::StatusOr<TextFiles> text_files_ = TextFiles();
  std::string recipe_;
  uint64_t file_bytes_ = 0;
};

// Sources for Checkpoint::Open: two kinds on disk, and paths that begin with the prefix.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(const std::string& path);
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenHuggingFace(const std::string& folder);
inline constexpr std::string_view kRandomPrefix = "random:";
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenRandom(const std::string& path);

}  // namespace treadle
