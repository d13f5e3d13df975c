// The CPU backend on apart formats: LLM.int8(), codebooks of floats, FP8. Against the reference,
// and bit for bit against itself over rows, threads and instruction sets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/cpu/cpu_setting.h"

namespace treadle {
namespace {

RandomMatrix MakeApart(std::string_view name, int64_t n, int64_t k, int64_t block) {
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), n, k, /*seed=*/1, block);
  if (!name.starts_with("gptq")) return matrix;
  Random random(2);
  matrix.constants->zeros.clear();
  for (size_t i = 0; i < matrix.constants->scales.size(); ++i) {
    matrix.constants->zeros.push_back(static_cast<float>(random.Below(16)));
  }
  return matrix;
}

// With a few outliers: in some columns of all rows, and strewn.
std::vector<float> MakeInput(int64_t rows, int64_t k, uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (int64_t i = 0; i < rows * k; ++i) {
    x[i] = random.Normal();
    if (i % k % 61 == 7 || random.Below(300) == 0) x[i] *= 20;
  }
  if (rows > 2) std::fill_n(x.begin() + 2 * k, k, 0.0f);
  return x;
}

// As a layer's, with coarse activations: ComputeMode::kBf16 and kMixed are for these.
std::unique_ptr<PackedMatrix> MustPack(Backend& backend, MatrixSource source) {
  source.of_layer = source.coarse = true;
  auto packed = backend.Pack(source);
  TREADLE_CHECK(packed.ok());
  return *std::move(packed);
}

std::vector<float> Multiply(Backend& backend, const PackedMatrix& weight,
                            const std::vector<float>& x, int64_t begin, int64_t rows) {
  std::vector<float> out(static_cast<size_t>(rows * weight.n()), 0.5f);
  std::vector<float> input(x.begin() + begin * weight.k(), x.begin() + (begin + rows) * weight.k());
  const Projection projection{&weight, nullptr,
                              DenseTensor(out.data(), DType::kF32, rows, weight.n()), true};
  backend.MatMul(DenseTensor(input.data(), DType::kF32, rows, weight.k()), {&projection, 1});
  return out;
}

struct Shape {
  std::string_view format;
  int64_t n;
  int64_t k;
  int64_t block;
};

// Blocks of every kind: within rows, straddling them, whole rows, the whole tensor, and sizes that
// no packed layout has.
const Shape kShapes[] = {
    {"int8", 53, 576, 576},     {"int8", 70, 1000, 1000}, {"int8", 17, 33, 33},
    {"int8", 5, 1, 1},          {"nf4", 53, 576, 64},     {"nf4", 70, 1024, 4096},
    {"nf4", 17, 1000, 64},      {"nf4", 33, 96, 64},      {"nf4", 70, 256, 32},
    {"nf4", 18, 320, 320 * 18}, {"fp4", 70, 576, 64},     {"nf4", 35, 8192, 64},
    {"kbit3", 70, 640, 128},    {"kbit4", 70, 640, 64},   {"kbit5", 53, 256, 64},
    {"kbit6", 53, 256, 64},     {"kbit7", 53, 288, 64},   {"kbit8", 70, 288, 4096},
    {"fp8", 70, 576, 576},      {"fp8", 53, 768, 128},    {"fp8", 17, 96, 96 * 17},
    {"fp8", 17, 33, 33},        {"gptq4", 53, 512, 128},  {"gptq4", 70, 576, 64},
    {"gptq4", 18, 96, 128},     {"gptq4", 17, 100, 10},   {"gptq8", 53, 256, 128},
    {"gptq8", 70, 576, 64},
};

class CpuFormatsTest : public CpuSettingTest {};

// Whether the backend multiplies integers (cpu_backend.h).
bool RoundsCodebook(const MatrixSource& source, ComputeMode compute) {
  const int64_t block = source.constants->scale_block;
  const int64_t unit = block >= source.n * source.k ? source.k : std::gcd(block, source.k);
  return (compute == ComputeMode::kInt12 || compute == ComputeMode::kInt16 ||
          compute == ComputeMode::kMixed) &&
         source.format->activations == ActivationPolicy::kFloat && unit % 32 == 0 &&
         !HasIntegers(source);
}

// Row `row` of the matrix with its codebook in integers, and a row of activations, both as kInt16
// has them.
std::vector<double> RoundedWeights(const MatrixSource& source, int64_t row) {
  const std::span<const float> codebook = CodebookOf(source);
  float largest = 0;
  for (const float value : codebook) largest = std::fmax(largest, std::fabs(value));
  const bool fp8 = source.format->name == "fp8";
  const float step = fp8 ? 0.125f : largest / 4095;
  const float steps = 4095 / largest;
  const auto rounded = [&](float value) {
    return fp8 ? std::floor(8 * value + 0.5f) : std::nearbyint(value * steps);
  };
  std::vector<uint8_t> codes(static_cast<size_t>(source.k));
  UnpackCodes(*source.format, source.data, row * source.k, source.k, codes.data());
  std::vector<double> weights;
  for (int64_t k = 0; k < source.k; ++k) {
    const MatrixConstants& constants = *source.constants;
    const int64_t block = (row * source.k + k) / constants.scale_block;
    const float scale = constants.scales[block];
    const float minimum = constants.zeros.empty() ? 0.0f : -(scale * constants.zeros[block]);
    weights.push_back(double{scale * step} * rounded(codebook[codes[k]]) + minimum);
  }
  return weights;
}
// Products in double and the sums of magnitudes, both with the 0.5 that Multiply adds to.
struct Expected {
  double value = 0.5;
  double magnitude = 0.5;
};
Expected Product(const std::vector<double>& w, const std::vector<double>& x) {
  Expected sum;
  for (size_t k = 0; k < w.size(); ++k) {
    sum.value += w[k] * x[k];
    sum.magnitude += std::fabs(w[k] * x[k]);
  }
  return sum;
}

TEST_P(CpuFormatsTest, MatchesTheReference) {
  const auto backend = MakeBackend(2);
  const auto reference = CreateReferenceBackend(GetParam().compute);
  for (const Shape& shape : kShapes) {
    const auto matrix = MakeApart(shape.format, shape.n, shape.k, shape.block);
    const auto packed = MustPack(*backend, matrix.source);
    const auto reference_packed = MustPack(*reference, matrix.source);
    const bool rounds = RoundsCodebook(matrix.source, GetParam().compute);
    const double unit = 0x1p-24 * (8 + std::sqrt(static_cast<double>(shape.k)));
    for (const int64_t rows : {1, 2, 3, 4, 7, 20}) {
      const std::vector<float> x = MakeInput(rows, shape.k, 9);
      const std::vector<float> out = Multiply(*backend, *packed, x, 0, rows);
      const std::vector<float> expected = Multiply(*reference, *reference_packed, x, 0, rows);
      std::vector<float> w(static_cast<size_t>(shape.k));
      for (int64_t i = 0; i < rows * shape.n; ++i) {
        const float* row = x.data() + i / shape.n * shape.k;
        DecodeSourceRow(matrix.source, i % shape.n, w.data());
        Expected sum = Product({w.begin(), w.end()}, {row, row + shape.k});
        sum.value = expected[i];
        if (rounds) {
          sum =
              Product(RoundedWeights(matrix.source, i % shape.n),
                      RoundedActivations({row, static_cast<size_t>(shape.k)}, ComputeMode::kInt16));
        }
        for (int64_t k = 0; k < shape.k && !matrix.constants->zeros.empty(); ++k) {
          // Code and zero are summed apart.
          const float scale = matrix.constants->scales[(i % shape.n * shape.k + k) / shape.block];
          sum.magnitude += std::fabs(scale * row[k]) * (2 << matrix.source.format->code_bits);
        }
        ASSERT_NEAR(out[i], sum.value, unit * sum.magnitude)
            << shape.format << " " << shape.n << "x" << shape.k << " block " << shape.block
            << " rows " << rows << " element " << i;
      }
    }
  }
}

TEST_P(CpuFormatsTest, BitsDoNotDependOnRowsThreadsOrInstructionSet) {
  constexpr int64_t kRows = 53;  // more than one chunk of long rows
  const auto backend = MakeBackend(2);
  std::vector<std::unique_ptr<Backend>> others;
  for (const int threads : {1, 3}) others.push_back(MakeBackend(threads));
  for (const CpuIsa isa : SupportedIsas())
    others.push_back(MakeCpuBackend({isa, GetParam().compute}, 2));
  for (const Shape& shape : kShapes) {
    const auto matrix = MakeApart(shape.format, shape.n, shape.k, shape.block);
    const auto packed = MustPack(*backend, matrix.source);
    const std::vector<float> x = MakeInput(kRows, shape.k, 5);
    const std::vector<float> all = Multiply(*backend, *packed, x, 0, kRows);
    for (const int64_t count : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17}) {
      for (int64_t row = 0; row < kRows; row += count) {
        const int64_t rows = std::min(count, kRows - row);
        const std::vector<float> some = Multiply(*backend, *packed, x, row, rows);
        ASSERT_EQ(0, std::memcmp(some.data(), &all[row * shape.n], some.size() * sizeof(float)))
            << shape.format << " " << shape.n << "x" << shape.k << ", rows = " << count;
      }
    }
    for (const auto& other : others) {
      MatrixSource source = matrix.source, kept = matrix.source;
      kept.of_layer = kept.coarse = true;
      for (const bool of_layer : {false, true}) {
        source.of_layer = of_layer;
        source.coarse = of_layer;
        const bool others = ModeOf(GetParam().compute, source) != ModeOf(GetParam().compute, kept);
        if (others) continue;  // of other bits
        const auto again = *other->Pack(source);
        ASSERT_EQ(all, Multiply(*other, *again, x, 0, kRows))
            << shape.format << " " << shape.n << "x" << shape.k << " on " << other->description();
        ASSERT_EQ(std::vector<float>(all.begin(), all.begin() + 3 * shape.n),
                  Multiply(*other, *again, x, 0, 3))
            << shape.format << " on " << other->description();
      }
    }
  }
}

// A zero point that all blocks have may be part of the codebook (gptq.h).
TEST_P(CpuFormatsTest, IntegersWithOneZeroHaveTheBitsOfManyZeros) {
  const auto backend = MakeBackend(2);
  for (const std::string_view format : {"gptq4", "gptq8"}) {
    const int zero = format == "gptq4" ? 8 : 128;
    for (const auto& [k, block] :
         {std::pair(256, 128), std::pair(576, 64), std::pair(96, 96 * 18)}) {
      auto many = MakeApart(format, 18, k, block), one = MakeApart(format, 18, k, block);
      std::ranges::fill(many.constants->zeros, static_cast<float>(zero));
      one.constants->zeros.clear();
      for (int code = 0; code < 2 * zero; ++code) {
        one.constants->codebook.push_back(static_cast<float>(code - zero));
      }
      for (const int64_t rows : {1, 5, 20}) {
        const std::vector<float> x = MakeInput(rows, k, 9);
        EXPECT_EQ(Multiply(*backend, *MustPack(*backend, one.source), x, 0, rows),
                  Multiply(*backend, *MustPack(*backend, many.source), x, 0, rows))
            << format << ", k " << k << ", rows " << rows;
      }
    }
  }
}

// A feature for each place: a permutation that moves most of them far.
std::vector<int32_t> MakeOrder(int64_t k, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = k - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  return order;
}

// A matrix with an input order does to activations what the same codes without one do to
// activations in that order, bit for bit. Several such matrices and one without share an input.
TEST_P(CpuFormatsTest, AnInputOrderIsThatOfTheActivations) {
  const auto backend = MakeBackend(2);
  for (const Shape& shape : kShapes) {
    const bool packs_floats = shape.block % 32 != 0 || shape.k % 32 != 0;
    if (shape.format == "int8" || packs_floats) continue;
    auto plain = MakeApart(shape.format, shape.n, shape.k, shape.block);
    const auto packed_plain = MustPack(*backend, plain.source);
    std::vector<std::unique_ptr<PackedMatrix>> ordered;
    std::vector<std::vector<int32_t>> orders;
    for (const uint64_t seed : {7, 8, 7}) {  // the last as the first, in a place of its own
      orders.push_back(MakeOrder(shape.k, seed));
      plain.constants->input_order = orders.back();
      ordered.push_back(MustPack(*backend, plain.source));
    }
    for (const int64_t rows : {1, 3, 40}) {
      const std::vector<float> x = MakeInput(rows, shape.k, 9);
      std::vector<std::vector<float>> outs(4, std::vector<float>(rows * shape.n, 0.5f));
      std::vector<Projection> projections;
      for (size_t i = 0; i < outs.size(); ++i) {
        const PackedMatrix* weight =
            i == 1 ? packed_plain.get() : ordered[i == 0 ? 0 : i - 1].get();
        projections.push_back(
            {weight, nullptr, DenseTensor(outs[i].data(), DType::kF32, rows, shape.n), true});
      }
      std::vector<float> input = x;
      backend->MatMul(DenseTensor(input.data(), DType::kF32, rows, shape.k), projections);
      ASSERT_EQ(input, x);
      EXPECT_EQ(outs[1], Multiply(*backend, *packed_plain, x, 0, rows)) << shape.format;
      for (const size_t i : {0, 2, 3}) {
        const std::vector<int32_t>& order = orders[i == 0 ? 0 : i - 1];
        std::vector<float> moved(x.size());
        for (int64_t at = 0; at < rows * shape.k; ++at) {
          moved[at] = x[at / shape.k * shape.k + order[at % shape.k]];
        }
        EXPECT_EQ(outs[i], Multiply(*backend, *packed_plain, moved, 0, rows))
            << shape.format << " " << shape.n << "x" << shape.k << " rows " << rows;
      }
    }
  }
}

TEST_P(CpuFormatsTest, EmbedDecodesCanonically) {
  const auto backend = MakeBackend(2);
  for (size_t i = 0; i < 2 * std::size(kShapes); ++i) {
    const Shape& shape = kShapes[i / 2];
    const auto matrix = MakeApart(shape.format, shape.n, shape.k, shape.block);
    if (i % 2 == 1 && shape.format != "int8") {
      matrix.constants->input_order = MakeOrder(shape.k, i);
    }
    const auto packed = *backend->Pack(matrix.source);
    const std::vector<int32_t> ids = {static_cast<int32_t>(shape.n) - 1, 0, 3};
    std::vector<float> out(ids.size() * shape.k), expected(shape.k);
    const bool accumulate = i % 4 >= 2;
    std::ranges::fill(out, 0.0f);
    backend->Embed(*packed, ids, 0, accumulate, DenseTensor(out.data(), DType::kF32, 3, shape.k));
    for (size_t row = 0; row < ids.size(); ++row) {
      DecodeSourceRow(matrix.source, ids[row], expected.data());
      for (int64_t k = 0; k < shape.k; ++k) {
        ASSERT_EQ(out[row * shape.k + k], expected[k]) << shape.format << " row " << ids[row];
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuFormatsTest, EveryCpuSetting(), SettingName);

std::unique_ptr<Backend> OneThread(CpuIsa isa) {
  auto backend = CreateCpuBackend({.threads = 1, .isa = isa});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

// The sums that LLM.int8() must not saturate: extreme codes, and activations of one size.
TEST(CpuRowInt8Test, ExtremeCodesAreSummedExactly) {
  constexpr int64_t kCols = 4096, kFeatures = 16;
  for (const int code : {-128, -127, 127}) {
    auto matrix = MakeApart("int8", kFeatures, kCols, kCols);
    std::fill(matrix.bytes.begin(), matrix.bytes.end(), static_cast<std::byte>(code));
    std::fill(matrix.constants->scales.begin(), matrix.constants->scales.end(), 1.0f);
    matrix.constants->outlier_threshold = 0;
    for (const float sign : {1.0f, -1.0f}) {
      const std::vector<float> x(kCols, sign * 127.0f);
      const float expected = sign * 127.0f * static_cast<float>(kCols * code) + 0.5f;
      for (const CpuIsa isa : SupportedIsas()) {
        const auto backend = OneThread(isa);
        const auto packed = MustPack(*backend, matrix.source);
        for (const float value : Multiply(*backend, *packed, x, 0, 1)) {
          EXPECT_EQ(value, expected) << Name(isa) << " code " << code;
        }
      }
    }
  }
}

// Outliers are multiplied in float and do not coarsen the other elements.
TEST(CpuRowInt8Test, OutliersAreExactAndLeaveTheRestAlone) {
  constexpr int64_t kCols = 100, kFeatures = 18;
  auto matrix = MakeApart("int8", kFeatures, kCols, kCols);
  for (const OutlierRule rule : {OutlierRule::kPerRow, OutlierRule::kPerCall}) {
    matrix.constants->outlier_rule = rule;
    for (const CpuIsa isa : SupportedIsas()) {
      const auto backend = OneThread(isa);
      const auto packed = MustPack(*backend, matrix.source);
      {  // a larger call must leave nothing behind in the memory that both use
        const auto wide = MakeApart("int8", 1, 2000, 2000);
        Multiply(*backend, *MustPack(*backend, wide.source), std::vector<float>(2000, 1.0f), 0, 1);
      }
      std::vector<float> x(2 * kCols);
      x[97] = 1000.5f;    // row 0: an outlier in a padded block
      x[kCols + 97] = 3;  // row 1: an outlier only if the call is asked
      x[kCols + 2] = 2;
      const std::vector<float> out = Multiply(*backend, *packed, x, 0, 2);
      std::vector<float> w(kCols);
      for (int64_t i = 0; i < kFeatures; ++i) {
        DecodeSourceRow(matrix.source, i, w.data());
        EXPECT_EQ(out[i], 0.5f + w[97] * 1000.5f);
        const auto code = [&](int64_t k) {
          return static_cast<float>(static_cast<int8_t>(matrix.bytes[i * kCols + k]));
        };
        const float scale = matrix.constants->scales[i];
        const float dx = (rule == OutlierRule::kPerRow ? 3.0f : 2.0f) / 127;
        const float q = std::nearbyint(2 * (127 / 3.0f));
        const float expected = rule == OutlierRule::kPerRow
                                   ? (127 * code(97) + q * code(2)) * (scale * dx)
                                   : std::fma(w[97], 3.0f, 127 * code(2) * (scale * dx));
        EXPECT_EQ(out[kFeatures + i], 0.5f + expected) << Name(isa);
      }
    }
  }
}

// An element of exactly the threshold is taken out (|x| >= threshold, as bitsandbytes has it), and
// so does not widen the steps of the others: products add up. One just below it stays.
TEST(CpuRowInt8Test, TheThresholdItselfIsAnOutlier) {
  constexpr int64_t kCols = 96, kFeatures = 20;
  constexpr float kThreshold = 6.0f;
  for (const CpuIsa isa : SupportedIsas()) {
    const auto backend = OneThread(isa);
    auto matrix = MakeApart("int8", kFeatures, kCols, kCols);
    matrix.constants->outlier_threshold = kThreshold;
    const auto packed = MustPack(*backend, matrix.source);
    const auto product = [&](float small, float large) {
      std::vector<float> x(kCols);
      x[5] = small;
      x[70] = large;
      std::vector<float> out = Multiply(*backend, *packed, x, 0, 1);
      for (float& value : out) value -= 0.5f;  // what it was added to
      return out;
    };
    const auto alone = product(0.1f, 0);
    for (const float sign : {1.0f, -1.0f}) {
      for (const bool outlier : {true, false}) {
        const float large = sign * (outlier ? kThreshold : std::nextafter(kThreshold, 0.0f));
        const auto both = product(0.1f, large), other = product(0, large);
        double error = 0, size = 0;
        for (int64_t i = 0; i < kFeatures; ++i) {
          error += std::fabs(both[i] - other[i] - alone[i]);
          size += std::fabs(alone[i]);
        }
        // In steps of 6 / 127, 0.1 is 2 of them, 5.5 % less.
        EXPECT_EQ(error < 0.01 * size, outlier)
            << Name(isa) << ", " << large << ": " << error / size;
      }
    }
  }
}

// Projections of one call may differ in their thresholds.
TEST(CpuRowInt8Test, OneCallMayMixThresholds) {
  constexpr int64_t kCols = 96, kRows = 3;
  const std::vector<float> x = MakeInput(kRows, kCols, 3);
  for (const CpuIsa isa : SupportedIsas()) {
    const auto backend = OneThread(isa);
    std::vector<std::unique_ptr<PackedMatrix>> weights;
    std::vector<std::vector<float>> outs;
    std::vector<Projection> projections;
    for (const float threshold : {6.0f, 0.0f, 2.0f, 6.0f}) {
      auto matrix = MakeApart("int8", 20, kCols, kCols);
      matrix.constants->outlier_threshold = threshold;
      weights.push_back(MustPack(*backend, matrix.source));
      outs.emplace_back(kRows * 20, 0.5f);
    }
    const auto dense = MakeApart("nf4", 20, kCols, 32);
    weights.push_back(MustPack(*backend, dense.source));
    outs.emplace_back(kRows * 20, 0.5f);
    for (size_t i = 0; i < weights.size(); ++i) {
      projections.push_back(
          {weights[i].get(), nullptr, DenseTensor(outs[i].data(), DType::kF32, kRows, 20), true});
    }
    std::vector<float> input = x;
    backend->MatMul(DenseTensor(input.data(), DType::kF32, kRows, kCols), projections);
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(outs[i], Multiply(*backend, *weights[i], x, 0, kRows)) << i;
    }
    EXPECT_NE(outs[0], outs[1]);
    EXPECT_NE(outs[0], outs[2]);
  }
}

// An activation that is not finite spoils its own row and no other, with decomposition or without.
TEST(CpuRowInt8Test, ActivationsThatAreNotFiniteStayInTheirRow) {
  constexpr int64_t kCols = 70, kRows = 5;
  for (const float threshold : {6.0f, 0.0f}) {
    auto matrix = MakeApart("int8", 20, kCols, kCols);
    matrix.constants->outlier_threshold = threshold;
    for (const CpuIsa isa : SupportedIsas()) {
      const auto backend = OneThread(isa);
      const auto packed = MustPack(*backend, matrix.source);
      std::vector<float> x = MakeInput(kRows, kCols, 3);
      const std::vector<float> clean = Multiply(*backend, *packed, x, 0, kRows);
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        x[2 * kCols + 37] = bad;
        const std::vector<float> out = Multiply(*backend, *packed, x, 0, kRows);
        for (int64_t i = 0; i < kRows * 20; ++i) {
          if (i / 20 == 2) {
            EXPECT_FALSE(std::isfinite(out[i]));
          } else {
            EXPECT_EQ(out[i], clean[i]);
          }
        }
      }
    }
  }
}

TEST(CpuRowInt8Test, RefusesRowsWhoseSumsCouldOverflow) {
  const auto backend = OneThread(SupportedIsas().back());
  const auto most = MakeApart("int8", 1, 1 << 17, 1 << 17);
  EXPECT_TRUE(backend->Pack(most.source).ok());
  const auto too_many = MakeApart("int8", 1, (1 << 17) + 1, (1 << 17) + 1);
  const absl::Status status = backend->Pack(too_many.source).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("131073"), std::string_view::npos) << status;
}

// E4M3's NaN codes and scales that its fast layout cannot hold.
TEST(CpuFp8Test, NanCodesAndHugeScalesKeepTheirMeaning) {
  for (const CpuIsa isa : SupportedIsas()) {
    const auto backend = OneThread(isa);
    auto matrix = MakeApart("fp8", 17, 64, 64);
    std::fill_n(matrix.bytes.begin(), 64, std::byte{0});
    matrix.bytes[3] = std::byte{1};  // the smallest: 2^-9
    matrix.bytes[64 * 16 + 5] = std::byte{0xff};
    matrix.constants->scales[0] = 0x1p121f;
    const auto packed = MustPack(*backend, matrix.source);
    std::vector<float> x(64);
    x[3] = x[5] = 1;
    const std::vector<float> out = Multiply(*backend, *packed, x, 0, 1);
    EXPECT_EQ(out[0], 0x1p112f);
    EXPECT_TRUE(std::isnan(out[16]));
  }
}

TEST(CpuFormatsMemoryTest, CodesStayPacked) {
  auto backend = OneThread(SupportedIsas().back());
  const auto bits = [&](std::string_view name, int64_t block) {
    auto matrix = MakeApart(name, 64, 1024, block);
    matrix.source.of_layer = true;
    return 8.0 * static_cast<double>(MustPack(*backend, matrix.source)->bytes()) / (64 * 1024);
  };
  EXPECT_LE(bits("int8", 1024), 8.04);
  EXPECT_LE(bits("nf4", 64), 4.52);
  EXPECT_LE(bits("kbit3", 128), 4.27);
  EXPECT_LE(bits("fp8", 1024), 8.04);
  // Codebooks that are packed as their integers, and the tables behind the matrix.
  for (const CpuIsa isa : SupportedIsas()) {
    backend = OneThread(isa);
    EXPECT_NEAR(bits("kbit5", 1024), 8.2, 0.2) << Name(isa);
    EXPECT_NEAR(bits("kbit7", 1024), isa < CpuIsa::kAvx512 ? 13.2 : 8.2, 0.2) << Name(isa);
    EXPECT_NEAR(bits("kbit8", 1024), isa >= CpuIsa::kAvx512Vbmi ? 8.2 : 13.2, 0.2) << Name(isa);
  }
}

}  // namespace
}  // namespace treadle
