// Quantizers against bitsandbytes' CPU code, the gguf package and PyTorch
// (tests/oracles/make_quantize_oracles.py), bit for bit, and their properties.
#include "kernels/formats/quantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/formats/quantizers.h"
#include "kernels/op_cases/random.h"
#include "tests/kernels/formats/oracle_values.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Pieces of odd sizes, last first: results must not depend on them.
void Pieces(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t end = count; end > 0;) {
    const int64_t begin = std::max<int64_t>(0, end - 1 - end % 7);
    body(begin, end);
    end = begin;
  }
}

QuantizeSpec Spec(std::string_view text) {
  auto spec = ParseQuantizeSpec(text);
  TREADLE_CHECK(spec.ok());
  return *std::move(spec);
}

QuantizedMatrix Make(std::string_view spec, std::span<const float> values, int64_t n, int64_t k) {
  auto matrix = Quantize(Spec(spec), values, n, k, Pieces);
  TREADLE_CHECK(matrix.ok());
  return *std::move(matrix);
}

std::vector<float> Decode(const QuantizedMatrix& matrix) {
  std::vector<float> values(static_cast<size_t>(matrix.n * matrix.k));
  for (int64_t row = 0; row < matrix.n; ++row) {
    DecodeSourceRow(matrix.source(), row, values.data() + row * matrix.k);
  }
  return values;
}

class Oracle {
 public:
  Oracle() : index_(nlohmann::json::parse(std::ifstream(kPath + ".json"))) {
    std::ifstream file(kPath + ".bin", std::ios::binary);
    blob_.assign(std::istreambuf_iterator<char>(file), {});
  }
  const nlohmann::json& cases() const { return index_["cases"]; }
  const nlohmann::json& codebooks() const { return index_["codebooks"]; }
  template <typename T>
  std::vector<T> Get(const nlohmann::json& place) const {
    const size_t offset = place[0], bytes = place[1];
    TREADLE_CHECK(offset + bytes <= blob_.size());
    std::vector<T> values(bytes / sizeof(T));
    std::memcpy(values.data(), blob_.data() + offset, bytes);
    return values;
  }

 private:
  inline static const std::string kPath = TREADLE_TESTDATA "/quantize_oracles";
  const nlohmann::json index_;
  std::vector<char> blob_;
};

template <typename T>
void ExpectSameBits(const std::vector<T>& found, const std::vector<T>& expected,
                    std::string_view what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(std::memcmp(&found[i], &expected[i], sizeof(T)), 0)
        << what << " " << i << ": " << testing::PrintToString(found[i]) << ", expected "
        << testing::PrintToString(expected[i]);
  }
}

// bitsandbytes sums the scales in 32 bits, in an order that depends on its machine; our mean is
// rounded once. Given the same mean, the rest has the same bits.
void ExpectSameNested(const Oracle& oracle, const nlohmann::json& c,
                      const QuantizedMatrix& matrix) {
  const float offset = oracle.Get<float>(c["offset"])[0];
  ASSERT_TRUE(matrix.nested.has_value());
  EXPECT_NEAR(matrix.nested->offset, offset, 0x1p-22f * offset);
  QuantizeSpec plain = Spec(c["spec"].get<std::string>());
  plain.double_quantized = false;
  const int64_t n = c["n"], k = c["k"];
  const std::vector<float> values = OracleValues(c["kind"].get<std::string>(), c["seed"], n * k);
  const QuantizedMatrix single = *Quantize(plain, values, n, k, Pieces);
  const NestedScales nested = formats::NestScales(single.constants.scales, offset);
  ExpectSameBits(nested.codes, oracle.Get<uint8_t>(c["nested_codes"]), "nested code");
  ExpectSameBits(nested.absmax, oracle.Get<float>(c["nested_absmax"]), "nested absmax");
  EXPECT_TRUE(single.data == matrix.data);
  if (nested.offset == matrix.nested->offset) {
    EXPECT_EQ(matrix.nested->codes, nested.codes);
    ExpectSameBits(matrix.constants.scales, DecodeScales(nested), "decoded scale");
  }
}

TEST(Quantize, EqualsOthers) {
  const Oracle oracle;
  std::set<std::string> formats;
  for (const auto& c : oracle.cases()) {
    const std::string spec = c["spec"];
    SCOPED_TRACE(c.dump());
    const int64_t n = c["n"], k = c["k"];
    const std::vector<float> values = OracleValues(c["kind"].get<std::string>(), c["seed"], n * k);
    const QuantizedMatrix matrix = Make(spec, values, n, k);
    formats.insert(std::string(matrix.format->name));
    ASSERT_TRUE(CheckMatrixSource(matrix.source()).ok());
    if (c.contains("data")) {
      ExpectSameBits(matrix.data, oracle.Get<std::byte>(c["data"]), "byte");
    }
    if (c.contains("scales")) {
      ExpectSameBits(matrix.constants.scales, oracle.Get<float>(c["scales"]), "scale");
    }
    if (c.contains("absmax")) {
      std::vector<float> scales = oracle.Get<float>(c["absmax"]);
      for (float& scale : scales) scale /= 127.0f;
      ExpectSameBits(matrix.constants.scales, scales, "scale");
    }
    if (c.contains("offset")) ExpectSameNested(oracle, c, matrix);
    if (c.contains("decoded")) {
      const std::vector<float> expected = oracle.Get<float>(c["decoded"]);
      const std::vector<float> found = Decode(matrix);
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i], expected[i]) << i;  // a zero's sign apart
      }
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(formats.size(), 10u);
}

TEST(Quantize, CodebooksEqualOthers) {
  const Oracle oracle;
  for (const auto& [name, place] : oracle.codebooks().items()) {
    const QuantizeSpec spec = Spec("kbit-" + name + ":tensor");
    const int bits = spec.format->code_bits;
    // Zeros are compared apart: bitsandbytes pads its tables with them.
    std::vector<float> values = OracleValues("smooth", 7, 999);
    const std::vector<float> signs = OracleValues("smooth", 8, 999);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = signs[i] == 0 ? 0.0f : std::copysign(values[i], signs[i]);
    }
    std::vector<float> codebook =
        Make("kbit-" + name + ":tensor", values, 999, 1).constants.codebook;
    EXPECT_EQ(codebook.size(), size_t{1} << bits) << name;
    EXPECT_TRUE(std::is_sorted(codebook.begin(), codebook.end())) << name;
    EXPECT_EQ(std::count(codebook.begin(), codebook.end(), 0.0f) > 0, true) << name;
    std::vector<float> expected = oracle.Get<float>(place);
    std::erase(codebook, 0.0f);
    std::erase(expected, 0.0f);
    if (spec.codebook == QuantizeSpec::Codebook::kInt) codebook.pop_back();  // the repeated 1
    if (spec.codebook != QuantizeSpec::Codebook::kQuantile) {
      ExpectSameBits(codebook, expected, name);
      continue;
    }
    ASSERT_EQ(codebook.size(), expected.size()) << name;
    for (size_t i = 0; i < codebook.size(); ++i)
      EXPECT_NEAR(codebook[i], expected[i], 1e-3f) << name;
  }
}

std::vector<float> Normal(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values;
  while (static_cast<int64_t>(values.size()) < count) {  // Box and Muller's pairs
    const double radius = std::sqrt(-2 * std::log(1 - random.Uniform()));
    const double angle = 2 * std::numbers::pi * random.Uniform();
    values.push_back(static_cast<float>(radius * std::cos(angle)));
    values.push_back(static_cast<float>(radius * std::sin(angle)));
  }
  return values;
}

double MeanAbsoluteError(std::string_view spec, std::span<const float> values, int64_t n,
                         int64_t k) {
  const std::vector<float> decoded = Decode(Make(spec, values, n, k));
  double sum = 0;
  for (size_t i = 0; i < decoded.size(); ++i) sum += std::fabs(double{decoded[i]} - values[i]);
  return sum / static_cast<double>(decoded.size());
}

// bitsandbytes' figures on N(0, 1), which a sample of 2^23 numbers gives to within 2e-5 (nf4) and
// 4e-5 (fp4) in two of three cases.
TEST(Quantize, ErrorsOnNormalNumbers) {
  constexpr int64_t kRows = 4096, kCols = 2048;
  const std::vector<float> values = Normal(kRows * kCols, 1);
  EXPECT_NEAR(MeanAbsoluteError("nf4", values, kRows, kCols), 0.072798, 5e-5);
  EXPECT_NEAR(MeanAbsoluteError("nf4:128", values, kRows, kCols), 0.076831, 5e-5);
  EXPECT_NEAR(MeanAbsoluteError("fp4", values, kRows, kCols), 0.096543, 1e-4);
  EXPECT_NEAR(MeanAbsoluteError("fp4:128", values, kRows, kCols), 0.102969, 1e-4);
}

// More bits, smaller blocks: less error; double quantization costs nearly nothing (QLoRA, section
// 3), and at 4 bits quantiles and normal floats beat evenly spaced integers (Dettmers, chapter 3).
TEST(Quantize, ErrorsAreOrdered) {
  constexpr int64_t kRows = 64, kCols = 512;
  const std::vector<float> values = Normal(kRows * kCols, 4);
  const auto error = [&](std::string_view spec) {
    return MeanAbsoluteError(spec, values, kRows, kCols);
  };
  for (const std::string name : {"int", "dynamic", "quantile"}) {
    for (int bits = 3; bits < 8; ++bits) {
      const std::string less = Str("kbit-", name, bits), more = Str("kbit-", name, bits + 1);
      EXPECT_GT(error(less), error(more)) << less;
    }
    EXPECT_LT(error("kbit-" + name + "4:32"), error("kbit-" + name + "4:256"));
    EXPECT_LT(error("kbit-" + name + "4:256"), error("kbit-" + name + "4:tensor"));
  }
  EXPECT_NEAR(error("nf4-dq"), error("nf4"), 0.01 * error("nf4"));
  EXPECT_LT(error("nf4"), error("kbit-e2m1"));
  EXPECT_LT(error("kbit-e2m1"), error("kbit-int4"));
  EXPECT_LT(error("kbit-quantile4"), error("kbit-int4"));
  EXPECT_LT(error("kbit-int4"), error("fp4"));
  EXPECT_LT(error("int8"), 0.2 * error("nf4"));
  EXPECT_LT(error("fp8"), 0.5 * error("nf4"));
  EXPECT_LT(error("q4_1"), error("q4_0"));
  EXPECT_EQ(error("f32"), 0);
}

constexpr const char* kEverySpec[] = {"int8",
                                      "nf4",
                                      "nf4-dq:128",
                                      "fp4:32",
                                      "fp4-dq",
                                      "fp8",
                                      "q8_0",
                                      "q4_0",
                                      "q4_1",
                                      "f32",
                                      "f16",
                                      "bf16",
                                      "kbit-int3",
                                      "kbit-int8:1024",
                                      "kbit-float4e2:128",
                                      "kbit-float4e3",
                                      "kbit-float5e2:tensor",
                                      "kbit-dynamic6:32",
                                      "kbit-dynamic7:tensor",
                                      "kbit-e2m1",
                                      "kbit-quantile3:512",
                                      "kbit-quantile8"};

// The nearest value of the codebook, whatever the format.
TEST(Quantize, CodesAreTheNearest) {
  constexpr int64_t kRows = 9, kCols = 160;
  const std::vector<float> values = Normal(kRows * kCols, 5);
  for (const std::string_view spec : kEverySpec) {
    const QuantizedMatrix matrix = Make(spec, values, kRows, kCols);
    if (!matrix.format->apart()) continue;
    // Codes are those of the scales before double quantization.
    QuantizeSpec plain = Spec(spec);
    plain.double_quantized = false;
    const QuantizedMatrix single = *Quantize(plain, values, kRows, kCols, Pieces);
    const std::vector<float> decoded = Decode(single);
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      const float scale = single.constants.scales[i / single.constants.scale_block];
      double least = std::numeric_limits<double>::infinity();
      for (const float value : CodebookOf(single.source())) {
        if (!std::isnan(value))
          least = std::min(least, std::fabs(double{scale} * value - values[i]));
      }
      // Between neighbours at nearly the same distance the scaling's roundings decide.
      ASSERT_NEAR(std::fabs(double{decoded[i]} - values[i]), least, 1e-6) << spec << " " << i;
    }
  }
}

TEST(Quantize, PiecesDoNotMatter) {
  constexpr int64_t kRows = 31, kCols = 352;
  const std::vector<float> values = Normal(kRows * kCols, 6);
  for (const std::string_view spec : kEverySpec) {
    const QuantizedMatrix pieces = Make(spec, values, kRows, kCols);
    const auto whole = Quantize(Spec(spec), values, kRows, kCols,
                                [](int64_t count, const auto& body) { body(0, count); });
    ASSERT_TRUE(whole.ok()) << spec;
    EXPECT_TRUE(whole->data == pieces.data) << spec;
    EXPECT_EQ(whole->constants.scales, pieces.constants.scales) << spec;
    EXPECT_EQ(whole->constants.codebook, pieces.constants.codebook) << spec;
  }
}

// Zeros, subnormal and huge numbers: decoded values stay finite, and of the order of the given.
TEST(Quantize, ExtremeMagnitudes) {
  constexpr int64_t kRows = 4, kCols = 96;
  for (const std::string_view spec : kEverySpec) {
    for (const float magnitude : {0.0f, 1e-45f, 1e-39f, 1e-30f, 1e4f, 3e38f}) {
      std::vector<float> values = Normal(kRows * kCols, 7);
      for (float& value : values) value = std::clamp(value, -1.0f, 1.0f) * magnitude;
      const auto matrix = Quantize(Spec(spec), values, kRows, kCols, Pieces);
      if (magnitude > 1e4f && !matrix.ok()) {  // 16-bit constants end at 65504
        EXPECT_THAT(std::string(matrix.status().message()), HasSubstr("at most"));
        continue;
      }
      ASSERT_TRUE(matrix.ok()) << spec << " " << magnitude << ": " << matrix.status();
      EXPECT_TRUE(CheckMatrixSource(matrix->source()).ok()) << spec;
      for (const float value : Decode(*matrix)) {
        ASSERT_LE(std::fabs(value), 1.1f * magnitude + 1e-37f) << spec << " " << magnitude;
      }
    }
  }
}

TEST(Quantize, RefusesBadValuesAndShapes) {
  std::vector<float> values(5 * 64, 1.0f);
  const auto message = [&](std::string_view spec, int64_t n, int64_t k) {
    return std::string(Quantize(Spec(spec), values, n, k, Pieces).status().message());
  };
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    values[3 * 64 + 17] = bad;
    values[4 * 64] = bad;
    for (const std::string_view spec : kEverySpec) {
      EXPECT_THAT(message(spec, 5, 64),
                  HasSubstr(Str("row 3, column 17 of a matrix [5, 64] is ", bad)))
          << spec;
    }
  }
  values.assign(values.size(), 7e4f);
  EXPECT_THAT(message("f16", 5, 64),
              HasSubstr("is 70000: f16 needs finite numbers of at most 65504"));
  EXPECT_THAT(message("kbit-int4", 5, 64), HasSubstr("at most 65504"));
  EXPECT_EQ(message("q8_0", 5, 64), "");
  EXPECT_THAT(message("q8_0", 8, 40), HasSubstr("columns in multiples of 32"));
  EXPECT_THAT(message("q4_1", 8, 40), HasSubstr("matrix [8, 40] for q4_1"));
  EXPECT_THAT(message("nf4", 0, 64), HasSubstr("positive"));
}

TEST(Quantize, BitsPerWeightCountConstants) {
  const std::vector<float> values(512 * 512, 0.5f);
  const std::pair<const char*, double> bits[] = {{"nf4", 4.5},
                                                 {"nf4:128", 4.25},
                                                 {"nf4-dq", 4.127},
                                                 {"int8", 8 + 32.0 / 512},
                                                 {"q4_1", 5},
                                                 {"q8_0", 8.5},
                                                 {"bf16", 16},
                                                 {"fp8", 8 + 32.0 / 512},
                                                 {"kbit-int3", 3.25},
                                                 {"kbit-float5e3:32", 5.5},
                                                 {"kbit-dynamic4:tensor", 4}};
  for (const auto& [spec, expected] : bits) {
    EXPECT_NEAR(Make(spec, values, 512, 512).BitsPerWeight(), expected, 5e-4) << spec;
  }
}

}  // namespace
}  // namespace treadle
