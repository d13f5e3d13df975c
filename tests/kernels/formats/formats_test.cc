// Weight formats against the gguf package's dequantization (tests/oracles/make_gguf_blocks.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "kernels/dtype.h"
#include "kernels/formats/grids.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/formats/weight_format.h"
#include "kernels/op_cases/op_cases.h"

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
  const std::map<std::string_view, std::pair<int, int>> ranges = {{"q5_0", {-16, 15}},
                                                                  {"q5_1", {0, 31}},
                                                                  {"q8_0", {-128, 127}},
                                                                  {"q5_k", {0, 31}},
                                                                  {"q6_k", {-32, 31}}};
  for (const WeightFormat& format : WeightFormats()) {
    if (format.group == 0) continue;
    const RandomMatrix matrix = MakeRandomMatrix(format, 64, 256, 4);
    int low = 127;
    int high = -128;
    bool offsets = false;
    CodeGroup group;
    for (int64_t g = 0; g < 64 * 256 / format.group; ++g) {
      format.codes(matrix.source.data, g, group);
      const auto [least, most] = std::minmax_element(group.codes, group.codes + format.group);
      low = std::min<int>(low, *least);
      high = std::max<int>(high, *most);
      offsets |= group.offset != 0;
      for (int64_t i = 0; i < format.group && !format.codebook.empty(); ++i) {
        EXPECT_THAT(format.codebook, testing::Contains(group.codes[i])) << format.name;
      }
    }
    EXPECT_EQ(offsets, format.offsets) << format.name;
    if (!format.codebook.empty()) {
      ASSERT_EQ(format.codebook.size(), 16u) << format.name;
      const auto [least, most] = std::ranges::minmax(format.codebook);
      EXPECT_EQ((std::pair<float, float>(low, high)), std::pair(least, most)) << format.name;
      continue;
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
    EXPECT_EQ(format.group == 0, format.codes == nullptr) << format.name;
    EXPECT_EQ(format.apart(), format.decode == nullptr) << format.name;
    if (format.apart()) {
      EXPECT_EQ(format.bits_per_weight, format.code_bits) << format.name;
      EXPECT_EQ(format.MatrixBytes(3, 5), (15 * format.code_bits + 7) / 8) << format.name;
      if (!format.codebook.empty()) {
        EXPECT_EQ(format.codebook.size(), size_t{1} << format.code_bits) << format.name;
      }
      continue;
    }
    EXPECT_EQ(FindGgufFormat(static_cast<uint32_t>(format.gguf_type)), &format);
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

// Codes as bit streams, one bit at a time.
uint8_t CodeAt(const WeightFormat& format, const std::vector<std::byte>& bytes, int64_t index) {
  if (format.high_first) index ^= 1;  // two nibbles of a byte, exchanged
  unsigned code = 0;
  for (int64_t bit = 0; bit < format.code_bits; ++bit) {
    const int64_t at = index * format.code_bits + bit;
    code |= (static_cast<unsigned>(bytes[at / 8]) >> (at % 8) & 1) << bit;
  }
  return static_cast<uint8_t>(code);
}

TEST(ApartFormats, CodesAndScalesGiveTheRows) {
  constexpr int64_t kRows = 7, kCols = 39;
  for (const WeightFormat& format : WeightFormats()) {
    if (!format.apart()) continue;
    for (const int64_t block : {int64_t{32}, kCols, kRows * kCols}) {
      const RandomMatrix matrix = MakeRandomMatrix(format, kRows, kCols, 11, block);
      MatrixConstants& constants = *matrix.constants;
      if (format.activations == ActivationPolicy::kFloat && block != kCols) {
        for (size_t b = 0; b < constants.scales.size(); ++b) {
          constants.zeros.push_back(static_cast<float>(b % 7) - 2.5f);
        }
      }
      const std::span<const float> codebook = CodebookOf(matrix.source);
      std::vector<float> row(kCols);
      std::vector<uint8_t> codes(kCols);
      for (int64_t i = 0; i < kRows * kCols; ++i) {
        if (i % kCols == 0) {
          DecodeSourceRow(matrix.source, i / kCols, row.data());
          UnpackCodes(format, matrix.source.data, i, kCols, codes.data());
        }
        const uint8_t code = CodeAt(format, matrix.bytes, i);
        const float zero = constants.zeros.empty() ? 0.0f : constants.zeros[i / block];
        ASSERT_EQ(codes[i % kCols], code) << format.name << " " << i;
        ASSERT_EQ(row[i % kCols], constants.scales[i / block] * (codebook[code] - zero))
            << format.name << " " << i << " block " << block;
        ASSERT_TRUE(std::isfinite(row[i % kCols])) << format.name;
      }
    }
  }
}

// The sums of the points as the gguf package has them (quants.py: SHA-256 of each type's grid as
// int8).
TEST(WeightFormats, GridsAreThoseOfTheGgufPackage) {
  const auto sum = [](const auto& grid) {
    Sha256 all;
    all.Add(std::as_bytes(std::span(grid.points)));
    return all.Finish();
  };
  using namespace formats;
  EXPECT_EQ(sum(kIq2Xxs), "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54");
  EXPECT_EQ(sum(kIq2Xs), "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de");
  EXPECT_EQ(sum(kIq2S), "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88");
  EXPECT_EQ(sum(kIq3Xxs), "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d");
  EXPECT_EQ(sum(kIq3S), "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f");
  EXPECT_EQ(sum(kIq1), "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a");
}

// From OCP's definition: 4 exponent bits of bias 7, 3 mantissa bits, no infinities.
TEST(ApartFormats, E4M3ValuesAreExact) {
  const std::span<const float> codebook = FindWeightFormat("fp8")->codebook;
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    if ((code & 127) == 127) {
      EXPECT_TRUE(std::isnan(codebook[code])) << code;
    } else {
      EXPECT_EQ(codebook[code], code < 128 ? magnitude : -magnitude) << code;
    }
  }
  EXPECT_EQ(codebook[126], 448.0f);
}

TEST(ApartFormats, RefusesBadConstants) {
  const auto message = [](std::string_view format, auto damage) {
    RandomMatrix matrix =
        MakeRandomMatrix(*FindWeightFormat(format), 4, format == "q8_0" ? 32 : 48, 1);
    EXPECT_TRUE(CheckMatrixSource(matrix.source).ok()) << format;
    damage(matrix);
    return std::string(CheckMatrixSource(matrix.source).message());
  };
  using testing::HasSubstr;
  EXPECT_THAT(message("nf4", [](RandomMatrix& m) { m.constants->scales.pop_back(); }),
              HasSubstr("2 scales for a matrix [4, 48] in nf4 with blocks of 64: expected 3"));
  EXPECT_THAT(message("nf4", [](RandomMatrix& m) { m.constants->scale_block = 0; }),
              HasSubstr("blocks of 0"));
  EXPECT_THAT(message("nf4", [](RandomMatrix& m) { m.constants->scales[2] = NAN; }),
              HasSubstr("scale 2 is nan"));
  EXPECT_THAT(message("gptq4",
                      [](RandomMatrix& m) {
                        m.constants->zeros = {1, 2};
                      }),
              HasSubstr("2 zero points for 3 scales in gptq4: expected 3"));
  EXPECT_THAT(message("gptq8",
                      [](RandomMatrix& m) {
                        m.constants->zeros = {1, 2, 3, INFINITY};
                      }),
              HasSubstr("zero point 3 is inf"));
  EXPECT_THAT(message("int8",
                      [](RandomMatrix& m) {
                        m.constants->zeros = {1, 2, 3, 4};
                      }),
              HasSubstr("4 zero points for 4 scales in int8: expected 0"));
  EXPECT_THAT(message("fp4", [](RandomMatrix& m) { m.source.constants = nullptr; }),
              HasSubstr("no constants for fp4"));
  EXPECT_THAT(message("nf4", [](RandomMatrix& m) { m.source.transposed = true; }),
              HasSubstr("expected a dense format"));
  EXPECT_THAT(message("kbit3", [](RandomMatrix& m) { m.constants->codebook.pop_back(); }),
              HasSubstr("a codebook of 7 values for kbit3: expected 8"));
  EXPECT_THAT(message("kbit8", [](RandomMatrix& m) { m.constants->codebook.clear(); }),
              HasSubstr("a codebook of 0 values"));
  EXPECT_THAT(message("int8",
                      [](RandomMatrix& m) {
                        m.constants->scale_block = 24;
                        m.constants->scales.resize(8);
                      }),
              HasSubstr("expected one scale per row"));
  const auto order = [&](std::string_view format, std::vector<int32_t> features) {
    return message(format, [&](RandomMatrix& m) { m.constants->input_order = features; });
  };
  std::vector<int32_t> features(48);
  std::iota(features.rbegin(), features.rend(), 0);
  EXPECT_EQ(order("gptq4", features), "");
  EXPECT_THAT(order("int8", features), HasSubstr("expected features in order"));
  EXPECT_THAT(order("gptq4", {1, 0}), HasSubstr("input order of 2 features for a matrix of 48"));
  for (const int32_t bad : {features[7], -1, 48}) {
    features[30] = bad;
    EXPECT_THAT(order("gptq8", features), HasSubstr(Str("input order has feature ", bad)));
  }
  const MatrixConstants constants;
  EXPECT_THAT(message("q8_0", [&](RandomMatrix& m) { m.source.constants = &constants; }),
              HasSubstr("constants for a matrix in q8_0, which has its own"));
}

TEST(DTypes, SizesAndNames) {
  const struct {
    DType type;
    size_t size;
    std::string_view name;
  } rows[] = {{DType::kF32, 4, "f32"},
              {DType::kF16, 2, "f16"},
              {DType::kBF16, 2, "bf16"},
              {DType::kI8, 1, "int8"}};
  for (const auto& row : rows) {
    EXPECT_EQ(SizeOf(row.type), row.size) << row.name;
    EXPECT_EQ(Name(row.type), row.name);
  }
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

TEST(HasIntegers, AreConsecutiveWithZerosThatAreCodesInBlocksOf32) {
  const auto change = [](std::string_view format, int64_t block, const auto& body) {
    auto matrix = MakeRandomMatrix(*FindWeightFormat(format), 4, 256, 1, block);
    body(*matrix.constants);
    EXPECT_EQ(HasNibbles(matrix.source), format == "gptq4" && HasIntegers(matrix.source));
    return HasIntegers(matrix.source);
  };
  for (const auto& [format, codes] : {std::pair("gptq4", 16), std::pair("gptq8", 256)}) {
    const auto last = static_cast<float>(codes - 1);
    EXPECT_TRUE(change(format, 32, [](auto&) {}));
    EXPECT_TRUE(change(format, 4 * 256, [=](auto& c) { c.zeros = {last}; }));
    EXPECT_FALSE(change(format, 16, [](auto&) {}));
    for (const float zero : {last + 1, -1.0f, 0.5f}) {
      EXPECT_FALSE(change(format, 128, [=](auto& c) { c.zeros.back() = zero; })) << zero;
    }
    for (const float step : {1.0f, 1.5f}) {
      const auto set_codebook = [&](auto& c) {
        c.zeros.clear();
        for (int code = 1; code < codes; ++code) c.codebook.push_back(code - 8.0f);
        c.codebook.push_back(c.codebook.back() + step);
      };
      EXPECT_EQ(change(format, 128, set_codebook), step == 1);
    }
  }
  for (const auto& format : WeightFormats()) {
    if (format.apart()) continue;
    const auto matrix = MakeRandomMatrix(format, 4, 256, 1);
    EXPECT_EQ(HasIntegers(matrix.source), format.group > 0);
    EXPECT_EQ(HasNibbles(matrix.source), format.nibbles);
  }
  for (const char* name : {"nf4", "fp8", "kbit4", "kbit8", "int8"}) {
    EXPECT_FALSE(HasIntegers(MakeRandomMatrix(*FindWeightFormat(name), 4, 256, 1).source)) << name;
  }
}

}  // namespace
}  // namespace treadle
