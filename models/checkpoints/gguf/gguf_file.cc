#include "models/checkpoints/gguf/gguf_file.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "base/file_calls.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr uint32_t kVersion = 3;
constexpr uint64_t kMaxDimensions = 4;
constexpr double kLargestExactInteger = 0x1p53;

template <typename T>
T Load(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

struct ScalarType {
  const char* name;
  size_t bytes = 0;                                   // 0: of variable size
  double (*number)(const std::byte* data) = nullptr;  // null: likewise
  bool integer = false;
};
template <typename T>
constexpr ScalarType Scalar(const char* name) {
  return {name, sizeof(T), [](const std::byte* data) { return static_cast<double>(Load<T>(data)); },
          std::is_integral_v<T>};
}
constexpr ScalarType kScalarTypes[] = {
    Scalar<uint8_t>("u8"),
    Scalar<int8_t>("i8"),
    Scalar<uint16_t>("u16"),
    Scalar<int16_t>("i16"),
    Scalar<uint32_t>("u32"),
    Scalar<int32_t>("i32"),
    Scalar<float>("f32"),
    {"bool", 1, [](const std::byte* data) { return *data == std::byte{0} ? 0.0 : 1.0; }},
    {"string"},
    {"array"},
    Scalar<uint64_t>("u64"),
    Scalar<int64_t>("i64"),
    Scalar<double>("f64")};

const ScalarType& RowOf(GgufType type) { return kScalarTypes[static_cast<size_t>(type)]; }

}  // namespace

// Walks the file once, from front to back; `at_` never passes the end.
class GgufReader {
 public:
  explicit GgufReader(std::shared_ptr<const MappedFile> file) : gguf_(new GgufFile()) {
    gguf_->file_ = std::move(file);
    bytes_ = gguf_->file_->bytes();
  }

  absl::StatusOr<std::unique_ptr<GgufFile>> Read() {
    TREADLE_RETURN_IF_ERROR(ReadHeader());
    for (uint64_t i = 0; i < metadata_count_; ++i) TREADLE_RETURN_IF_ERROR(ReadMetadata(i));
    for (uint64_t i = 0; i < tensor_count_; ++i) TREADLE_RETURN_IF_ERROR(ReadTensor(i));
    TREADLE_RETURN_IF_ERROR(PlaceTensors());
    TREADLE_RETURN_IF_ERROR(SplitExperts());
    return std::move(gguf_);
  }

 private:
  template <typename... Parts>
  absl::Status Error(const Parts&... parts) const {
    return InvalidArgument(gguf_->path(), ": ", parts...);
  }

  size_t left() const { return bytes_.size() - at_; }

  absl::Status Need(uint64_t bytes, const std::string& what) const {
    if (bytes <= left()) return absl::OkStatus();
    return Error("truncated: ", what, " at byte ", at_, " needs ", bytes, " bytes, the file has ",
                 left(), " more");
  }

  template <typename T>
  absl::StatusOr<T> Scalar(const std::string& what) {
    TREADLE_RETURN_IF_ERROR(Need(sizeof(T), what));
    const T value = Load<T>(bytes_.data() + at_);
    at_ += sizeof(T);
    return value;
  }

  absl::StatusOr<std::string_view> String(const std::string& what) {
    TREADLE_ASSIGN_OR_RETURN(const uint64_t length, Scalar<uint64_t>(what + ": length"));
    TREADLE_RETURN_IF_ERROR(Need(length, what));
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data() + at_), length);
    at_ += length;
    return text;
  }

  absl::StatusOr<GgufType> Type(const std::string& what) {
    TREADLE_ASSIGN_OR_RETURN(const uint32_t id, Scalar<uint32_t>(what + ": type"));
    if (id >= std::size(kScalarTypes)) {
      return Error(what, " has type ", id, ", expected 0 to ", std::size(kScalarTypes) - 1);
    }
    return static_cast<GgufType>(id);
  }

  absl::Status ReadHeader();
  absl::Status ReadMetadata(uint64_t index);
  absl::Status SkipArrays(uint64_t count, const std::string& what, int depth);
  absl::Status ReadElements(uint64_t count, const std::string& what, GgufValue& value);
  absl::Status ReadTensor(uint64_t index);
  absl::Status ReadShape(const std::string& what, StoredTensor& tensor);
  absl::Status PlaceTensors();
  absl::Status SplitExperts();

  std::unique_ptr<GgufFile> gguf_;
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  uint64_t tensor_count_ = 0;
  uint64_t metadata_count_ = 0;
  std::vector<uint64_t> offsets_;  // of each tensor, from the data section's begin
  std::set<std::string, std::less<>> tensor_names_;
};

absl::Status GgufReader::ReadHeader() {
  if (left() < 4 || std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
    return Error("is not a GGUF file: it does not begin with 'GGUF'");
  }
  at_ = 4;
  TREADLE_ASSIGN_OR_RETURN(const uint32_t version, Scalar<uint32_t>("version"));
  if (version == __builtin_bswap32(kVersion)) {
    return Error("is a big-endian GGUF file, expected little-endian");
  }
  if (version != kVersion) return Error("GGUF version is ", version, ", expected ", kVersion);
  TREADLE_ASSIGN_OR_RETURN(tensor_count_, Scalar<uint64_t>("tensor count"));
  TREADLE_ASSIGN_OR_RETURN(metadata_count_, Scalar<uint64_t>("metadata count"));
  // The smallest entries take 24 and 13 bytes: what cannot fit is refused before any work.
  if (tensor_count_ > left() / 24) {
    return Error("tensor count is ", tensor_count_, ", more than the file can hold");
  }
  if (metadata_count_ > left() / 13) {
    return Error("metadata count is ", metadata_count_, ", more than the file can hold");
  }
  return absl::OkStatus();
}

absl::Status GgufReader::ReadMetadata(uint64_t index) {
  const size_t begin = at_;
  TREADLE_ASSIGN_OR_RETURN(const std::string_view key, String(Str("metadata key ", index)));
  const std::string what = Str("metadata ", Quoted(key));
  GgufValue value;
  TREADLE_ASSIGN_OR_RETURN(value.type, Type(what));
  uint64_t count = 1;
  if (value.type == GgufType::kArray) {
    value.array = true;
    TREADLE_ASSIGN_OR_RETURN(value.type, Type(what + " (elements)"));
    TREADLE_ASSIGN_OR_RETURN(count, Scalar<uint64_t>(what + ": count"));
  }
  TREADLE_RETURN_IF_ERROR(value.type == GgufType::kArray ? SkipArrays(count, what, 1)
                                                         : ReadElements(count, what, value));
  if (!gguf_->values_.emplace(std::string(key), std::move(value)).second) {
    return Error(what, " appears twice");
  }
  gguf_->raw_metadata_.push_back({key, bytes_.subspan(begin, at_ - begin)});
  return absl::OkStatus();
}

// Arrays in an array, `depth` deep already: no key that is read has any.
absl::Status GgufReader::SkipArrays(uint64_t count, const std::string& what, int depth) {
  constexpr int kDeepest = 8;
  if (depth > kDeepest) return Error(what, " has arrays in arrays, more than ", kDeepest, " deep");
  for (uint64_t i = 0; i < count; ++i) {
    GgufValue skipped;
    TREADLE_ASSIGN_OR_RETURN(skipped.type, Type(what + " (elements)"));
    TREADLE_ASSIGN_OR_RETURN(const uint64_t elements, Scalar<uint64_t>(what + ": count"));
    TREADLE_RETURN_IF_ERROR(skipped.type == GgufType::kArray
                                ? SkipArrays(elements, what, depth + 1)
                                : ReadElements(elements, what, skipped));
  }
  return absl::OkStatus();
}

absl::Status GgufReader::ReadElements(uint64_t count, const std::string& what, GgufValue& value) {
  const ScalarType& row = RowOf(value.type);
  const size_t size = row.bytes;
  const size_t smallest = size == 0 ? sizeof(uint64_t) : size;  // a string's length
  if (count > left() / smallest) {
    return Error("truncated: ", what, " at byte ", at_, " has ", count,
                 " elements, more than the rest of the file can hold");
  }
  if (size == 0) {
    value.strings.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      TREADLE_ASSIGN_OR_RETURN(const std::string_view text, String(what));
      value.strings.push_back(text);
    }
    return absl::OkStatus();
  }
  value.numbers.resize(count);
  for (uint64_t i = 0; i < count; ++i, at_ += size) {
    value.numbers[i] = row.number(bytes_.data() + at_);
  }
  return absl::OkStatus();
}

absl::Status GgufReader::ReadTensor(uint64_t index) {
  TREADLE_ASSIGN_OR_RETURN(const std::string_view name, String(Str("name of tensor ", index)));
  StoredTensor tensor;
  tensor.name = std::string(name);
  const std::string what = Str("tensor ", Quoted(name));
  if (!tensor_names_.insert(tensor.name).second) return Error(what, " appears twice");
  TREADLE_RETURN_IF_ERROR(ReadShape(what, tensor));
  TREADLE_ASSIGN_OR_RETURN(const uint64_t offset, Scalar<uint64_t>(what + ": offset"));
  offsets_.push_back(offset);
  gguf_->tensors_.push_back(std::move(tensor));
  return absl::OkStatus();
}

absl::Status GgufReader::ReadShape(const std::string& what, StoredTensor& tensor) {
  TREADLE_ASSIGN_OR_RETURN(const uint32_t dimensions,
                           Scalar<uint32_t>(what + ": number of dimensions"));
  if (dimensions == 0 || dimensions > kMaxDimensions) {
    return Error(what, " has ", dimensions, " dimensions, expected 1 to ", kMaxDimensions);
  }
  int64_t elements = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    TREADLE_ASSIGN_OR_RETURN(const int64_t extent, Scalar<int64_t>(what + ": shape"));
    if (extent <= 0) return Error(what, " has extent ", extent, ", expected at least 1");
    if (__builtin_mul_overflow(elements, extent, &elements)) {
      return Error(what, ": shape overflows the number of elements");
    }
    tensor.shape.insert(tensor.shape.begin(), extent);
  }
  TREADLE_ASSIGN_OR_RETURN(const uint32_t type, Scalar<uint32_t>(what + ": type"));
  tensor.format = FindGgufFormat(type);
  if (tensor.format == nullptr) {
    std::string known;
    for (const WeightFormat& format : WeightFormats()) {
      if (format.gguf_type >= 0) known += Str(known.empty() ? "" : ", ", format.name);
    }
    return Unimplemented(gguf_->path(), ": ", what, " has ggml type ", type, ", expected one of ",
                         known);
  }
  if (tensor.shape.back() % tensor.format->block != 0) {
    return Error(what, " has rows of ", tensor.shape.back(), " elements, expected a multiple of ",
                 tensor.format->block, " for ", tensor.format->name);
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements / tensor.format->block, tensor.format->block_bytes, &bytes)) {
    return Error(what, ": shape overflows the number of bytes");
  }
  tensor.bytes = static_cast<uint64_t>(bytes);
  return absl::OkStatus();
}

absl::Status GgufReader::PlaceTensors() {
  TREADLE_ASSIGN_OR_RETURN(const int64_t alignment, gguf_->Integer("general.alignment", 32));
  if (alignment < 1 || alignment > (1 << 20) || !std::has_single_bit(uint64_t(alignment))) {
    return Error("general.alignment is ", alignment, ", expected a power of two up to 1048576");
  }
  gguf_->alignment_ = alignment;
  const uint64_t unit = static_cast<uint64_t>(alignment);
  const uint64_t begin = (at_ + unit - 1) / unit * unit;
  const uint64_t room = begin <= bytes_.size() ? bytes_.size() - begin : 0;
  std::vector<std::pair<uint64_t, size_t>> order;  // (offset, tensor)
  for (size_t i = 0; i < offsets_.size(); ++i) {
    StoredTensor& tensor = gguf_->tensors_[i];
    if (offsets_[i] % unit != 0) {
      return Error("tensor ", Quoted(tensor.name), " has offset ", offsets_[i],
                   ", expected a multiple of ", unit);
    }
    if (offsets_[i] > room || tensor.bytes > room - offsets_[i]) {
      return Error("tensor ", Quoted(tensor.name), " has ", tensor.bytes, " bytes at offset ",
                   offsets_[i], ", outside the file's ", room, " bytes of data (truncated?)");
    }
    tensor.data = bytes_.data() + begin + offsets_[i];
    order.emplace_back(offsets_[i], i);
  }
  std::sort(order.begin(), order.end());
  for (size_t i = 1; i < order.size(); ++i) {
    const StoredTensor& before = gguf_->tensors_[order[i - 1].second];
    if (order[i - 1].first + before.bytes > order[i].first) {
      return Error("tensors ", Quoted(before.name), " and ",
                   Quoted(gguf_->tensors_[order[i].second].name), " overlap");
    }
  }
  return absl::OkStatus();
}

absl::Status GgufReader::SplitExperts() {
  constexpr int64_t kMaxExperts = 1 << 12;
  constexpr std::string_view kWeight = ".weight", kBias = ".bias";
  std::vector<StoredTensor> tensors;
  for (StoredTensor& tensor : gguf_->tensors_) {
    // Matrices of heads: the rows of one lie behind another's.
    if (tensor.shape.size() == 3 &&
        (tensor.name.ends_with(".attn_k_b.weight") || tensor.name.ends_with(".attn_v_b.weight"))) {
      tensor.shape[1] *= tensor.shape[0];
      tensor.shape.erase(tensor.shape.begin());
    }
    const bool matrices = tensor.shape.size() == 3 && tensor.name.ends_with("_exps.weight");
    const bool biases = tensor.shape.size() == 2 && tensor.name.ends_with("_exps.bias");
    if (!matrices && !biases) {
      for (const std::string_view part : {".ffn_gate.", ".ffn_up.", ".ffn_down."}) {
        const size_t at = tensor.name.find(part);
        const size_t number = at + part.size();
        if (at == std::string::npos || number >= tensor.name.size() ||
            std::isdigit(static_cast<unsigned char>(tensor.name[number])) == 0) {
          continue;
        }
        tensor.name.insert(at + part.size() - 1, "_exps");
        break;
      }
      tensors.push_back(std::move(tensor));
      continue;
    }
    const int64_t experts = tensor.shape[0];
    if (experts > kMaxExperts) {
      return Error("tensor ", Quoted(tensor.name), " is of ", experts, " experts, expected up to ",
                   kMaxExperts);
    }
    const std::string_view suffix = matrices ? kWeight : kBias;
    const std::string before = tensor.name.substr(0, tensor.name.size() - suffix.size());
    tensor.shape.erase(tensor.shape.begin());
    // An expert's gate, then its up, or one matrix.
    std::vector<std::string> parts = {before};
    if (const size_t at = before.find("gate_up_exps"); at != before.npos && matrices) {
      const std::string layer = before.substr(0, at);
      if (tensor.shape[0] % 2 != 0) {
        return Error("tensor ", Quoted(tensor.name), " has ", tensor.shape[0],
                     " rows of an expert, expected an even number");
      }
      parts = {layer + "gate_exps", layer + "up_exps"};
    }
    tensor.shape[0] /= std::ssize(parts);
    tensor.bytes /= static_cast<uint64_t>(experts * std::ssize(parts));
    for (int64_t i = 0; i < experts; ++i) {
      for (const std::string& part : parts) {
        tensor.name = Str(part, ".", i, suffix);
        tensors.push_back(tensor);
        tensor.data += tensor.bytes;
      }
    }
  }
  gguf_->tensors_in_file_ = static_cast<int64_t>(tensor_count_);
  gguf_->tensors_ = std::move(tensors);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Read(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  return Parse(std::move(file));
}

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Parse(std::shared_ptr<const MappedFile> file) {
  FileCalls::Get().Use(file->path());
  return GgufReader(std::move(file)).Read();
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

absl::StatusOr<const GgufValue*> GgufFile::One(std::string_view key, bool optional,
                                               const char* expected,
                                               bool (*fits)(const GgufValue&)) const {
  const GgufValue* const value = Find(key);
  if (value == nullptr) {
    if (optional) return nullptr;
    return InvalidArgument(path(), ": metadata '", key, "' is missing");
  }
  const std::vector<double>& all = value->numbers;
  const bool alike = !all.empty() && std::ranges::count(all, all[0]) == std::ssize(all);
  if ((!value->array || alike) && fits(*value)) return value;
  return InvalidArgument(path(), ": metadata '", key, "' is ",
                         value->array ? "an array" : RowOf(value->type).name, ", expected ",
                         expected);
}

absl::StatusOr<int64_t> GgufFile::Integer(std::string_view key,
                                          std::optional<int64_t> otherwise) const {
  TREADLE_ASSIGN_OR_RETURN(
      const GgufValue* value,
      One(key, otherwise.has_value(), "an integer of at most 2^53", [](const GgufValue& found) {
        return RowOf(found.type).integer && std::abs(found.numbers[0]) <= kLargestExactInteger;
      }));
  return value == nullptr ? *otherwise : static_cast<int64_t>(value->numbers[0]);
}

absl::StatusOr<double> GgufFile::Number(std::string_view key,
                                        std::optional<double> otherwise) const {
  TREADLE_ASSIGN_OR_RETURN(
      const GgufValue* value,
      One(key, otherwise.has_value(), "a finite number", [](const GgufValue& found) {
        return !found.numbers.empty() && std::isfinite(found.numbers[0]);
      }));
  return value == nullptr ? *otherwise : value->numbers[0];
}

absl::StatusOr<bool> GgufFile::Bool(std::string_view key, bool otherwise) const {
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* value,
                           One(key, /*optional=*/true, "bool", [](const GgufValue& found) {
                             const bool whole = RowOf(found.type).integer;
                             return found.type == GgufType::kBool ||
                                    (whole && (found.numbers[0] == 0 || found.numbers[0] == 1));
                           }));
  return value == nullptr ? otherwise : value->numbers[0] != 0;
}

absl::StatusOr<std::string> GgufFile::String(std::string_view key,
                                             std::optional<std::string> otherwise) const {
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* value,
                           One(key, otherwise.has_value(), "string", [](const GgufValue& found) {
                             return found.type == GgufType::kString;
                           }));
  return value == nullptr ? *std::move(otherwise) : std::string(value->strings[0]);
}

}  // namespace treadle
