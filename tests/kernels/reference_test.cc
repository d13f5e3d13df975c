// The reference ops against PyTorch in float64 (tests/oracles/make_op_oracles.py). Its sums are in
// double, so results differ by their one rounding to float, and by the inputs' where ops are
// chained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/reference/reference_backend.h"
#include "tests/support/oracles.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using Vector = std::vector<float>;

Tensor Rows(Vector& values, int64_t cols) {
  return DenseTensor(values.data(), DType::kF32, static_cast<int64_t>(values.size()) / cols, cols);
}

void ExpectNear(const Vector& found, const Vector& expected, double relative, double absolute) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], relative * std::fabs(expected[i]) + absolute) << i;
  }
}

constexpr double kOneRounding = 0x1p-23;  // the oracle's values are rounded to float, too

class ReferenceFeatures : public testing::Test {
 protected:
  ReferenceFeatures() : oracle_(ReadOracles("op_oracles.json")["features"]) {}
  Vector Get(const char* name) { return Floats(oracle_[name]); }
  void Expect(const Vector& found, const char* name) {
    ExpectNear(found, Get(name), kOneRounding, 1e-9);
  }

  const nlohmann::json oracle_;
  std::unique_ptr<Backend> backend_ = CreateReferenceBackend();
  Vector x_ = Get("x");  // [3, 40]
  Vector out_ = Vector(120);
};

TEST_F(ReferenceFeatures, Norms) {
  const Vector weight = Get("weight");
  const Vector bias = Get("bias");
  backend_->RmsNorm(Rows(x_, 40), weight.data(), 1e-5f, /*accumulate=*/false, Rows(out_, 40));
  Expect(out_, "rms_norm");
  backend_->LayerNorm(Rows(x_, 40), weight.data(), bias.data(), 1e-5f, Rows(out_, 40));
  Expect(out_, "layer_norm");
}

TEST_F(ReferenceFeatures, Activations) {
  Vector up = Get("up");
  backend_->SwiGlu(Rows(x_, 40), Rows(up, 40), Rows(out_, 40));
  Expect(out_, "swiglu");
  backend_->Gelu(Rows(x_, 40), Rows(out_, 40));
  Expect(out_, "gelu");
  backend_->GeluErf(Rows(x_, 40), Rows(out_, 40));
  Expect(out_, "gelu_erf");
  backend_->Relu(Rows(x_, 40), Rows(out_, 40));
  Expect(out_, "relu");
  backend_->SoftCap(Rows(x_, 40), 1.5f, Rows(out_, 40));
  Expect(out_, "soft_cap");
  backend_->Xielu(Rows(x_, 40), {.positive = 0.75f, .negative = 1.25f}, Rows(out_, 40));
  Expect(out_, "xielu");
}

TEST_F(ReferenceFeatures, MatMulWithBiasResidualAndRowOrder) {
  const Vector matrix = Get("matrix");  // [11, 40]
  const Vector bias = Get("bias");
  const WeightFormat* f32 = FindWeightFormat("f32");
  const auto* data = reinterpret_cast<const std::byte*>(matrix.data());
  const auto packed =
      backend_->Pack({.format = f32, .data = data, .n = 11, .k = 40, .row_order = {}});
  ASSERT_TRUE(packed.ok());
  Vector out(33);
  const Projection plain[] = {{packed->get(), bias.data(), Rows(out, 11), false}};
  backend_->MatMul(Rows(x_, 40), plain);
  Expect(out, "linear");

  Vector twice = out;
  const Projection adding[] = {{packed->get(), bias.data(), Rows(twice, 11), true}};
  backend_->MatMul(Rows(x_, 40), adding);
  for (size_t i = 0; i < out.size(); ++i)
    EXPECT_NEAR(twice[i], 2 * out[i], 1e-6 * std::fabs(out[i]));

  std::vector<int32_t> reversed(11);
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  const auto turned =
      backend_->Pack({.format = f32, .data = data, .n = 11, .k = 40, .row_order = reversed});
  ASSERT_TRUE(turned.ok());
  Vector backward(33);
  Vector forward(33);
  const Projection both[] = {{turned->get(), nullptr, Rows(backward, 11), false},
                             {packed->get(), nullptr, Rows(forward, 11), false}};
  backend_->MatMul(Rows(x_, 40), both);
  for (int i = 0; i < 33; ++i) EXPECT_EQ(backward[i], forward[i / 11 * 11 + 10 - i % 11]);
}

TEST_F(ReferenceFeatures, TransposedSource) {
  const Vector matrix = Get("matrix");  // read as [40, 11]: k = 40 rows of n = 11
  const auto* data = reinterpret_cast<const std::byte*>(matrix.data());
  const auto packed = backend_->Pack({.format = FindWeightFormat("f32"),
                                      .data = data,
                                      .n = 11,
                                      .k = 40,
                                      .row_order = {},
                                      .transposed = true});
  ASSERT_TRUE(packed.ok());
  Vector out(33);
  const Projection projection[] = {{packed->get(), nullptr, Rows(out, 11), false}};
  backend_->MatMul(Rows(x_, 40), projection);
  for (int row = 0; row < 3; ++row) {
    for (int n = 0; n < 11; ++n) {
      double sum = 0;
      for (int k = 0; k < 40; ++k) sum += double{x_[row * 40 + k]} * matrix[k * 11 + n];
      EXPECT_FLOAT_EQ(out[row * 11 + n], static_cast<float>(sum));
    }
  }
}

TEST(ReferencePack, RefusesBadSources) {
  const auto backend = CreateReferenceBackend();
  std::vector<std::byte> bytes(1000);
  const WeightFormat* q4_0 = FindWeightFormat("q4_0");
  const auto message = [&](MatrixSource source) {
    source.data = bytes.data();
    return std::string(backend->Pack(source).status().message());
  };
  EXPECT_THAT(message({.format = q4_0, .n = 2, .k = 40, .row_order = {}}),
              HasSubstr("multiples of 32"));
  EXPECT_THAT(message({.format = q4_0, .n = 0, .k = 32, .row_order = {}}), HasSubstr("positive"));
  EXPECT_THAT(message({.format = q4_0, .n = 2, .k = 32, .row_order = {}, .transposed = true}),
              HasSubstr("dense"));
  const std::vector<int32_t> order = {0, 2};
  EXPECT_THAT(message({.format = q4_0, .n = 2, .k = 32, .row_order = order}), HasSubstr("row 2"));
  EXPECT_THAT(message({.format = q4_0, .n = 3, .k = 32, .row_order = order}), HasSubstr("2 rows"));
}

TEST(RoundedActivations, OfInt8AreHalfToEvenWithin127) {
  std::vector<float> x(32);
  x[0] = 127;  // scale 1: values are their own codes
  x[1] = 0.5f, x[2] = 1.5f, x[3] = 2.5f, x[4] = -0.5f, x[5] = -1.5f, x[6] = -127, x[7] = 99.4f;
  x.resize(64);  // a block of zeros
  std::vector<double> rounded = RoundedActivations(x, ComputeMode::kInt8);
  EXPECT_THAT(std::vector<double>(rounded.begin(), rounded.begin() + 8),
              testing::ElementsAre(127, 0, 2, 2, 0, -2, -127, 99));
  EXPECT_THAT(std::vector<double>(rounded.begin() + 32, rounded.end()), testing::Each(0));
  x.assign(32, 1e-38f);
  EXPECT_THAT(RoundedActivations(x, ComputeMode::kInt8), testing::Each(0));
}

TEST(RoundedActivations, OfAnOrderHaveItsBlocks) {
  std::vector<float> x, sorted;
  std::vector<int32_t> order;
  for (int32_t i = 0; i < 64; ++i) {
    x.push_back(i % 2 == 0 ? 1.0f + static_cast<float>(i) : 0.01f * static_cast<float>(i));
    order.push_back(i < 32 ? 2 * i : 2 * i - 63);  // all even ones, then all odd ones
  }
  for (const int32_t from : order) sorted.push_back(x[from]);
  const std::vector<double> rounded = RoundedActivations(x, ComputeMode::kInt8, order);
  const std::vector<double> expected = RoundedActivations(sorted, ComputeMode::kInt8);
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(rounded[order[i]], expected[i]);
  EXPECT_NE(rounded, RoundedActivations(x, ComputeMode::kInt8));
}

TEST(RoundedActivations, OfInt16Have128TimesAsManySteps) {
  std::vector<float> x(32);
  x[0] = -127;  // scale 1/128
  x[1] = 127, x[2] = 0.5f, x[3] = 1.5f / 128, x[4] = 2.5f / 128, x[5] = -0.5f / 128;
  std::vector<double> rounded = RoundedActivations(x, ComputeMode::kInt16);
  EXPECT_THAT(std::vector<double>(rounded.begin(), rounded.begin() + 6),
              testing::ElementsAre(-127, 127, 0.5, 2.0 / 128, 2.0 / 128, 0));
  EXPECT_EQ(RoundedActivations(x, ComputeMode::kInt12)[3], 0);
}

// 0.26 of 16256 steps to 1 is 4226.56, of 16256 to 127 it is 33.28.
TEST(RoundedActivations, OfInt16ShareAScaleInSpans) {
  const double fine = 4227.0 / 16256, coarse = 33.0 * 127 / 16256;
  for (const auto& [size, last] : {std::pair(576, 256), {608, 512}, {320, 0}}) {
    std::vector<float> x(static_cast<size_t>(size), 0.26f);
    x[0] = 1;
    x.back() = 127;  // spans the last `size - last`
    const std::vector<double> rounded = RoundedActivations(x, ComputeMode::kInt16);
    EXPECT_NEAR(rounded[1], last > 0 ? fine : coarse, 1e-7) << size;
    EXPECT_NEAR(rounded[static_cast<size_t>(last) + 1], coarse, 1e-6) << size;
  }
}

// LLM.int8() by hand: a matrix of integers, and activations that are their own codes. Column 1 is
// an outlier of row 0 only; row 1's 5.0 stays below the threshold.
class ReferenceRowInt8 : public testing::Test {
 protected:
  // y[row][n], with scales of 0.5 and 1 for the two output features.
  Vector Multiply(Vector x, float threshold, OutlierRule rule) {
    const int8_t codes[8] = {1, 2, 3, -4, -127, 10, 0, 1};  // [2, 4]
    MatrixConstants constants;
    constants.scales = {0.5f, 1.0f};
    constants.scale_block = 4;
    constants.outlier_threshold = threshold;
    constants.outlier_rule = rule;
    const auto backend = CreateReferenceBackend(ComputeMode::kInt8);
    const auto packed = backend->Pack({.format = FindWeightFormat("int8"),
                                       .data = reinterpret_cast<const std::byte*>(codes),
                                       .n = 2,
                                       .k = 4,
                                       .constants = &constants});
    TREADLE_CHECK(packed.ok());
    Vector out(x.size() / 2);
    const Projection projection[] = {{packed->get(), nullptr, Rows(out, 2), false}};
    backend->MatMul(Rows(x, 4), projection);
    return out;
  }
  // Row 0: scale 1/127 * 1.27 = 0.01 without the outlier.
  const Vector x_ = {1.27f, 8.0f, 0.004f, 0.5f, 1.27f, 5.0f, 0.0f, -0.5f};
};

TEST_F(ReferenceRowInt8, OutliersOfARowAreItsOwn) {
  const Vector y = Multiply(x_, 6.0f, OutlierRule::kPerRow);
  // 0.004 rounds to 0 steps of 0.01; 8.0 is multiplied as it is.
  EXPECT_FLOAT_EQ(y[0], 0.5f * (1 * 1.27f + 2 * 8.0f + 0 - 4 * 0.5f));
  EXPECT_FLOAT_EQ(y[1], -127 * 1.27f + 10 * 8.0f + 0.5f);
  // Row 1: steps of 5 / 127. 1.27 is 32 of them, 0.5 is 13 (12.7).
  const float step = 5.0f / 127.0f;
  EXPECT_FLOAT_EQ(y[2], 0.5f * (32 * step + 2 * 5.0f + 4 * 13 * step));
  EXPECT_FLOAT_EQ(y[3], -127 * 32 * step + 10 * 5.0f - 13 * step);
}

TEST_F(ReferenceRowInt8, OutliersOfACallAreColumns) {
  const Vector y = Multiply(x_, 6.0f, OutlierRule::kPerCall);
  const Vector per_row = Multiply(x_, 6.0f, OutlierRule::kPerRow);
  EXPECT_EQ(y[0], per_row[0]);
  EXPECT_EQ(y[1], per_row[1]);
  // Row 1 without column 1 has steps of 0.01.
  EXPECT_FLOAT_EQ(y[2], 0.5f * (1.27f + 2 * 5.0f + 4 * 0.5f));
  EXPECT_FLOAT_EQ(y[3], -127 * 1.27f + 10 * 5.0f - 0.5f);
}

TEST_F(ReferenceRowInt8, ThresholdZeroTakesNothingOut) {
  const Vector y = Multiply(x_, 0.0f, OutlierRule::kPerRow);
  const float step = 8.0f / 127.0f;  // 1.27: 20 steps (20.2), 0.5: 8 (7.9)
  EXPECT_FLOAT_EQ(y[0], 0.5f * (20 * step + 2 * 8.0f - 4 * 8 * step));
}

TEST_F(ReferenceRowInt8, ThresholdIsInclusiveAndZeroRowsAreZero) {
  const Vector y = Multiply({0, 6.0f, 0, 0, 0, 0, 0, 0}, 6.0f, OutlierRule::kPerRow);
  EXPECT_THAT(y, testing::ElementsAre(6.0f, 60.0f, 0.0f, 0.0f));
  // Beside it the largest element is 1: in steps of 6 / 127 that would be 21 of them, or 0.992.
  const Vector beside = Multiply({1, 6.0f, 0, 0, 1, -6.0f, 0, 0}, 6.0f, OutlierRule::kPerRow);
  EXPECT_FLOAT_EQ(beside[0], 0.5f * (1 + 2 * 6.0f));
  EXPECT_FLOAT_EQ(beside[2], 0.5f * (1 - 2 * 6.0f));
  const float below = std::nextafter(6.0f, 0.0f);
  const Vector under = Multiply({1, below, 0, 0, 0, 0, 0, 0}, 6.0f, OutlierRule::kPerRow);
  EXPECT_FLOAT_EQ(under[0], 0.5f * (21 * below / 127 + 2 * below));
}

TEST_F(ReferenceRowInt8, NanSpoilsItsOwnRowOnly) {
  Vector x = x_;
  x[0] = NAN;
  const Vector y = Multiply(x, 6.0f, OutlierRule::kPerRow);
  const Vector clean = Multiply(x_, 6.0f, OutlierRule::kPerRow);
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_EQ(y[2], clean[2]);
  EXPECT_EQ(y[3], clean[3]);
}

// A prompt in two chunks over scattered pages, next to rows that belong to nobody.
class ReferenceAttention : public testing::TestWithParam<int64_t> {};

TEST_P(ReferenceAttention, MatchesRotaryAndCausalAttention) {
  const auto oracle = ReadOracles("op_oracles.json")["attention"];
  const int64_t heads = oracle["heads"], kv_heads = oracle["kv_heads"], dim = oracle["head_dim"];
  const int64_t rows = oracle["rows"];
  Vector q = Floats(oracle["q"]);
  Vector k = Floats(oracle["k"]);
  Vector v = Floats(oracle["v"]);
  const Vector cos = Floats(oracle["cos"]);
  const Vector sin = Floats(oracle["sin"]);
  const RotaryTable rotary = {cos.data(), sin.data(), dim / 2, rows};

  const auto backend = CreateReferenceBackend();
  KvView kv;
  kv.layout = {kv_heads, dim, GetParam(), 8, DType::kF32};
  const auto pages = backend->Allocate(static_cast<size_t>(8 * kv.layout.PageBytes()));
  ASSERT_TRUE(pages.ok());
  kv.pages = pages->data();
  std::memset(kv.pages, 0xff, pages->bytes());  // NaN
  const std::vector<int32_t> ids = {6, 1, 7, 0, 4};
  const Vector q_turned = Floats(oracle["q_turned"]);
  const Vector expected = Floats(oracle["out"]);
  Vector out(q.size());
  const auto part = [&](Vector& values, int64_t begin, int64_t count) {
    return Rows(values, static_cast<int64_t>(values.size()) / rows).Rows(begin, count);
  };
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 45}, {45, 25}}) {
    const SequenceSpan span = {0, static_cast<int32_t>(count), static_cast<int32_t>(begin),
                               ids.data()};
    kv.sequences = {&span, 1};
    backend->RotateAndStoreKv(part(q, begin, count), part(k, begin, count), part(v, begin, count),
                              &rotary, kv);
    backend->Attention(part(q, begin, count), kv, 1 / std::sqrt(static_cast<float>(dim)),
                       part(out, begin, count));
  }
  // The oracle's table is float32's, as ours.
  ExpectNear(q, q_turned, kOneRounding, 1e-7);
  // Rotated q and k are rounded to float; scores are sums of 16 products below 16, over 4.
  ExpectNear(out, expected, kOneRounding, 0x1p-18);
  EXPECT_EQ(heads * dim, static_cast<int64_t>(q.size()) / rows);
}

INSTANTIATE_TEST_SUITE_P(PageSizes, ReferenceAttention, testing::Values(16, 32, 64));

TEST(ReferenceBackend, CopiesPagesInOrder) {
  const auto backend = CreateReferenceBackend();
  const KvLayout layout = {1, 1, 16, 3, DType::kF32};
  Vector pages(3 * 32);
  std::iota(pages.begin(), pages.end(), 0.0f);
  const PageCopy copies[] = {{0, 1}, {1, 2}};
  backend->CopyPages(layout, reinterpret_cast<std::byte*>(pages.data()), copies);
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(pages[32 + i], i);
    EXPECT_EQ(pages[64 + i], i);
  }
}

}  // namespace
}  // namespace treadle
