// Writes a GGUF version 3 file, tensor by tensor, and says in it what is to be said of a model that
// comes from a Hugging Face folder: its sizes, its tokenizer, its chat template.
//
// Thread safety: the writers are confined to one thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/output_file.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// Key/value pairs in the file's own encoding.
class GgufMetadataWriter {
 public:
  // `pair`: a whole pair as another file has it (GgufFile::RawPair).
  void AddRaw(std::span<const std::byte> pair);
  using Value =
      std::variant<std::string_view, uint32_t, float, bool, std::span<const std::string>,
                   std::span<const int32_t>, std::span<const float>, std::span<const bool>>;
  void Add(std::string_view key, const Value& value);

  uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  uint64_t count_ = 0;
  std::string bytes_;
};

// general.*, ARCHITECTURE.* and tokenizer.*. notices: appends what could not be said. Errors: a
// tokenizer that GGUF cannot hold.
absl::Status DescribeModel(const Checkpoint& checkpoint, GgufMetadataWriter& metadata,
                           std::vector<std::string>& notices);

// tokenizer.ggml.*, the inverse of ReadGgufTokenizer. There are as many tokens as `vocab`.
absl::Status DescribeTokenizer(const TokenizerSpec& spec, int64_t vocab,
                               GgufMetadataWriter& metadata, std::vector<std::string>& notices);

// By what "llama3" scaling or LongRoPE divides the frequency of each pair, as tensors.
struct FrequencyFactors {
  std::string name;
  std::vector<float> values;  // [rope_dim / 2]
};
// Empty if the model has no such scaling.
std::vector<FrequencyFactors> FrequencyFactorsOf(const ModelConfig& config);

class GgufFileWriter {
 public:
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;  // outermost first
    const WeightFormat* format = nullptr;
  };

  // Writes all but the tensors' data. `alignment` is what the metadata says.
  static absl::StatusOr<std::unique_ptr<GgufFileWriter>> Create(const std::string& path,
                                                                const GgufMetadataWriter& metadata,
                                                                const std::vector<Tensor>& tensors,
                                                                uint64_t alignment);
  // In the order of `tensors`, each in one piece or in several.
  absl::Status Add(std::span<const std::byte> data);
  // Puts `text` where the metadata has `placeholder`, which is as long and occurs once.
  absl::Status Replace(std::string_view placeholder, std::string_view text);
  absl::Status Finish();

 private:
  GgufFileWriter() = default;

  std::unique_ptr<OutputFile> file_;
  std::string head_;  // what the file begins with
  std::vector<uint64_t> sizes_;
  size_t added_ = 0;
  uint64_t part_ = 0;  // bytes of the next one
  uint64_t alignment_ = 0;
};

}  // namespace treadle
