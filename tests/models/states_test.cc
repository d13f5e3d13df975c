// Layers that keep a state: what files must say. That they compute
// what transformers does: model_test.cc; that they give the same bits however rows are cut:
// tests/kernels, and tests/engine/states_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "models/model.h"
#include "models/tensor_parallel.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

constexpr const char* kFolder = TREADLE_TESTDATA "/models/qwen35";

TEST(StatesTest, OfGgufFilesTheyBecomeNoFolder) {
  const TestFolder folder;
  QuantizeOptions options;
  options.weights = *WeightPlan::Parse("f16");
  const std::string gguf = std::string(kFolder) + "/model.gguf";
  EXPECT_THAT(
      std::string(QuantizeCheckpoint(gguf, folder.path() + "/out", options).status().message()),
      HasSubstr("/out to be a .gguf file"));
}

using WrittenStates = QuantizeCheckpointTest;

// Also with experts, which are fused in the first folder and in the last file; and with the rows of
// all that states are made of in two matrices.
TEST_F(WrittenStates, ReadBackAsTheSameBits) {
  for (const char* name : {"qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid",
                           "granitehybridmoe", "nemotron-h", "nemotron-h-moe"}) {
    const std::string in = Str(TREADLE_TESTDATA "/models/", name);
    for (const char* weights : {"keep", "f16"}) {
      ExpectSameBits(in, "", weights);
      ExpectSameBits(in + "/model.gguf", ".gguf", weights);
    }
    ExpectSameBits(in, "", "nf4");
  }
}

// config.json with one field changed.
class StateFields : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Checkpoint>> With(const nlohmann::json& fields,
                                                   const std::string& model = "qwen35") {
    const std::string from = TREADLE_TESTDATA "/models/" + model;
    nlohmann::json config = nlohmann::json::parse(std::ifstream(from + "/config.json"));
    config.update(fields);
    const std::string folder = folder_.Folder("model");
    std::ofstream(folder + "/config.json") << config;
    std::filesystem::copy_file(from + "/model.safetensors", folder + "/model.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    return Checkpoint::Open(folder);
  }
  std::string ErrorWith(const char* field, const nlohmann::json& value,
                        const std::string& model = "qwen35") {
    return std::string(With({{field, value}}, model).status().message());
  }
  const TestFolder folder_;
};

TEST_F(StateFields, ThatContradictEachOtherAreNamed) {
  EXPECT_THAT(ErrorWith("linear_num_value_heads", 5),
              HasSubstr("5 value heads of a state cannot share 3 key heads evenly"));
  EXPECT_THAT(ErrorWith("layer_types", {"linear_attention", "full_attention"}),
              HasSubstr("or what keeps a state (\"linear_attention\", \"mamba\", \"conv\") of each "
                        "of 4 layers"));
  EXPECT_THAT(ErrorWith("layer_types", {"linear_attention", "rwkv", "full_attention", "mamba"}),
              HasSubstr("layer_types is"));
  EXPECT_THAT(ErrorWith("sliding_window", 9), HasSubstr("and a sliding window of 9 positions"));
  EXPECT_THAT(ErrorWith("linear_conv_kernel_dim", 17),
              HasSubstr("positions of a convolution is 17, expected 1 to 16"));
  EXPECT_THAT(ErrorWith("linear_key_head_dim", nullptr),
              HasSubstr("linear_key_head_dim is missing"));
  EXPECT_EQ(ErrorWith("use_cache", true), "");
  EXPECT_THAT(ErrorWith("conv_L_cache", 17, "lfm2"), HasSubstr("convolution is 17, expected 0 to"));
  EXPECT_THAT(ErrorWith("conv_bias", true, "lfm2"), HasSubstr("conv_bias is true"));
  EXPECT_THAT(ErrorWith("block_ffn_dim_multiplier", -1, "lfm2"), HasSubstr("expected more than 0"));
  EXPECT_THAT(ErrorWith("mamba_proj_bias", true, "granitehybrid"), HasSubstr("mamba_proj_bias is"));
  EXPECT_THAT(ErrorWith("time_step_limit", {0.0, 1.0}, "granitehybrid"),
              HasSubstr("time_step_limit is [0.0,1.0], expected no limit"));
}

// The authors' first files name the layers that attend, and the inner features, otherwise.
TEST_F(StateFields, OfLfm2MayHaveOlderNames) {
  ASSERT_OK_AND_ASSIGN(const auto newer, With(nlohmann::json::object(), "lfm2"));
  ASSERT_OK_AND_ASSIGN(const auto older, With({{"layer_types", nullptr},
                                               {"full_attn_idxs", {2, 4}},
                                               {"intermediate_size", nullptr},
                                               {"block_ff_dim", 80}},
                                              "lfm2"));
  EXPECT_EQ(newer->config(), older->config());
  EXPECT_EQ(newer->config().ffn_hidden, 63);
}

TEST(StatesTest, RanksDivideKeyHeadsOrTheirValueHeadsAndChannels) {
  const auto error = [](const std::string& model, int ranks) {
    const auto checkpoint = Checkpoint::Open(TREADLE_TESTDATA "/models/" + model).value();
    return std::string(CheckShard(*checkpoint, {}, ranks).message());
  };
  EXPECT_EQ(error("granitehybrid", 2), "");
  EXPECT_EQ(error("granitehybridmoe", 2), "");
  EXPECT_EQ(error("granitehybrid", 4), "");
  EXPECT_EQ(error("nemotron-h-moe", 2), "");
  EXPECT_THAT(error("qwen35-tied", 4), HasSubstr("cannot be divided by 4"));
  EXPECT_EQ(error("lfm2", 3), "");
}

}  // namespace
}  // namespace treadle
