// The report of `inspect --placement` on a tiny model.
#include "server/cli/models/placement_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

class PlacementReportTest : public ScratchCheckpoint {
 protected:
  void SetUp() override {
    TinyModelOptions tiny;
    tiny.format = "q8_0";
    tiny.layers = 6;
    tiny.hidden = 128;
    tiny.ffn_hidden = 256;
    const auto path = WriteTinyLlamaGguf(folder_.path(), tiny);
    ASSERT_TRUE(path.ok()) << path.status();
    auto opened = Checkpoint::Open(*path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    checkpoint_ = std::move(*opened);
  }

  std::string Report(const PlacementRequest& request, bool json) const {
    const auto report = PlacementReport(*checkpoint_, request, json);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.value_or("");
  }
  std::string Refusal(const PlacementRequest& request) const {
    const auto report = PlacementReport(*checkpoint_, request, false);
    EXPECT_FALSE(report.ok()) << *report;
    return std::string(report.status().message());
  }

  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(PlacementReportTest, JsonHasEveryStage) {
  constexpr int64_t kDevice = 8 << 20;
  for (const int ranks : {1, 2}) {
    const PlacementRequest request{.pipeline_parallel = 3,
                                   .tensor_parallel = ranks,
                                   .device_memory = kDevice,
                                   .threads = 1,
                                   .batch_tokens = 32};
    const auto json = nlohmann::json::parse(Report(request, true));
    ASSERT_EQ(json["stages"].size(), 3u);
    int64_t layer = 0, tightest = INT64_MAX;
    double slowest = 0, sum = 0;
    for (const auto& stage : json["stages"]) {
      EXPECT_EQ(stage["first_layer"], layer);
      layer = stage["end_layer"];
      // K and V of each layer, heads of 32, two bytes each.
      EXPECT_EQ(stage["kv_bytes_per_token"],
                (layer - stage["first_layer"].get<int64_t>()) * 2 * (2 / ranks) * 32 * 2);
      const int64_t taken =
          stage["weight_bytes"].get<int64_t>() + stage["activation_bytes"].get<int64_t>();
      EXPECT_EQ(stage["kv_bytes"], kDevice - taken);
      EXPECT_EQ(stage["kv_tokens"].get<int64_t>() % 32, 0);
      tightest = std::min(tightest, stage["kv_tokens"].get<int64_t>());
      slowest = std::max(slowest, stage["seconds"].get<double>());
      sum += stage["seconds"].get<double>();
    }
    EXPECT_EQ(layer, 6);
    EXPECT_EQ(json["kv_tokens"], tightest);
    EXPECT_DOUBLE_EQ(json["balance"].get<double>(), sum / (3 * slowest));
  }
}

TEST_F(PlacementReportTest, TextSaysWhatIsWhere) {
  const std::string text = Report({.pipeline_parallel = 2, .threads = 1}, false);
  EXPECT_THAT(text, HasSubstr("2 stages of 1 rank;"));
  EXPECT_THAT(text, HasSubstr("0-"));
  EXPECT_THAT(text, HasSubstr("-5 "));
  EXPECT_THAT(text, HasSubstr("balance "));
  EXPECT_EQ(text.find("K/V room"), std::string::npos);
  EXPECT_THAT(Report({.device_memory = 64 << 20, .threads = 1}, false), HasSubstr("K/V room"));
}

TEST_F(PlacementReportTest, GridsThatCannotBeAreRefused) {
  EXPECT_THAT(Refusal({.pipeline_parallel = 7}), HasSubstr("--pipeline-parallel is 7, expected 1 "
                                                           "to 6"));
  EXPECT_THAT(Refusal({.pipeline_parallel = 0}), HasSubstr("--pipeline-parallel is 0"));
  // Four heads.
  EXPECT_THAT(Refusal({.tensor_parallel = 3}), HasSubstr("3"));
  EXPECT_FALSE(PlacementReport(*checkpoint_, {.tensor_parallel = 0}, false).ok());
  // Less than the head needs, and what two stages are too few for.
  const PlacementRequest small{
      .pipeline_parallel = 1, .device_memory = 200'000, .threads = 1, .batch_tokens = 1};
  EXPECT_THAT(Refusal(small), HasSubstr("bytes per rank; nor would any number"));
  const auto whole = nlohmann::json::parse(Report({.threads = 1, .batch_tokens = 1}, true));
  PlacementRequest tight{.threads = 1, .batch_tokens = 1};
  tight.device_memory = whole["stages"][0]["weight_bytes"].get<int64_t>();
  EXPECT_THAT(Refusal(tight), HasSubstr("stages would do"));
}

}  // namespace
}  // namespace treadle
