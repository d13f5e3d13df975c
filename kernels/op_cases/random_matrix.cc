#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

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

// Large matrices repeat a prefix of so many rows: random numbers are slow, and a kernel cannot
// tell.
constexpr int64_t kFreshRows = 257;

void Repeat(std::vector<std::byte>& bytes, int64_t period) {
  for (size_t i = static_cast<size_t>(period); i < bytes.size(); ++i) bytes[i] = bytes[i - period];
}

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

// The largest magnitude in the format's own codebook; random codebooks reach 1.
float CodebookReach(const WeightFormat& format) {
  float reach = 0;
  for (const float value : format.codebook) reach = std::fmax(reach, std::fabs(value));
  return reach > 0 ? reach : 1.0f;
}

RandomMatrix MakeInline(const WeightFormat& format, int64_t n, int64_t k, Random& random) {
  RandomMatrix matrix;
  matrix.bytes.resize(static_cast<size_t>(n * format.RowBytes(k)));
  const int64_t blocks = n * (k / format.block);
  const int64_t fresh =
      std::min<int64_t>(blocks, std::max<int64_t>(k / format.block, 1) * kFreshRows);
  const float deviation = 1 / std::sqrt(static_cast<float>(k));
  for (int64_t i = 0; i < fresh; ++i) {
    std::byte* block = matrix.bytes.data() + i * format.block_bytes;
    if (format.group > 0) {
      PutBlock(format, block, random);
    } else {
      PutDense(format, block, random.Normal() * deviation);
    }
  }
  Repeat(matrix.bytes, fresh * format.block_bytes);
  return matrix;
}

RandomMatrix MakeApart(const WeightFormat& format, int64_t n, int64_t k, int64_t scale_block,
                       Random& random) {
  RandomMatrix matrix;
  const int64_t bytes = format.MatrixBytes(n, k);
  matrix.bytes.resize(static_cast<size_t>(bytes));
  const int64_t fresh = std::min(bytes, k * kFreshRows);
  for (int64_t i = 0; i < fresh; ++i) {
    auto code = static_cast<uint8_t>(random.Below(256));
    // A code that means NaN (E4M3 has two) has a neighbour that does not.
    if (format.codebook.size() == 256 && std::isnan(format.codebook[code])) code ^= 1;
    matrix.bytes[i] = std::byte{code};
  }
  Repeat(matrix.bytes, fresh);

  matrix.constants = std::make_unique<MatrixConstants>();
  MatrixConstants& constants = *matrix.constants;
  if (format.codebook.empty()) {
    for (int i = 0; i < 1 << format.code_bits; ++i) {
      constants.codebook.push_back(static_cast<float>(random.Uniform(-1, 1)));
    }
  }
  constants.scale_block = scale_block > 0                                     ? scale_block
                          : format.code_bits == 8 && !format.codebook.empty() ? k
                                                                              : 64;
  const double scale = 2 / (CodebookReach(format) * std::sqrt(static_cast<double>(k)));
  for (int64_t at = 0; at < n * k; at += constants.scale_block) {
    const bool zero = random.Below(32) == 0;
    // Double quantization makes a few scales negative.
    constants.scales.push_back(zero ? 0.0f
                                    : static_cast<float>(random.Uniform(-0.1 * scale, scale)));
    if (format.name.starts_with("gptq")) {
      constants.zeros.push_back(static_cast<float>(random.Below(1 << format.code_bits)));
    }
  }
  return matrix;
}

}  // namespace

RandomMatrix MakeRandomMatrix(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed,
                              int64_t scale_block) {
  Random random(seed);
  RandomMatrix matrix = format.apart() ? MakeApart(format, n, k, scale_block, random)
                                       : MakeInline(format, n, k, random);
  matrix.source = {.format = &format,
                   .data = matrix.bytes.data(),
                   .n = n,
                   .k = k,
                   .row_order = {},
                   .constants = matrix.constants.get()};
  return matrix;
}

}  // namespace treadle
