#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/quality/accuracy_bench.h"
#include "tests/bench/quality_case.h"

namespace treadle {
namespace {

constexpr int64_t kWindow = 24;

class Accuracy : public testing::Test {
 protected:
  Accuracy() : checkpoint_(SmallCheckpoint("llama-grouped")) {
    tokens_ = RandomTokens(3 * kWindow + 5, checkpoint_->config().vocab);
    auto reference = AccuracyReference::Create(*checkpoint_, tokens_,
                                               {.window = kWindow, .threads = 2}, nullptr);
    EXPECT_TRUE(reference.ok()) << reference.status();
    reference_ = *std::move(reference);
  }

  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<int32_t> tokens_;
  std::unique_ptr<AccuracyReference> reference_;
};

TEST_F(Accuracy, AModelDoesNotDivergeFromItself) {
  const auto same = ExactModel(*checkpoint_, kWindow);
  const AccuracyReport report = reference_->Compare(*same, nullptr);
  EXPECT_EQ(report.positions, 3 * kWindow);
  EXPECT_EQ(report.mean_kl, 0);
  EXPECT_EQ(report.max_kl, 0);
  EXPECT_EQ(report.argmax_equal, 1);
  EXPECT_EQ(report.perplexity, report.perplexity_reference);
}

TEST_F(Accuracy, ChunksChangeNoBit) {
  TeacherForcedModel::Options options = {.window = kWindow, .chunk = 7, .kv_dtype = DType::kF32};
  options.load.threads = 2;
  const auto chunked = TeacherForcedModel::Create(*checkpoint_, ExactBackend(), options);
  ASSERT_TRUE(chunked.ok()) << chunked.status();
  const AccuracyReport report = reference_->Compare(**chunked, nullptr);
  EXPECT_EQ(report.mean_kl, 0);
  EXPECT_EQ(report.max_kl, 0);
}

// The definition, in double, from the logits of both models.
TEST_F(Accuracy, DivergenceIsTheDefinition) {
  const auto exact = ExactModel(*checkpoint_, kWindow);
  const auto other = ExactModel(*checkpoint_, kWindow, "nf4");
  const AccuracyReport report = reference_->Compare(*other, nullptr);

  const int64_t hidden = exact->hidden_size(), vocab = exact->vocab();
  std::vector<float> a(kWindow * hidden), b(kWindow * hidden);
  const Tensor hidden_a = DenseTensor(a.data(), DType::kF32, kWindow, hidden);
  const Tensor hidden_b = DenseTensor(b.data(), DType::kF32, kWindow, hidden);
  double kl = 0, loss = 0;
  for (int64_t w = 0; w < 3; ++w) {
    const auto text = std::span<const int32_t>(tokens_).subspan(w * kWindow, kWindow);
    exact->Forward(text, hidden_a);
    other->Forward(text, hidden_b);
    const Tensor p = exact->Head(hidden_a), q = other->Head(hidden_b);
    for (int64_t row = 0; row < kWindow; ++row) {
      double sum_p = 0, sum_q = 0;
      for (int64_t i = 0; i < vocab; ++i) {
        sum_p += std::exp(static_cast<double>(p.Row<float>(row)[i]));
        sum_q += std::exp(static_cast<double>(q.Row<float>(row)[i]));
      }
      for (int64_t i = 0; i < vocab; ++i) {
        const double log_p = p.Row<float>(row)[i] - std::log(sum_p);
        const double log_q = q.Row<float>(row)[i] - std::log(sum_q);
        kl += std::exp(log_p) * (log_p - log_q);
        if (row + 1 < kWindow && i == text[row + 1]) loss -= log_q;
      }
    }
  }
  kl /= 3 * kWindow;
  EXPECT_GT(kl, 1e-3);  // or the comparison below says nothing
  // Exponentials are rounded to 24 bits.
  EXPECT_NEAR(report.mean_kl, kl, 1e-5 * kl + 1e-6);
  EXPECT_NEAR(report.perplexity, std::exp(loss / (3 * (kWindow - 1))), 1e-5 * report.perplexity);
  EXPECT_GE(report.max_kl, report.p99_kl);
  EXPECT_GT(report.kl_error, 0);
}

TEST_F(Accuracy, FewerBitsDivergeMore) {
  double last = 0;
  for (const char* weights : {"kbit-int8:32", "kbit-int6:32", "kbit-int4:32", "kbit-int3:32"}) {
    const auto variant = ExactModel(*checkpoint_, kWindow, weights);
    const double kl = reference_->Compare(*variant, nullptr).mean_kl;
    EXPECT_GT(kl, last) << weights;
    last = kl;
  }
}

TEST_F(Accuracy, RefusesTextsWithoutAWholeWindow) {
  for (const int64_t window : {int64_t{1}, int64_t{97}, kWindow}) {
    const auto text = std::span<const int32_t>(tokens_).first(kWindow - 1);
    const auto reference =
        AccuracyReference::Create(*checkpoint_, text, {.window = window, .threads = 2}, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(reference.status())) << window;
    EXPECT_THAT(std::string(reference.status().message()),
                testing::HasSubstr("expected 2 to 96 and at least one whole window"));
  }
}

TEST_F(Accuracy, BitsIncludeConstants) {
  const auto bits = [&](const std::string& weights) {
    const auto plan = WeightPlan::Parse(weights);
    EXPECT_TRUE(plan.ok()) << plan.status();
    const auto counted = CountWeightBits(*checkpoint_, *plan);
    EXPECT_TRUE(counted.ok()) << counted.status();
    return *counted;
  };
  const WeightBits stored = bits("");
  EXPECT_EQ(stored.converted, 0);
  EXPECT_EQ(stored.PerParameter(), 32);
  int64_t matrices = 0, scales = 0, int8_scales = 0;
  for (const StoredTensor& tensor : checkpoint_->tensors()) {
    if (tensor.shape.size() != 2 || RoleOf(tensor.name) != MatrixRole::kLayer) continue;
    const int64_t count = tensor.shape[0] * tensor.shape[1];
    matrices += count;
    scales += (count + 63) / 64;
    int8_scales += tensor.shape[0];
  }
  const WeightBits kbit = bits("kbit-int4:64");
  EXPECT_EQ(kbit.converted, matrices);
  EXPECT_NEAR(kbit.converted_bits, 4.0 * matrices + 16.0 * scales, 1e-6 * kbit.converted_bits);
  const WeightBits int8 = bits("int8");
  EXPECT_NEAR(int8.converted_bits, 8.0 * matrices + 32.0 * int8_scales, 1e-6 * int8.converted_bits);
  EXPECT_EQ(int8.kept, stored.kept - matrices);
  EXPECT_EQ(int8.kept_bits, 32.0 * static_cast<double>(int8.kept));
}

}  // namespace
}  // namespace treadle
