#include "models/safetensors.h"

#include <algorithm>
#include <cstring>

#include "kernels/status.h"
#include "models/json_file.h"
#include "models/quoted.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
constexpr uint64_t kLargestHeader = 100'000'000;  // the format's own limit

absl::StatusOr<StoredTensor> ReadEntry(const std::string& where, const std::string& name,
                                       const Json& entry, std::span<const std::byte> data) {
  const auto error = [&](const auto&... parts) {
    return InvalidArgument(where, ": tensor ", Quoted(name), " ", parts...);
  };
  if (!entry.is_object()) return error("is not described by an object");
  const Json dtype = entry.value("dtype", Json());
  const Json shape = entry.value("shape", Json());
  const Json offsets = entry.value("data_offsets", Json());
  if (!dtype.is_string()) return error("has no dtype");
  StoredTensor tensor;
  tensor.name = name;
  tensor.format = FindSafetensorsFormat(dtype.get<std::string>());
  if (tensor.format == nullptr) {
    return Unimplemented(where, ": tensor ", Quoted(name), " has dtype ",
                         Quoted(dtype.get<std::string>()), ", expected F32, F16 or BF16");
  }
  if (!shape.is_array()) return error("has no shape");
  int64_t elements = 1;
  for (const Json& extent : shape) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX ||
        __builtin_mul_overflow(elements, extent.get<int64_t>(), &elements)) {
      return error("has an impossible shape");
    }
    tensor.shape.push_back(extent.get<int64_t>());
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
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, tensor.format->block_bytes, &bytes) ||
      static_cast<uint64_t>(bytes) != end - begin) {
    return error("has ", end - begin, " bytes, expected ", elements, " elements of ",
                 tensor.format->name);
  }
  tensor.data = data.data() + begin;
  tensor.bytes = end - begin;
  return tensor;
}

}  // namespace

absl::StatusOr<std::vector<StoredTensor>> ReadSafetensors(const MappedFile& file) {
  const std::span<const std::byte> bytes = file.bytes();
  uint64_t length = 0;
  if (bytes.size() < sizeof(length)) {
    return InvalidArgument(file.path(), ": truncated: ", bytes.size(),
                           " bytes, expected a header of 8 at least");
  }
  std::memcpy(&length, bytes.data(), sizeof(length));
  if (length > bytes.size() - sizeof(length) || length > kLargestHeader) {
    return InvalidArgument(file.path(), ": header length is ", length, ", expected at most ",
                           std::min<uint64_t>(bytes.size() - sizeof(length), kLargestHeader));
  }
  const auto header_bytes = bytes.subspan(sizeof(length), length);
  TREADLE_ASSIGN_OR_RETURN(
      const Json header,
      ParseJsonObject({reinterpret_cast<const char*>(header_bytes.data()), header_bytes.size()},
                      file.path()));
  const auto data = bytes.subspan(sizeof(length) + length);
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    TREADLE_ASSIGN_OR_RETURN(StoredTensor tensor, ReadEntry(file.path(), name, entry, data));
    tensors.push_back(std::move(tensor));
  }
  std::vector<const StoredTensor*> order;
  for (const StoredTensor& tensor : tensors) order.push_back(&tensor);
  std::ranges::sort(order, {}, &StoredTensor::data);
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data) {
      return InvalidArgument(file.path(), ": tensors ", Quoted(order[i - 1]->name), " and ",
                             Quoted(order[i]->name), " overlap");
    }
  }
  return tensors;
}

}  // namespace treadle
