// The wire types against their definitions, and a checksum that sees changes.

#include "engine/wire_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "kernels/dtype.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

constexpr WireType kWires[] = {WireType::kF32, WireType::kBf16, WireType::kInt8};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Bytes = std::vector<std::byte>;

// Like a residual stream: normal values, and a few columns that are hundreds of times larger.
std::vector<float> Activations(int64_t rows, int64_t cols, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    x[i] = random.Normal() * (i % cols % 97 == 5 ? 300.0f : 1.0f);
  }
  return x;
}

Tensor Rows(std::vector<float>& x, int64_t rows, int64_t cols) {
  return DenseTensor(x.data(), DType::kF32, rows, cols);
}

Bytes Encoded(WireType wire, std::vector<float> x, int64_t rows, int64_t cols) {
  Bytes bytes(EncodedBytes(wire, rows, cols));
  EncodeRows(wire, Rows(x, rows, cols), bytes.data());
  return bytes;
}

std::vector<float> Decoded(WireType wire, const Bytes& bytes, int64_t rows, int64_t cols) {
  std::vector<float> x(rows * cols);
  DecodeRows(wire, bytes.data(), Rows(x, rows, cols));
  return x;
}

std::vector<float> ThereAndBack(WireType wire, const std::vector<float>& x, int64_t rows,
                                int64_t cols) {
  return Decoded(wire, Encoded(wire, x, rows, cols), rows, cols);
}

TEST(WireCodec, ARowsBytesDependOnThatRowAlone) {
  for (const WireType wire : kWires) {
    for (const int64_t cols : {1, 63, 64, 100, 576}) {
      const std::vector<float> x = Activations(5, cols, cols);
      const Bytes all = Encoded(wire, x, 5, cols);
      const size_t row_bytes = EncodedBytes(wire, 1, cols);
      ASSERT_EQ(all.size(), 5 * row_bytes);
      for (int64_t row = 0; row < 5; ++row) {
        const Bytes alone =
            Encoded(wire, {x.begin() + row * cols, x.begin() + (row + 1) * cols}, 1, cols);
        EXPECT_EQ(std::memcmp(alone.data(), all.data() + row * row_bytes, row_bytes), 0);
      }
    }
  }
}

TEST(WireCodec, RowsNeedNotBeDense) {
  std::vector<float> x = Activations(4, 100, 1);
  const Tensor part = Rows(x, 4, 100).Cols(10, 70);
  for (const WireType wire : kWires) {
    Bytes bytes(EncodedBytes(wire, 4, 70));
    EncodeRows(wire, part, bytes.data());
    std::vector<float> back(4 * 100, -1.0f);
    DecodeRows(wire, bytes.data(), Rows(back, 4, 100).Cols(10, 70));
    EXPECT_EQ(back[9], -1.0f);
    EXPECT_EQ(back[80], -1.0f);
    EXPECT_NEAR(back[3 * 100 + 79], x[3 * 100 + 79], 4.0f);
  }
}

TEST(WireCodec, F32IsBitExact) {
  std::vector<float> x = Activations(3, 100, 2);
  x[7] = std::numeric_limits<float>::quiet_NaN();
  x[8] = -0.0f;
  const Bytes bytes = Encoded(WireType::kF32, x, 3, 100);
  EXPECT_EQ(std::memcmp(bytes.data(), x.data(), bytes.size()), 0);
}

TEST(WireCodec, Bf16RoundsHalfToEven) {
  // Every value, the middle to the next one, and a hair to either side of the middle.
  for (uint32_t pattern = 0; pattern < 0x7f7f; ++pattern) {
    const auto at = [&](uint32_t low) { return std::bit_cast<float>(pattern << 16 | low); };
    const std::vector<float> x = {at(0), at(0x8000), at(0x7fff), at(0x8001), -at(0x8000)};
    const uint32_t even = pattern + (pattern & 1);
    const float above = std::bit_cast<float>((pattern + 1) << 16);
    const float middle = std::bit_cast<float>(even << 16);
    EXPECT_EQ(ThereAndBack(WireType::kBf16, x, 1, 5),
              (std::vector<float>{at(0), middle, at(0), above, -middle}));
  }
  const std::vector<float> back =
      ThereAndBack(WireType::kBf16, {kInfinity, -kInfinity, std::nanf("")}, 1, 3);
  EXPECT_EQ(back[0], kInfinity);
  EXPECT_EQ(back[1], -kInfinity);
  EXPECT_TRUE(std::isnan(back[2]));
}

// scale / 2 from rounding to a step, 127 times the scale's own rounding where the largest is cut,
// and a few roundings of float.
TEST(WireCodec, Int8StaysWithinItsBound) {
  for (const float unit : {1e-3f, 1.0f, 1e3f}) {
    for (const int64_t cols : {1, 63, 64, 65, 576, 1000}) {
      std::vector<float> x = Activations(7, cols, cols);
      for (float& value : x) value *= unit;
      const std::vector<float> back = ThereAndBack(WireType::kInt8, x, 7, cols);
      for (int64_t i = 0; i < 7 * cols; ++i) {
        const int64_t row = i / cols, block = i % cols / kWireBlock * kWireBlock;
        double most = 0;
        for (int64_t j = block; j < std::min(block + kWireBlock, cols); ++j) {
          most = std::max(most, std::abs(static_cast<double>(x[row * cols + j])));
        }
        const double scale_error = std::max(most / 127 * 0x1p-11, 0x1p-25);
        const double bound =
            (most / 127 + scale_error) / 2 + 127 * scale_error + most * 4 * 0x1p-24;
        ASSERT_LE(std::abs(static_cast<double>(back[i]) - x[i]), bound) << i << " of " << cols;
      }
      // A message off the wire goes over the next one unchanged.
      if (unit > 1e-3f) {
        EXPECT_EQ(ThereAndBack(WireType::kInt8, back, 7, cols), back);
      }
    }
  }
}

TEST(WireCodec, Int8OfUnusualBlocks) {
  std::vector<float> x(4 * 64, 1.0f);
  std::fill_n(x.begin(), 64, 0.0f);
  x[64 + 3] = kInfinity;
  x[128 + 5] = std::nanf("");
  const std::vector<float> back = ThereAndBack(WireType::kInt8, x, 1, 4 * 64);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(back[i], 0.0f);
    EXPECT_TRUE(std::isnan(back[64 + i]));
    EXPECT_TRUE(std::isnan(back[128 + i]));
    EXPECT_NEAR(back[192 + i], 1.0f, 0x1p-8);
  }
  // Cut, not infinite; and nothing becomes of what is far below fp16.
  EXPECT_EQ(ThereAndBack(WireType::kInt8, {3e38f}, 1, 1)[0], 127.0f * 65504.0f);
  EXPECT_EQ(ThereAndBack(WireType::kInt8, {1e-30f}, 1, 1)[0], 0.0f);
}

TEST(WireCodec, Int8NeedsAboutHalfTheBytesOf16Bits) {
  for (const int64_t hidden : {576, 2048, 4096, 8192}) {
    EXPECT_LE(static_cast<double>(EncodedBytes(WireType::kInt8, 1, hidden)),
              0.52 * static_cast<double>(EncodedBytes(WireType::kBf16, 1, hidden)));
  }
}

TEST(Checksum, SeesChanges) {
  Random random(3);
  for (const size_t bytes : {1, 7, 8, 63, 64, 65, 200, 3000}) {
    Bytes data(bytes);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random.Below(256));
    const uint64_t whole = Checksum(1, data.data(), bytes);
    EXPECT_EQ(Checksum(1, data.data(), bytes), whole);
    EXPECT_NE(Checksum(2, data.data(), bytes), whole);
    EXPECT_NE(Checksum(1, data.data(), bytes - 1), whole);
    const auto flip = [&](size_t bit) { data[bit / 8] ^= std::byte{1} << bit % 8; };
    for (size_t bit = 0; bit < 8 * bytes; ++bit) {
      flip(bit);
      ASSERT_NE(Checksum(1, data.data(), bytes), whole) << "bit " << bit;
      flip(bit);
    }
    for (int round = 0; round < 5000 && bytes > 1; ++round) {
      const size_t first = random.Below(8 * bytes), second = random.Below(8 * bytes);
      if (first == second) continue;
      flip(first), flip(second);
      ASSERT_NE(Checksum(1, data.data(), bytes), whole) << first << " and " << second;
      flip(first), flip(second);
    }
  }
}

// Changes that simple sums miss: signs that change in pairs, words that change places, zeros that
// are more.
TEST(Checksum, SeesWhatKeepsSimpleSums) {
  std::vector<float> x = Activations(1, 512, 4);
  const auto hash = [&](size_t bytes) {
    return Checksum(0, reinterpret_cast<const std::byte*>(x.data()), bytes);
  };
  const uint64_t whole = hash(2048);
  for (size_t first = 0; first < 64; ++first) {
    for (size_t second = first + 1; second < 512; ++second) {
      x[first] = -x[first], x[second] = -x[second];
      ASSERT_NE(hash(2048), whole) << first << " and " << second;
      x[first] = -x[first], x[second] = -x[second];
      std::swap(x[first], x[second]);
      ASSERT_NE(hash(2048), whole) << first << " and " << second;
      std::swap(x[first], x[second]);
    }
  }
  std::fill(x.begin(), x.end(), 0.0f);
  for (size_t bytes = 0; bytes < 2048; ++bytes) EXPECT_NE(hash(bytes), hash(bytes + 1));
}

}  // namespace
}  // namespace treadle
