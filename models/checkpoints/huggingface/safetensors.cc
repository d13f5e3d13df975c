#include "models/checkpoints/huggingface/safetensors.h"

#include <algorithm>
#include <cstring>

#include "base/choice.h"
#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit

constexpr Choice<int64_t> kDtypeBytes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
    {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
    {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8}};

absl::StatusOr<SafetensorsEntry> ReadEntry(const std::string& where, const std::string& name,
                                           const Json& json, std::span<const std::byte> data) {
  const auto error = [&](const auto&... parts) {
    return InvalidArgument(where, ": tensor ", Quoted(name), " ", parts...);
  };
  if (!json.is_object()) return error("is not described by an object");
  const Json dtype = json.value("dtype", Json());
  const Json shape = json.value("shape", Json());
  const Json offsets = json.value("data_offsets", Json());
  if (!dtype.is_string()) return error("has no dtype");
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = dtype.get<std::string>();
  entry.file = where;
  if (!shape.is_array()) return error("has no shape");
  int64_t elements = 1;
  for (const Json& extent : shape) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX ||
        __builtin_mul_overflow(elements, extent.get<int64_t>(), &elements)) {
      return error("has an impossible shape");
    }
    entry.shape.push_back(extent.get<int64_t>());
  }
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return error("has no pair of data_offsets");
  }
  const uint64_t begin = offsets[0].get<uint64_t>();
  const uint64_t end = offsets[1].get<uint64_t>();
  if (begin > end || end > data.size()) {
    return error("has data_offsets [", begin, ", ", end, "], outside the file's ", data.size(),
                 " bytes of data (truncated?)");
  }
  // The size of other dtypes is not checked: nothing reads them.
  const int64_t element_bytes = SafetensorsDtypeBytes(entry.dtype);
  int64_t bytes = 0;
  if (element_bytes > 0 && (__builtin_mul_overflow(elements, element_bytes, &bytes) ||
                            static_cast<uint64_t>(bytes) != end - begin)) {
    return error("has ", end - begin, " bytes, expected ", elements, " elements of ", entry.dtype);
  }
  entry.data = data.subspan(begin, end - begin);
  return entry;
}

}  // namespace

int64_t SafetensorsDtypeBytes(std::string_view dtype) {
  return ValueOf(kDtypeBytes, dtype).value_or(0);
}

int64_t SafetensorsEntry::Elements() const {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  return elements;
}

absl::StatusOr<std::vector<SafetensorsEntry>> ReadSafetensors(const MappedFile& file) {
  const std::span<const std::byte> bytes = file.bytes();
  uint64_t length = 0;
  if (bytes.size() < sizeof(length)) {
    return InvalidArgument(file.path(), ": truncated: ", bytes.size(),
                           " bytes, expected a header of 8 at least");
  }
  std::memcpy(&length, bytes.data(), sizeof(length));
  if (length > bytes.size() - sizeof(length) || length > kMaxHeader) {
    return InvalidArgument(file.path(), ": header length is ", length, ", expected at most ",
                           std::min<uint64_t>(bytes.size() - sizeof(length), kMaxHeader));
  }
  const auto header_bytes = bytes.subspan(sizeof(length), length);
  TREADLE_ASSIGN_OR_RETURN(
      const Json header,
      ParseJsonObject({reinterpret_cast<const char*>(header_bytes.data()), header_bytes.size()},
                      file.path()));
  const auto data = bytes.subspan(sizeof(length) + length);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, json] : header.items()) {
    if (name == "__metadata__") continue;
    TREADLE_ASSIGN_OR_RETURN(SafetensorsEntry entry, ReadEntry(file.path(), name, json, data));
    entries.push_back(std::move(entry));
  }
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : entries) order.push_back(&entry);
  std::ranges::sort(order, {}, [](const SafetensorsEntry* entry) { return entry->data.data(); });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->data.data() + order[i - 1]->data.size() > order[i]->data.data()) {
      return InvalidArgument(file.path(), ": tensors ", Quoted(order[i - 1]->name), " and ",
                             Quoted(order[i]->name), " overlap");
    }
  }
  return entries;
}

}  // namespace treadle
