// Latent attention: what files must say, how their matrices are taken apart, and on which backends
// it runs. That it computes what transformers does: model_test.cc; that rows are cut as one likes:
// experts_test.cc and tests/kernels.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"
#include "models/checkpoints/latent_tensors.h"
#include "models/model.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kFolder = TREADLE_TESTDATA "/models/deepseek3";

TEST(LatentsTest, ABackendThatKeepsKeysByPositionIsRefused) {
  class ByPosition final : public ForwardingBackend {
   public:
    ByPosition() : ForwardingBackend(CreateReferenceBackend()) {}
    KeyOrder key_order() const override { return KeyOrder::kByPosition; }
  };
  ByPosition backend;
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(kFolder));
  LoadOptions load;
  load.max_batch_tokens = 16;
  const auto model = Model::Load(*checkpoint, backend, load);
  EXPECT_TRUE(absl::IsUnimplemented(model.status()));
  EXPECT_THAT(std::string(model.status().message()),
              HasSubstr("models of deepseek3 attend over latents, which the backend reference "
                        "cannot do; expected the backend cpu"));
}

ModelConfig Sizes() {
  ModelConfig config;
  config.heads = 2;
  config.unrotated_dim = 3;
  config.value_dim = 2;
  config.latent_dim = 32;
  return config;
}

std::vector<float> Values(const StoredTensor& tensor) {
  MatrixConstants constants;
  const auto source = SourceOf(tensor, tensor.shape[0], tensor.shape[1], constants).value();
  std::vector<float> values(static_cast<size_t>(tensor.Elements()));
  for (int64_t row = 0; row < tensor.shape[0]; ++row) {
    DecodeSourceRow(source, row, values.data() + row * tensor.shape[1]);
  }
  return values;
}

// Row r, column c of the one matrix is 100 r + c: as floats, and in blocks of codes, which hold the
// rows' numbers to within half a step, rounded to f16 once more.
TEST(LatentsTest, OneMatrixIsTakenApart) {
  const ModelConfig config = Sizes();
  const int64_t rows = config.heads * (config.unrotated_dim + config.value_dim);
  std::vector<float> all;
  for (int64_t i = 0; i < rows * config.latent_dim; ++i) {
    all.push_back(static_cast<float>(i / config.latent_dim * 100 + i % config.latent_dim));
  }
  const auto here = [](int64_t count, const auto& body) { body(0, count); };
  const auto blocks =
      Quantize(*ParseQuantizeSpec("q8_0"), all, rows, config.latent_dim, here).value();
  for (const bool gguf : {false, true}) {
    StoredTensor tensor;
    tensor.name = gguf ? "blk.0.attn_kv_b.weight" : "self_attn.kv_b_proj.weight";
    tensor.format = FindWeightFormat(gguf ? "q8_0" : "f32");
    tensor.shape = {rows, config.latent_dim};
    tensor.data = gguf ? blocks.data.data() : reinterpret_cast<const std::byte*>(all.data());
    tensor.bytes = static_cast<uint64_t>(tensor.format->MatrixBytes(rows, config.latent_dim));
    ASSERT_OK_AND_ASSIGN(
        const auto parts,
        WithLatentsApart({tensor}, config, gguf ? Container::kGguf : Container::kHuggingFace));
    ASSERT_EQ(parts.size(), 2u);
    const StoredTensor &keys = parts[0], &values = parts[1];
    EXPECT_EQ(keys.name, gguf ? "blk.0.attn_k_b.weight" : "self_attn.k_b_proj.weight");
    EXPECT_EQ(values.name, gguf ? "blk.0.attn_v_b.weight" : "self_attn.v_b_proj.weight");
    EXPECT_EQ(keys.format->name, gguf ? "f16" : "f32");
    EXPECT_THAT(keys.shape, ElementsAre(2 * 32, 3));
    EXPECT_THAT(values.shape, ElementsAre(2 * 2, 32));
    const std::vector<float> k = Values(keys), v = Values(values);
    const float step = gguf ? 931.0f / 127 / 2 + 0.5f : 0;  // of the last row, and of f16 there
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t c = 0; c < 32; ++c) {
        for (int64_t r = 0; r < 3; ++r) {
          EXPECT_NEAR(k[static_cast<size_t>((head * 32 + c) * 3 + r)],
                      static_cast<float>(100 * (5 * head + r) + c), step);
        }
        for (int64_t r = 0; r < 2; ++r) {
          EXPECT_NEAR(v[static_cast<size_t>((head * 2 + r) * 32 + c)],
                      static_cast<float>(100 * (5 * head + 3 + r) + c), step);
        }
      }
    }
  }
}

using WrittenLatents = QuantizeCheckpointTest;

// In the folder's one matrix a layer and in the two of a .gguf file; where quantized, the two are.
TEST_F(WrittenLatents, ReadBackAsTheSameBits) {
  for (const char* name : {"deepseek2", "deepseek3"}) {
    const std::string in = Str(TREADLE_TESTDATA "/models/", name);
    for (const char* weights : {"keep", "f16", "nf4"}) ExpectSameBits(in, "", weights);
    for (const char* weights : {"keep", "f16"}) {
      ExpectSameBits(in + "/model.gguf", ".gguf", weights);
    }
  }
}

// An older file has no sizes of the cache: those of heads are where newer ones have these.
TEST_F(WrittenLatents, OlderFilesSayOtherSizes) {
  std::string bytes = ReadWhole(TREADLE_TESTDATA "/models/deepseek2/model.gguf");
  const auto change = [&](const std::string& key, const std::string& to, uint32_t value) {
    const size_t at = bytes.find(key);
    ASSERT_NE(at, std::string::npos) << key;
    bytes.replace(at, key.size(), to);
    bytes.replace(at + key.size() + sizeof(uint32_t), sizeof(value),
                  reinterpret_cast<const char*>(&value), sizeof(value));
  };
  change("attention.key_length_mla", "attention.key_length_old", 0);
  change("attention.value_length_mla", "attention.value_length_old", 0);
  change("attention.head_count_kv", "attention.head_count_kv", 3);
  for (const auto& [key, value] :
       {std::pair("attention.key_length", 18u), {"attention.value_length", 14u}}) {
    change(key, key, value);
  }
  Write("older.gguf", bytes);
  EXPECT_EQ(Logits(Path("older.gguf"), ""),
            Logits(TREADLE_TESTDATA "/models/deepseek2/model.gguf", ""));
}

// config.json with one field changed.
class LatentFields : public ::testing::Test {
 protected:
  std::string ErrorWith(const char* field, const nlohmann::json& value) {
    nlohmann::json config =
        nlohmann::json::parse(std::ifstream(std::string(kFolder) + "/config.json"));
    config[field] = value;
    const std::string folder = folder_.Folder("model");
    std::ofstream(folder + "/config.json") << config;
    std::filesystem::copy_file(std::string(kFolder) + "/model.safetensors",
                               folder + "/model.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    const auto checkpoint = Checkpoint::Open(folder);
    if (!checkpoint.ok()) return std::string(checkpoint.status().message());
    const auto backend = CreateReferenceBackend();
    LoadOptions load;
    load.max_batch_tokens = 16;
    const auto model = Model::Load(**checkpoint, *backend, load);
    return std::string(model.status().message());
  }
  const TestFolder folder_;
};

TEST_F(LatentFields, ThatAreNotComputedAreNamed) {
  EXPECT_THAT(ErrorWith("n_group", 5),
              HasSubstr("2 of 5 groups of 12 experts for 4 per token, expected equal groups"));
  EXPECT_THAT(ErrorWith("n_group", 12), HasSubstr("of at least 2 that have as many"));
  EXPECT_THAT(ErrorWith("topk_group", 1), HasSubstr("1 of 4 groups of 12 experts"));
  EXPECT_THAT(ErrorWith("scoring_func", "softmax"), HasSubstr("scoring_func is \"softmax\""));
  EXPECT_THAT(ErrorWith("rope_interleave", false), HasSubstr("rope_interleave is false"));
  EXPECT_THAT(ErrorWith("num_key_value_heads", 3), HasSubstr("num_key_value_heads is 3"));
  EXPECT_THAT(ErrorWith("kv_lora_rank", nullptr), HasSubstr("kv_lora_rank is missing"));
  EXPECT_THAT(ErrorWith("mlp_layer_types", {"dense", "sparse", "dense"}),
              HasSubstr("\"dense\" of the first of 3 layers, then \"sparse\""));
  EXPECT_THAT(ErrorWith("mlp_layer_types", "sparse"), HasSubstr("mlp_layer_types is \"sparse\""));
  EXPECT_THAT(ErrorWith("n_shared_experts", int64_t{1} << 40),
              HasSubstr("shared experts is 1099511627776, expected 0 to 4096"));
  EXPECT_THAT(ErrorWith("v_head_dim", 13),
              HasSubstr("'model.layers.0.self_attn.k_b_proj.weight' is missing"));
  EXPECT_EQ(ErrorWith("mlp_layer_types", {"dense", "sparse", "sparse"}), "");
}

}  // namespace
}  // namespace treadle
