#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/support/op_cases.h"
#include "tests/support/random.h"

namespace treadle {
namespace {

// Where a block's 16-bit constants lie and which values suit them. Everything else in a block is
// codes, for which any bits will do.
struct Constant {
  std::string_view format;
  int64_t at;
  double low;
  double high;
};
constexpr Constant kConstants[] = {
    {"q4_0", 0, -0.02, 0.02}, {"q4_1", 0, -0.02, 0.02}, {"q4_1", 2, -0.1, 0.1},
    {"q5_0", 0, -0.01, 0.01}, {"q5_1", 0, -0.01, 0.01}, {"q5_1", 2, -0.1, 0.1},
    {"q8_0", 0, -1e-3, 1e-3}, {"q4_k", 0, -5e-4, 5e-4}, {"q4_k", 2, -2e-3, 2e-3},
    {"q5_k", 0, -2e-4, 2e-4}, {"q5_k", 2, -2e-3, 2e-3}, {"q6_k", 208, -1e-4, 1e-4},
};

void PutHalf(std::byte* at, double value) {
  const Half half = ToHalf(static_cast<float>(value));
  std::memcpy(at, &half.bits, sizeof(half.bits));
}

void PutDense(const WeightFormat& format, std::byte* at, float value) {
  if (format.name == "f32") {
    std::memcpy(at, &value, sizeof(value));
  } else {
    const uint16_t bits = format.name == "f16" ? ToHalf(value).bits : ToBFloat16(value).bits;
    std::memcpy(at, &bits, sizeof(bits));
  }
}

void PutBlock(const WeightFormat& format, std::byte* block, Random& random) {
  for (int64_t i = 0; i < format.block_bytes; ++i) {
    block[i] = static_cast<std::byte>(random.Below(256));
  }
  bool known = false;
  for (const Constant& constant : kConstants) {
    if (constant.format != format.name) continue;
    known = true;
    const bool zero = random.Below(32) == 0;  // all-zero blocks are common in real files
    PutHalf(block + constant.at, zero ? 0.0 : random.Uniform(constant.low, constant.high));
  }
  TREADLE_CHECK(known);  // a new format needs a row in kConstants
}

}  // namespace

RandomMatrix MakeRandomMatrix(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed) {
  RandomMatrix matrix;
  matrix.bytes.resize(static_cast<size_t>(n * format.RowBytes(k)));
  Random random(seed);
  const int64_t blocks = n * (k / format.block);
  // Large matrices repeat a prefix: random numbers are slow, and a kernel cannot tell.
  const int64_t fresh = std::min<int64_t>(blocks, std::max<int64_t>(k / format.block, 1) * 257);
  const float deviation = 1 / std::sqrt(static_cast<float>(k));
  for (int64_t i = 0; i < fresh; ++i) {
    std::byte* block = matrix.bytes.data() + i * format.block_bytes;
    if (format.group > 0) {
      PutBlock(format, block, random);
    } else {
      PutDense(format, block, random.Normal() * deviation);
    }
  }
  for (int64_t i = fresh; i < blocks; ++i) {
    std::memcpy(matrix.bytes.data() + i * format.block_bytes,
                matrix.bytes.data() + (i - fresh) * format.block_bytes,
                static_cast<size_t>(format.block_bytes));
  }
  matrix.source = {.format = &format, .data = matrix.bytes.data(), .n = n, .k = k, .row_order = {}};
  return matrix;
}

}  // namespace treadle
