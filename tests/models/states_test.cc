// Layers that keep a state: what files must say, and on which backends they run. That they compute
// what transformers does: model_test.cc; that they give the same bits however rows are cut:
// tests/kernels, and tests/engine/states_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "models/model.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

constexpr const char* kFolder = TREADLE_TESTDATA "/models/qwen35";

TEST(StatesTest, ABackendThatCannotKeepThemIsRefused) {
  class Stateless final : public ForwardingBackend {
   public:
    Stateless() : ForwardingBackend(CreateReferenceBackend()) {}
    bool keeps_states() const override { return false; }
  };
  Stateless backend;
  const auto checkpoint = Checkpoint::Open(kFolder);
  ASSERT_EQ(checkpoint.status(), absl::OkStatus());
  const auto model = Model::Load(**checkpoint, backend, {.max_batch_tokens = 16});
  EXPECT_TRUE(absl::IsUnimplemented(model.status()));
  EXPECT_THAT(std::string(model.status().message()),
              HasSubstr("layers of qwen35 keep a state, which the backend reference cannot do"));
}

TEST(StatesTest, TheyAreWrittenAsTheyWereRead) {
  const TestFolder folder;
  QuantizeOptions options;
  options.weights = *WeightPlan::Parse("f16");
  const std::string gguf = std::string(kFolder) + "/model.gguf";
  EXPECT_THAT(
      std::string(
          QuantizeCheckpoint(kFolder, folder.path() + "/out.gguf", options).status().message()),
      HasSubstr("is written as it was read only; expected " + folder.path() +
                "/out.gguf to be a folder"));
  EXPECT_THAT(
      std::string(QuantizeCheckpoint(gguf, folder.path() + "/out", options).status().message()),
      HasSubstr("/out to be a .gguf file"));
}

using WrittenStates = QuantizeCheckpointTest;

// Also with experts, which are fused in the first folder and in the last file; and with the rows of
// all that states are made of in two matrices.
TEST_F(WrittenStates, ReadBackAsTheSameBits) {
  for (const char* name : {"qwen35", "qwen35moe", "qwen3next"}) {
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
  std::string ErrorWith(const char* field, const nlohmann::json& value) {
    std::ifstream in(std::string(kFolder) + "/config.json");
    nlohmann::json config = nlohmann::json::parse(in);
    config[field] = value;
    const std::string folder = folder_.Folder("model");
    std::ofstream(folder + "/config.json") << config;
    std::filesystem::copy_file(std::string(kFolder) + "/model.safetensors",
                               folder + "/model.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    const auto checkpoint = Checkpoint::Open(folder);
    return std::string(checkpoint.status().message());
  }
  const TestFolder folder_;
};

TEST_F(StateFields, ThatContradictEachOtherAreNamed) {
  EXPECT_THAT(ErrorWith("linear_num_value_heads", 5),
              HasSubstr("5 value heads of a state cannot share 3 key heads evenly"));
  EXPECT_THAT(ErrorWith("layer_types", {"full_attention", "linear_attention", "linear_attention",
                                        "full_attention"}),
              HasSubstr("but for \"full_attention\" at regular distances"));
  EXPECT_THAT(ErrorWith("layer_types", {"linear_attention", "mamba"}), HasSubstr("layer_types is"));
  EXPECT_THAT(ErrorWith("linear_conv_kernel_dim", 17),
              HasSubstr("positions of a convolution is 17, expected 1 to 16"));
  EXPECT_THAT(ErrorWith("linear_key_head_dim", nullptr),
              HasSubstr("linear_key_head_dim is missing"));
  EXPECT_EQ(ErrorWith("use_cache", true), "");
}

}  // namespace
}  // namespace treadle
