#include "engine/wire_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/status.h"
#include "kernels/dtype.h"

namespace treadle {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kInfinityBits = 0x7f800000;

int64_t BlocksOf(int64_t cols) { return (cols + kWireBlock - 1) / kWireBlock; }

void EncodeBf16(const float* x, int64_t cols, std::byte* out) {
  for (int64_t i = 0; i < cols; ++i) {
    const uint16_t bits = ToBFloat16(x[i]).bits;
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

void DecodeBf16(const std::byte* in, int64_t cols, float* out) {
  for (int64_t i = 0; i < cols; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, in + 2 * i, 2);
    out[i] = ToFloat(BFloat16{bits});
  }
}

// As bits, magnitudes compare like the numbers, and NaN is above infinity.
int32_t AbsMaxBits(const float* x, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  }
  return most;
}

// Codes of a block whose magnitudes are finite. A scale of 0 means a block of zeros.
void EncodeBlock(const float* x, int64_t count, float scale, int8_t* codes) {
  // Adding it leaves no bits for a fraction: rounds half to even.
  constexpr float kRound = 0x1.8p23f;
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float steps = std::min(std::max(x[i] * inverse, -127.0f), 127.0f);
    codes[i] = static_cast<int8_t>(std::bit_cast<int32_t>(steps + kRound));
  }
}

void EncodeInt8(const float* x, int64_t cols, std::byte* out) {
  auto* const codes = reinterpret_cast<int8_t*>(out);
  for (int64_t block = 0; block < BlocksOf(cols); ++block) {
    const int64_t begin = block * kWireBlock;
    const int64_t count = std::min(kWireBlock, cols - begin);
    const auto most = static_cast<uint32_t>(AbsMaxBits(x + begin, count));
    Half scale{0x7e00};  // NaN
    if (most < kInfinityBits) {
      scale = ToHalf(std::bit_cast<float>(most) / 127.0f);
      EncodeBlock(x + begin, count, ToFloat(scale), codes + begin);
    } else {
      std::fill_n(codes + begin, count, int8_t{0});
    }
    std::memcpy(out + cols + 2 * block, &scale.bits, 2);
  }
}

void DecodeInt8(const std::byte* in, int64_t cols, float* out) {
  const auto* const codes = reinterpret_cast<const int8_t*>(in);
  for (int64_t block = 0; block < BlocksOf(cols); ++block) {
    const int64_t begin = block * kWireBlock;
    const int64_t end = std::min(begin + kWireBlock, cols);
    Half half;
    std::memcpy(&half.bits, in + cols + 2 * block, 2);
    const float scale = ToFloat(half);
    for (int64_t i = begin; i < end; ++i) out[i] = scale * static_cast<float>(codes[i]);
  }
}

}  // namespace

size_t EncodedBytes(WireType wire, int64_t rows, int64_t cols) {
  switch (wire) {
    case WireType::kF32:
      return rows * cols * 4;
    case WireType::kBf16:
      return rows * cols * 2;
    case WireType::kInt8:
      return rows * (cols + 2 * BlocksOf(cols));
  }
  TREADLE_CHECK(false);
}

void EncodeRows(WireType wire, Tensor x, std::byte* out) {
  const size_t row_bytes = EncodedBytes(wire, 1, x.cols);
  for (int64_t row = 0; row < x.rows; ++row, out += row_bytes) {
    const auto* const values = x.Row<const float>(row);
    if (wire == WireType::kF32) std::memcpy(out, values, row_bytes);
    if (wire == WireType::kBf16) EncodeBf16(values, x.cols, out);
    if (wire == WireType::kInt8) EncodeInt8(values, x.cols, out);
  }
}

void DecodeRows(WireType wire, const std::byte* in, Tensor out) {
  const size_t row_bytes = EncodedBytes(wire, 1, out.cols);
  for (int64_t row = 0; row < out.rows; ++row, in += row_bytes) {
    auto* const values = out.Row<float>(row);
    if (wire == WireType::kF32) std::memcpy(values, in, row_bytes);
    if (wire == WireType::kBf16) DecodeBf16(in, out.cols, values);
    if (wire == WireType::kInt8) DecodeInt8(in, out.cols, values);
  }
}

}  // namespace treadle
