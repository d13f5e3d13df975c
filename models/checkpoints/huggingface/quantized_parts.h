// The entries of a checkpoint by name, and which of them have been taken as part of a quantized
// matrix. One reader per family of formats; the table of them is in hf_quantization.cc. Private to
// hf_quantization.h's implementation.
//
// Thread safety: none needed; one thread reads a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/huggingface/hf_quantization.h"

namespace treadle {

class QuantizedParts {
 public:
  explicit QuantizedParts(std::vector<SafetensorsEntry> entries);

  const std::map<std::string, SafetensorsEntry, std::less<>>& entries() const { return entries_; }
  // Null if there is none.
  const SafetensorsEntry* Find(std::string_view name) const;
  // As Find; what is found is taken.
  const SafetensorsEntry* Take(std::string_view name);
  // As Take, but an error unless it is there with this type and so many elements (-1: any).
  absl::StatusOr<const SafetensorsEntry*> Require(std::string_view name, std::string_view dtype,
                                                  int64_t elements);
  bool Taken(std::string_view name) const { return taken_.find(name) != taken_.end(); }

 private:
  std::map<std::string, SafetensorsEntry, std::less<>> entries_;
  std::set<std::string, std::less<>> taken_;
};

// An error about one entry: its file, its name, and what is wrong.
template <typename... Parts>
absl::Status EntryError(const SafetensorsEntry& entry, const Parts&... parts) {
  return InvalidArgument(entry.file, ": tensor ", Quoted(entry.name), " ", parts...);
}

// An entry as a tensor, with its constants yet to come.
inline StoredTensor TensorOf(const SafetensorsEntry& entry, const WeightFormat* format,
                             std::vector<int64_t> shape, uint64_t constant_bytes = 0) {
  return {.name = entry.name,
          .format = format,
          .shape = std::move(shape),
          .data = entry.data.data(),
          .bytes = entry.data.size(),
          .constant_bytes = constant_bytes};
}

// Values of an F32, F16 or BF16 entry.
std::vector<float> EntryValues(const SafetensorsEntry& entry);
// As EntryValues, but an error if one is not finite (or negative, with `absolute`).
absl::StatusOr<std::vector<float>> FiniteValues(const SafetensorsEntry& entry,
                                                bool absolute = false);

// Reads a JSON object inside a tensor about the matrix. The object must be checked for the rest.
struct MatrixDescription {
  nlohmann::json json;
  int64_t n = 0;
  int64_t k = 0;
  int64_t block = 0;
};
absl::StatusOr<MatrixDescription> ReadDescription(const SafetensorsEntry& entry,
                                                  const char* block_field);

// Whether an entry NAME.weight (or NAME.qweight) is of the reader's family; then its matrix.
struct QuantizedReader {
  bool (*claims)(const QuantizedParts& parts, const SafetensorsEntry& weight,
                 const HfQuantization& quantization);
  absl::StatusOr<StoredTensor> (*read)(QuantizedParts& parts, const SafetensorsEntry& weight,
                                       const HfQuantization& quantization);
};
extern const QuantizedReader kBitsAndBytes4BitReader;
extern const QuantizedReader kBitsAndBytesInt8Reader;
extern const QuantizedReader kFp8Reader;
extern const QuantizedReader kKBitReader;
extern const QuantizedReader kGroupReader;  // GPTQ and AWQ
extern const QuantizedReader
    kPackedReader;  // compressed-tensors' integers, in words and as they are
extern const QuantizedReader kCompressedInt8Reader;
extern const QuantizedReader kNvfp4Reader;

}  // namespace treadle
