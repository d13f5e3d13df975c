// GGUF version 3, as data: metadata and tensor table, checked against the file; and its tokenizer.
//
// Thread safety: constant after Read.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// Type ids of metadata values.
enum class GgufType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};

// One metadata value, or the elements of an array; strings point into the file.
struct GgufValue {
  GgufType type = GgufType::kU8;  // of the value, or of an array's elements
  bool array = false;             // of arrays: nothing of these is kept
  std::vector<std::string_view> strings;
  std::vector<double> numbers;  // exact for integers up to 2^53; bool is 0 or 1
};

class GgufFile {
 public:
  // InvalidArgument or Unimplemented, with the file and what was found, unless all of the file
  // holds together.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Read(const std::string& path);
  // The same of a file that is open already.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Parse(std::shared_ptr<const MappedFile> file);

  const std::string& path() const { return file_->path(); }
  uint64_t bytes() const { return file_->bytes().size(); }
  const std::shared_ptr<const MappedFile>& mapping() const { return file_; }
  // Experts' matrices one by one: of "blk.0.ffn_up_exps.weight" [experts, n, k] the matrices
  // "blk.0.ffn_up_exps.0.weight" and so on. What older files call "blk.0.ffn_up.0.weight" has that
  // name too.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // As many as the file's table has, where experts' matrices are one.
  int64_t tensors_in_file() const { return tensors_in_file_; }
  // Where tensors' data begins is a multiple of this.
  int64_t alignment() const { return alignment_; }

  // A metadata pair (key, type, value) as the file has it.
  struct RawPair {
    std::string_view key;
    std::span<const std::byte> bytes;
  };
  const std::vector<RawPair>& raw_metadata() const { return raw_metadata_; }  // in file order

  // Null if there is none of that name.
  const GgufValue* Find(std::string_view key) const;

  // Values by type: an error if the key holds another type, or (without a default) is missing. A
  // list that repeats one number, for each layer, is that number.
  absl::StatusOr<int64_t> Integer(std::string_view key,
                                  std::optional<int64_t> otherwise = {}) const;
  absl::StatusOr<double> Number(std::string_view key, std::optional<double> otherwise = {}) const;
  // An integer that is 0 or 1 is one too.
  absl::StatusOr<bool> Bool(std::string_view key, bool otherwise) const;
  absl::StatusOr<std::string> String(std::string_view key,
                                     std::optional<std::string> otherwise = {}) const;

 private:
  friend class GgufReader;
  GgufFile() = default;
  // One value that `fits`; null if it is missing and may be.
  absl::StatusOr<const GgufValue*> One(std::string_view key, bool optional, const char* expected,
                                       bool (*fits)(const GgufValue&)) const;

  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, GgufValue, std::less<>> values_;
  std::vector<RawPair> raw_metadata_;
  std::vector<StoredTensor> tensors_;
  int64_t tensors_in_file_ = 0;
  int64_t alignment_ = 0;
};

// All files of a model, in order: of a split one (NAME-00001-of-0000N.gguf) `path` is that of any
// part. Errors: GgufFile::Read's; NotFound that names the part that is missing.
absl::StatusOr<std::vector<std::unique_ptr<GgufFile>>> ReadGgufParts(const std::string& path);

// tokenizer.ggml.*: nothing if the file has no tokenizer; an error that names the key if it
// contradicts itself.
absl::StatusOr<std::optional<TokenizerSpec>> ReadGgufTokenizer(const GgufFile& file);

// Reads the sizes of a head's query and values under latent attention. Older files give them the
// names that others give the cache's. REQUIRES: head_dim and rope_dim are known.
absl::Status ReadLatentSizes(const GgufFile& file, const std::string& prefix, ModelConfig& config);

}  // namespace treadle
