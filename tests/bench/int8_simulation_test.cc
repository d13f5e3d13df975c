#include "bench/quality/int8_simulation.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "bench/quality/planted_outliers.h"
#include "tests/bench/quality_case.h"

namespace treadle {
namespace {

std::vector<float> Normal(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(RoundToInt8, AbsmaxIsWithinHalfAStepOnASymmetricGrid) {
  std::vector<float> values = Normal(300, 1);
  const std::vector<float> before = values;
  RoundToInt8(/*zero_point=*/false, /*per_row=*/true, values, 3, 100);
  for (int64_t row = 0; row < 3; ++row) {
    float absmax = 0;
    for (int64_t i = 0; i < 100; ++i) {
      absmax = std::max(absmax, std::abs(before[row * 100 + i]));
    }
    const float step = absmax / 127;
    for (int64_t i = row * 100; i < (row + 1) * 100; ++i) {
      EXPECT_LE(std::abs(values[i] - before[i]), step / 2 * (1 + 1e-5f));
      EXPECT_NEAR(values[i] / step, std::nearbyint(values[i] / step), 1e-4);
    }
  }
}

TEST(RoundToInt8, ZeroPointSpendsItsLevelsOnTheRangeThatIsThere) {
  std::vector<float> values = Normal(1000, 2);
  for (float& value : values) value = std::abs(value);  // one-sided
  const std::vector<float> before = values;
  const float step = *std::max_element(before.begin(), before.end()) / 254;
  RoundToInt8(/*zero_point=*/true, /*per_row=*/false, values, 10, 100);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::abs(values[i] - before[i]), step / 2 * (1 + 1e-5f));
  }
  std::vector<float> mixed = {-1, 0, 0.3f, 10};
  RoundToInt8(true, false, mixed, 1, 4);
  EXPECT_EQ(mixed[1], 0);
  EXPECT_NEAR(mixed[3], 10, 11.0 / 254);
}

TEST(RoundToInt8, ZerosStayZeros) {
  for (const bool zero_point : {false, true}) {
    std::vector<float> zeros(8);
    RoundToInt8(zero_point, true, zeros, 2, 4);
    EXPECT_THAT(zeros, testing::Each(0.0f));
  }
}

// y = x W^T through a simulated variant. x: [rows, k], w: [n, k]
std::vector<float> Multiply(const Int8Variant& variant, std::span<const float> x,
                            std::span<const float> w, int64_t rows, int64_t n, int64_t k) {
  const auto backend = SimulateInt8(ExactBackend(), variant, /*untouched_rows=*/-1);
  const auto packed = backend->Pack({.format = FindWeightFormat("f32"),
                                     .data = reinterpret_cast<const std::byte*>(w.data()),
                                     .n = n,
                                     .k = k});
  EXPECT_TRUE(packed.ok()) << packed.status();
  std::vector<float> input(x.begin(), x.end()), bias(static_cast<size_t>(n), 0.5f);
  std::vector<float> out(static_cast<size_t>(rows * n));
  const Projection projection = {packed->get(), bias.data(),
                                 DenseTensor(out.data(), DType::kF32, rows, n)};
  backend->MatMul(DenseTensor(input.data(), DType::kF32, rows, k), {&projection, 1});
  return out;
}

// sum of |y - exact| over sum of |exact|, bias apart.
double RelativeError(std::span<const float> y, std::span<const float> x, std::span<const float> w,
                     int64_t rows, int64_t n, int64_t k) {
  double error = 0, size = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      double exact = 0;
      for (int64_t i = 0; i < k; ++i) {
        exact += static_cast<double>(x[row * k + i]) * w[col * k + i];
      }
      error += std::abs(y[row * n + col] - 0.5 - exact);
      size += std::abs(exact);
    }
  }
  return error / size;
}

constexpr int64_t kRows = 9, kN = 40, kK = 96;

TEST(SimulatedInt8, DecompositionRepairsAnOutlierFeature) {
  const std::vector<float> w = Normal(kN * kK, 3);
  std::vector<float> x = Normal(kRows * kK, 4);
  const auto error = [&](const Int8Variant& variant) {
    return RelativeError(Multiply(variant, x, w, kRows, kN, kK), x, w, kRows, kN, kK);
  };
  const Int8Variant plain = {.activation_rows = true, .weight_rows = true};
  Int8Variant decomposed = plain;
  decomposed.decomposed = true;
  const double without_outliers = error(plain);
  EXPECT_NEAR(without_outliers, error(decomposed), 1e-12);  // nothing reaches the threshold
  EXPECT_LT(without_outliers, 0.02);
  for (int64_t row = 0; row < kRows; ++row) x[row * kK + 17] = row % 2 == 0 ? 300.f : 1.f;
  // The outlier's own product is large and multiplied well; it is what it does to the others.
  EXPECT_GT(error(plain), error(decomposed) * 2);
  EXPECT_LT(error(decomposed), without_outliers);
}

TEST(SimulatedInt8, OutlierColumnsAreExactWithWideWeights) {
  const std::vector<float> w = Normal(kN * kK, 5), x = Normal(kRows * kK, 6);
  Int8Variant all = {.decomposed = true, .threshold = 0};  // every column is an outlier
  EXPECT_LT(RelativeError(Multiply(all, x, w, kRows, kN, kK), x, w, kRows, kN, kK), 1e-6);
  all.outlier_weights_int8 = true;
  EXPECT_GT(RelativeError(Multiply(all, x, w, kRows, kN, kK), x, w, kRows, kN, kK), 1e-3);
}

TEST(SimulatedInt8, UntouchedMatricesStayExact) {
  const std::vector<float> w = Normal(kN * kK, 7), x = Normal(kRows * kK, 8);
  const auto plain = ExactBackend();
  const auto simulated = SimulateInt8(ExactBackend(), Int8Variants()[0], kN);
  std::vector<std::vector<float>> results;
  for (Backend* backend : {plain.get(), simulated.get()}) {
    const auto packed = backend->Pack({.format = FindWeightFormat("f32"),
                                       .data = reinterpret_cast<const std::byte*>(w.data()),
                                       .n = kN,
                                       .k = kK});
    ASSERT_TRUE(packed.ok()) << packed.status();
    std::vector<float> input = x, out(kRows * kN);
    const Projection projection = {packed->get(), nullptr,
                                   DenseTensor(out.data(), DType::kF32, kRows, kN)};
    backend->MatMul(DenseTensor(input.data(), DType::kF32, kRows, kK), {&projection, 1});
    results.push_back(out);
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(PlantedOutliers, ChangeNoBitOfTheExactModel) {
  constexpr int64_t kWindow = 24;
  const auto checkpoint = SmallCheckpoint("llama-grouped");
  const auto planted = PlantOutliers(*checkpoint, {.features = 3, .factor = 32});
  ASSERT_TRUE(planted.ok()) << planted.status();
  int changed = 0;
  for (const StoredTensor& tensor : (*planted)->tensors()) {
    changed += tensor.data != checkpoint->Find(tensor.name)->data;
  }
  EXPECT_EQ(changed, 7 * checkpoint->config().layers);  // 2 norms, q, k, v, gate, up
  const std::vector<int32_t> tokens = RandomTokens(kWindow, checkpoint->config().vocab);
  std::vector<std::vector<float>> results;
  // The last twice: loading drops pages, and what was planted has to survive it.
  for (const Checkpoint* each : {checkpoint.get(), planted->get(), planted->get()}) {
    const auto model = ExactModel(*each, kWindow);
    std::vector<float> hidden(static_cast<size_t>(kWindow * model->hidden_size()));
    model->Forward(tokens, DenseTensor(hidden.data(), DType::kF32, kWindow, model->hidden_size()));
    results.push_back(hidden);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(PlantedOutliers, RefusesWhatCannotBe) {
  const auto llama = SmallCheckpoint("llama-grouped"), gpt2 = SmallCheckpoint("gpt2");
  EXPECT_TRUE(absl::IsUnimplemented(PlantOutliers(*gpt2, {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlantOutliers(*llama, {.factor = 3}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlantOutliers(*llama, {.features = 31}).status()));
}

}  // namespace
}  // namespace treadle
