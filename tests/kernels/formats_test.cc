// Weight formats against the gguf package's dequantization (tests/oracles/make_gguf_blocks.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/formats/weight_format.h"
#include "tests/support/op_cases.h"

namespace treadle {
namespace {

struct OracleBlocks {
  uint32_t type = 0;
  uint32_t blocks = 0;
  std::vector<std::byte> data;
  std::vector<float> values;
};

std::vector<OracleBlocks> ReadOracle() {
  std::ifstream file(TREADLE_TESTDATA "/gguf_blocks.bin", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<OracleBlocks> records;
  size_t at = 0;
  const auto read = [&](void* to, size_t size) {
    ASSERT_LE(at + size, bytes.size());
    std::memcpy(to, bytes.data() + at, size);
    at += size;
  };
  while (at < bytes.size() && !testing::Test::HasFailure()) {
    uint32_t header[3] = {};
    read(header, sizeof(header));
    OracleBlocks record = {.type = header[0], .blocks = header[1], .data = {}, .values = {}};
    const WeightFormat* format = FindGgufFormat(record.type);
    if (format == nullptr) {
      ADD_FAILURE() << "no format for GGUF type " << record.type;
      break;
    }
    record.data.resize(static_cast<size_t>(record.blocks * format->block_bytes));
    read(record.data.data(), record.data.size());
    record.values.resize(header[2]);
    read(record.values.data(), record.values.size() * sizeof(float));
    records.push_back(std::move(record));
  }
  return records;
}

// Equal values (a zero's sign apart), NaN where the other is NaN.
bool SameValue(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST(WeightFormats, DecodeAsTheGgufPackageDoes) {
  std::set<std::string_view> seen;
  for (const OracleBlocks& record : ReadOracle()) {
    const WeightFormat& format = *FindGgufFormat(record.type);
    seen.insert(format.name);
    ASSERT_EQ(record.values.size(), record.blocks * format.block) << format.name;
    std::vector<float> values(record.values.size());
    format.decode(record.data.data(), record.blocks, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(SameValue(values[i], record.values[i]))
          << format.name << " value " << i << " is " << values[i] << ", expected "
          << record.values[i];
    }
  }
  for (const WeightFormat& format : WeightFormats()) {
    EXPECT_TRUE(format.gguf_type < 0 || seen.contains(format.name)) << format.name;
  }
}

// The integer view and the canonical decode are the same numbers, by fma and by product and sum.
TEST(WeightFormats, CodesAreConsistentWithDecode) {
  for (const WeightFormat& format : WeightFormats()) {
    if (format.group == 0) continue;
    constexpr int64_t kRows = 5;
    const int64_t k = 4 * format.block;
    const RandomMatrix matrix = MakeRandomMatrix(format, kRows, k, 3);
    std::vector<float> values(static_cast<size_t>(kRows * k));
    format.decode(matrix.source.data, kRows * k / format.block, values.data());
    CodeGroup group;
    for (int64_t i = 0; i < kRows * k; ++i) {
      if (i % format.group == 0) format.codes(matrix.source.data, i / format.group, group);
      const auto code = static_cast<float>(group.codes[i % format.group]);
      ASSERT_EQ(values[i], std::fma(group.scale, code, group.offset)) << format.name << " " << i;
      ASSERT_EQ(values[i], group.scale * code + group.offset) << format.name << " " << i;
    }
  }
}

TEST(WeightFormats, CodesReachTheirDocumentedRange) {
  const std::map<std::string_view, std::pair<int, int>> ranges = {
      {"q4_0", {-8, 7}},     {"q4_1", {0, 15}}, {"q5_0", {-16, 15}}, {"q5_1", {0, 31}},
      {"q8_0", {-128, 127}}, {"q4_k", {0, 15}}, {"q5_k", {0, 31}},   {"q6_k", {-32, 31}}};
  for (const WeightFormat& format : WeightFormats()) {
    if (format.group == 0) continue;
    const RandomMatrix matrix = MakeRandomMatrix(format, 64, 256, 4);
    int low = 127;
    int high = -128;
    CodeGroup group;
    for (int64_t g = 0; g < 64 * 256 / format.group; ++g) {
      format.codes(matrix.source.data, g, group);
      const auto [least, most] = std::minmax_element(group.codes, group.codes + format.group);
      low = std::min<int>(low, *least);
      high = std::max<int>(high, *most);
    }
    ASSERT_TRUE(ranges.contains(format.name)) << format.name;
    EXPECT_EQ(std::pair(low, high), ranges.at(format.name)) << format.name;
  }
}

TEST(WeightFormats, TableIsConsistent) {
  std::set<std::string_view> names;
  for (const WeightFormat& format : WeightFormats()) {
    EXPECT_TRUE(names.insert(format.name).second) << format.name;
    EXPECT_EQ(FindWeightFormat(format.name), &format);
    EXPECT_EQ(FindGgufFormat(static_cast<uint32_t>(format.gguf_type)), &format);
    EXPECT_EQ(format.group == 0, format.codes == nullptr) << format.name;
    if (format.group > 0) {
      EXPECT_EQ(format.block % format.group, 0) << format.name;
    }
    EXPECT_DOUBLE_EQ(format.bits_per_weight * static_cast<double>(format.block),
                     8.0 * static_cast<double>(format.block_bytes))
        << format.name;
    EXPECT_EQ(format.RowBytes(512), 512 / format.block * format.block_bytes);
  }
  EXPECT_EQ(FindWeightFormat("q3_7"), nullptr);
  EXPECT_EQ(FindGgufFormat(4), nullptr);
  EXPECT_EQ(FindGgufFormat(0xffffffff), nullptr);
  EXPECT_EQ(FindSafetensorsFormat(""), nullptr);
  EXPECT_EQ(FindSafetensorsFormat("BF16"), FindWeightFormat("bf16"));
  EXPECT_EQ(FindSafetensorsFormat("I8"), nullptr);
}

// Every 16-bit pattern survives the way to float and back; rounding is half to even.
TEST(DTypes, ConversionsRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half = {static_cast<uint16_t>(bits)};
    const BFloat16 bfloat = {static_cast<uint16_t>(bits)};
    if (!std::isnan(ToFloat(half))) {
      ASSERT_EQ(ToHalf(ToFloat(half)).bits, bits);
    }
    if (!std::isnan(ToFloat(bfloat))) {
      ASSERT_EQ(ToBFloat16(ToFloat(bfloat)).bits, bits);
    }
  }
  EXPECT_TRUE(std::isnan(ToFloat(ToHalf(NAN))));
  EXPECT_TRUE(std::isnan(ToFloat(ToBFloat16(NAN))));
  EXPECT_EQ(ToFloat(ToHalf(1e6f)), 65504.0f);
  EXPECT_EQ(ToFloat(ToHalf(-1e6f)), -65504.0f);
  EXPECT_EQ(ToHalf(INFINITY).bits, 0x7c00);
  EXPECT_EQ(ToFloat(ToHalf(1.0f + 0x1p-11f)), 1.0f);                // a tie, down to even
  EXPECT_EQ(ToFloat(ToHalf(1.0f + 3 * 0x1p-11f)), 1.0f + 0x1p-9f);  // a tie, up to even
  EXPECT_EQ(ToFloat(ToHalf(0x1p-25f)), 0.0f);                       // a tie among subnormals
  EXPECT_EQ(ToFloat(ToHalf(0x1.8p-24f)), 0x1p-23f);
  EXPECT_EQ(ToFloat(ToBFloat16(1.0f + 0x1p-8f)), 1.0f);
  EXPECT_EQ(ToFloat(ToBFloat16(1.0f + 3 * 0x1p-8f)), 1.0f + 0x1p-6f);
}

}  // namespace
}  // namespace treadle
