// Outlier features: planted ones are found, exactly those; and every number is that of a second,
// plain count over what the norms give.
#include "bench/quality/outlier_features.h"

#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <set>

#include "bench/quality/planted_outliers.h"
#include "kernels/forwarding_backend.h"
#include "tests/bench/quality_case.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr int64_t kWindow = 24;

OutlierReport Find(const Checkpoint& checkpoint, std::span<const int32_t> tokens, float threshold) {
  auto report = FindOutlierFeatures(
      checkpoint, ExactBackend(), tokens,
      {.threshold = threshold, .window = kWindow, .max_tokens = 1000, .threads = 2});
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *std::move(report) : OutlierReport();
}

std::set<int64_t> HiddenDimensions(const OutlierReport& report) {
  std::set<int64_t> dimensions;
  for (const OutlierFeature& feature : report.features) {
    EXPECT_EQ(feature.input, OutlierInput::kHidden);
    dimensions.insert(feature.dimension);
  }
  return dimensions;
}

// The features of each layer norm that differ, by its name.
std::map<std::string, std::set<int64_t>> PlantedFeatures(const Checkpoint& base,
                                                         const Checkpoint& planted) {
  std::map<std::string, std::set<int64_t>> features;
  for (const StoredTensor& tensor : planted.tensors()) {
    if (tensor.shape.size() != 1) continue;
    const StoredTensor& before = *base.Find(tensor.name);
    std::vector<float> old_values(tensor.shape[0]), values(tensor.shape[0]);
    before.format->decode(before.data, before.shape[0], old_values.data());
    tensor.format->decode(tensor.data, tensor.shape[0], values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != old_values[i]) features[tensor.name].insert(static_cast<int64_t>(i));
    }
  }
  return features;
}

// Outputs of norms: [call][row][dimension].
class NormOutputs : public ForwardingBackend {
 public:
  NormOutputs(std::unique_ptr<Backend> below, std::vector<std::vector<std::vector<float>>>& outputs)
      : ForwardingBackend(std::move(below)), outputs_(outputs) {}
  void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) override {
    ForwardingBackend::RmsNorm(x, weight, eps, accumulate, out);
    auto& rows = outputs_.emplace_back();
    for (int64_t row = 0; row < out.rows; ++row) {
      rows.emplace_back(out.Row<float>(row), out.Row<float>(row) + out.cols);
    }
  }

 private:
  std::vector<std::vector<std::vector<float>>>& outputs_;
};

TEST(OutlierFeatures, PlantedOnesAreFoundAndNoOthers) {
  const auto base = SmallCheckpoint("llama-grouped");
  const std::vector<int32_t> tokens = RandomTokens(3 * kWindow, base->config().vocab);
  // A threshold above everything in the model as it is.
  const OutlierReport all = Find(*base, tokens, 1e-6f);
  ASSERT_FALSE(all.features.empty());
  const float threshold = 1.01f * all.features[0].largest;
  EXPECT_TRUE(Find(*base, tokens, threshold).features.empty());

  const auto planted = PlantOutliers(*base, {.features = 3, .factor = 1024});
  ASSERT_TRUE(planted.ok()) << planted.status();
  std::set<int64_t> expected;
  for (const auto& [norm, features] : PlantedFeatures(*base, **planted)) {
    EXPECT_EQ(features.size(), 3u) << norm;
    expected.insert(features.begin(), features.end());
  }
  const OutlierReport found = Find(**planted, tokens, threshold);
  EXPECT_EQ(HiddenDimensions(found), expected);
  EXPECT_EQ(found.tokens, 3 * kWindow);
  for (const OutlierFeature& feature : found.features) {
    EXPECT_GT(feature.largest, threshold);
    EXPECT_TRUE(feature.systematic()) << feature.dimension;
  }
}

TEST(OutlierFeatures, NumbersAreThoseOfAPlainCount) {
  constexpr float kThreshold = 2;
  const auto checkpoint = SmallCheckpoint("llama-grouped");
  const int64_t layers = checkpoint->config().layers;
  const std::vector<int32_t> tokens = RandomTokens(kWindow + 7, checkpoint->config().vocab);
  std::vector<std::vector<std::vector<float>>> norms;
  {
    TeacherForcedModel::Options options = {.window = kWindow, .kv_dtype = DType::kF16};
    options.load.threads = 2;
    auto model = TeacherForcedModel::Create(
        *checkpoint, std::make_unique<NormOutputs>(ExactBackend(), norms), options);
    ASSERT_TRUE(model.ok()) << model.status();
    std::vector<float> hidden(kWindow * (*model)->hidden_size());
    for (const int64_t begin : {int64_t{0}, kWindow}) {
      const int64_t count = std::min<int64_t>(kWindow, std::ssize(tokens) - begin);
      (*model)->Forward(std::span(tokens).subspan(begin, count),
                        DenseTensor(hidden.data(), DType::kF32, count, (*model)->hidden_size()));
    }
  }
  ASSERT_EQ(std::ssize(norms), 2 * 2 * layers);

  const OutlierReport report = Find(*checkpoint, tokens, kThreshold);
  std::map<int64_t, OutlierFeature> hidden;
  for (const OutlierFeature& feature : report.features) {
    if (feature.input == OutlierInput::kHidden) hidden[feature.dimension] = feature;
  }
  EXPECT_FALSE(hidden.empty());
  for (int64_t i = 0; i < checkpoint->config().hidden; ++i) {
    std::set<int64_t> in_layers;
    double largest = 0, positions = 0, all = 0;
    for (size_t norm = 0; norm < norms.size(); ++norm) {
      for (const std::vector<float>& row : norms[norm]) {
        ++all;
        if (std::abs(row[i]) < kThreshold) continue;
        ++positions;
        in_layers.insert(static_cast<int64_t>(norm) / 2 % layers);
        largest = std::max<double>(largest, std::abs(row[i]));
      }
    }
    ASSERT_EQ(hidden.contains(i), positions > 0) << i;
    if (positions == 0) continue;
    EXPECT_EQ(hidden[i].largest, largest) << i;
    EXPECT_DOUBLE_EQ(hidden[i].positions, positions / all) << i;
    EXPECT_DOUBLE_EQ(hidden[i].layers,
                     static_cast<double>(in_layers.size()) / static_cast<double>(layers));
  }
}

TEST(OutlierFeatures, SystematicMeansOftenEnough) {
  EXPECT_TRUE((OutlierFeature{.layers = 0.25, .positions = 0.06}).systematic());
  EXPECT_FALSE((OutlierFeature{.layers = 0.24, .positions = 1}).systematic());
  EXPECT_FALSE((OutlierFeature{.layers = 1, .positions = 0.05}).systematic());
}

TEST(OutlierFeatures, EveryArchitectureHasThem) {
  const auto checkpoint = SmallCheckpoint("gpt2");
  const std::vector<int32_t> tokens = RandomTokens(kWindow, checkpoint->config().vocab);
  const OutlierReport report = Find(*checkpoint, tokens, 1e-6f);
  std::map<OutlierInput, std::set<int64_t>> dimensions;
  for (const OutlierFeature& feature : report.features) {
    dimensions[feature.input].insert(feature.dimension);
    EXPECT_EQ(feature.layers, 1) << feature.dimension;
  }
  EXPECT_EQ(std::ssize(dimensions[OutlierInput::kHidden]), checkpoint->config().hidden);
  EXPECT_EQ(std::ssize(dimensions[OutlierInput::kAttentionOutput]), checkpoint->config().hidden);
  EXPECT_GT(report.share, 0.99);
  EXPECT_THAT(ToTable(report), HasSubstr("more (all of them: --json)"));
  EXPECT_EQ(ToJson(report)["features"].size(), report.features.size());
}

TEST(OutlierFeatures, NeedsAToken) {
  const auto checkpoint = SmallCheckpoint("llama-grouped");
  EXPECT_TRUE(
      absl::IsInvalidArgument(FindOutlierFeatures(*checkpoint, ExactBackend(), {}, {}).status()));
}

}  // namespace
}  // namespace treadle
