// Writes a GGUF version 3 file, tensor by tensor.
//
// Thread safety: confined to one thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/output_file.h"
#include "kernels/formats/weight_format.h"

namespace treadle {

// Key/value pairs in the file's own encoding.
class GgufMetadataWriter {
 public:
  // `pair`: a whole pair as another file has it (GgufFile::RawPair).
  void AddRaw(std::span<const std::byte> pair);
  void AddString(std::string_view key, std::string_view value);
  void AddU32(std::string_view key, uint32_t value);
  void AddF32(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddStrings(std::string_view key, std::span<const std::string> values);
  void AddI32s(std::string_view key, std::span<const int32_t> values);
  void AddF32s(std::string_view key, std::span<const float> values);

  uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  uint64_t count_ = 0;
  std::string bytes_;
};

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
  // In the order of `tensors`.
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
  uint64_t alignment_ = 0;
};

}  // namespace treadle
