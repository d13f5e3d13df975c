// F32, F16, BF16: every value is exact in float.
#include "kernels/formats/families.h"

namespace treadle::formats {
namespace {

template <typename T>
T Load(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace

void DecodeF32(const std::byte* data, int64_t count, float* out) {
  std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
}

void DecodeF16(const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = ToFloat(Load<Half>(data, i));
}

void DecodeBF16(const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = ToFloat(Load<BFloat16>(data, i));
}

}  // namespace treadle::formats
