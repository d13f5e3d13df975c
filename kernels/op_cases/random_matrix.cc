#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

// Large matrices repeat a prefix of so many rows: random numbers are slow, and a kernel cannot
// tell.
constexpr int64_t kFreshRows = 257;

void Repeat(std::vector<std::byte>& bytes, int64_t period) {
  for (size_t i = static_cast<size_t>(period); i < bytes.size(); ++i) bytes[i] = bytes[i - period];
}

DType DenseTypeOf(const WeightFormat& format) {
  return format.name == "f32" ? DType::kF32 : format.name == "f16" ? DType::kF16 : DType::kBF16;
}

// Whether a block's weights are of a common size.
bool IsCommon(const WeightFormat& format, const std::byte* block) {
  float largest = 0;
  CodeGroup group;
  for (int64_t g = 0; g < format.block / format.group; ++g) {
    format.codes(block, g, group);
    for (int64_t i = 0; i < format.group; ++i) {
      const float weight = std::fabs(group.scale * group.codes[i] + group.offset);
      if (!(weight <= 0.5f)) return false;  // NaN is not
      largest = std::max(largest, weight);
    }
  }
  return largest >= 0.01f;
}

// So many different blocks are enough. Each is of random bits, drawn again until they mean weights
// of a common size; one is of zeros, which are common in real files.
constexpr int64_t kBlocks = 61;

std::vector<std::byte> MakeBlocks(const WeightFormat& format, Random& random) {
  std::vector<std::byte> blocks(static_cast<size_t>(kBlocks * format.block_bytes));
  for (int64_t b = 1; b < kBlocks; ++b) {
    std::byte* block = blocks.data() + b * format.block_bytes;
    do {
      for (int64_t i = 0; i < format.block_bytes; ++i) {
        block[i] = static_cast<std::byte>(random.Below(256));
      }
    } while (!IsCommon(format, block));
  }
  return blocks;
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
  std::vector<std::byte> coded;
  if (format.group > 0) coded = MakeBlocks(format, random);
  const float deviation = 1 / std::sqrt(static_cast<float>(k));
  for (int64_t i = 0; i < fresh; ++i) {
    std::byte* block = matrix.bytes.data() + i * format.block_bytes;
    if (format.group > 0) {
      std::memcpy(block, coded.data() + random.Below(kBlocks) * format.block_bytes,
                  static_cast<size_t>(format.block_bytes));
    } else {
      StoreElement(DenseTypeOf(format), random.Normal() * deviation, block, 0);
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
