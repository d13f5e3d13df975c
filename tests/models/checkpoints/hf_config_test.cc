// The configuration of a Hugging Face folder: the windows, contexts and ends that follow from it,
// and tables of wrong fields, each refused with a line that names the file and the fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/status.h"
#include "kernels/reference/reference_backend.h"
#include "models/model.h"
#include "tests/models/checkpoints/tiny_folder.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class HfConfigTest : public TinyFolder {
 protected:
  // The folder is not loaded with this value of a field; nor, if it is null, without the field.
  void ExpectFieldRefused(const char* field, const Json& value, const std::string& message) const {
    Json config = config_;
    config[field] = value;
    WriteConfig(config);
    ExpectRefused(Try(), folder_.path(), message);
    if (!value.is_null()) return;
    config.erase(field);
    WriteConfig(config);
    ExpectRefused(Try(), folder_.path(), message);
  }
};

TEST_F(HfConfigTest, EveryWrongConfigurationIsRefused) {
  struct Row {
    const char* field;
    Json value;
    std::string message;
  };
  const Json dynamic = {{"rope_type", "dynamic"}, {"factor", 4.0}};
  const Json no_factor = {{"rope_type", "linear"}};
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 4.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8}};
  const Row rows[] = {
      {"architectures", Json(), "architectures is null, expected one of LlamaForCausalLM"},
      {"architectures", {"QwenForCausalLM"}, "[\"QwenForCausalLM\"]"},
      {"architectures", {{{"a", std::string(5000, 'x')}}}, "xxx..., expected one of"},
      {"num_hidden_layers", 0, "num_hidden_layers is 0, expected a positive integer"},
      {"num_hidden_layers", 2, "tensor 'model.layers.1.input_layernorm.weight' is missing"},
      {"num_hidden_layers", 1 << 30, "layers is 1073741824, expected 1 to 4096"},
      {"num_hidden_layers", "1", "num_hidden_layers is \"1\""},
      {"hidden_size", Json(), "hidden_size is missing"},
      {"hidden_size", -32, "hidden_size is -32"},
      {"hidden_size", 32.5, "hidden_size is 32.5"},
      {"hidden_size", ~uint64_t{0}, "hidden_size is 18446744073709551615"},
      {"hidden_size", 48, "expected [275, 48]"},
      {"num_attention_heads", 3, "q_proj.weight' has shape [32, 32], expected [30, 32]"},
      {"num_attention_heads", 0, "num_attention_heads is 0"},
      {"num_key_value_heads", 3, "2 heads cannot share 3 K/V heads evenly"},
      {"num_key_value_heads", 2, "k_proj.weight' has shape [16, 32], expected [32, 32]"},
      {"head_dim", 15, "15 rotated elements"},
      {"intermediate_size", 33, "mlp.gate_proj.weight' has shape"},
      {"vocab_size", 276, "model.embed_tokens.weight' has shape [275, 32], expected [276, 32]"},
      {"max_position_embeddings", 0, "max_position_embeddings is 0"},
      {"rms_norm_eps", -1.0, "norm epsilon is -1"},
      {"rms_norm_eps", "x", "rms_norm_eps is \"x\""},
      {"tie_word_embeddings", false, "tensor 'lm_head.weight' is missing"},
      {"tie_word_embeddings", 1, "expected true or false"},
      {"attention_bias", true, "self_attn.q_proj.bias' is missing"},
      {"mlp_bias", true, "mlp_bias is true, expected false"},
      {"hidden_act", "gelu", "hidden_act is \"gelu\", expected \"silu\""},
      {"rope_theta", 0, "rope base is 0"},
      {"rope_theta", 1e300, "rope base is 1e+300"},
      {"rope_scaling", 3, "rope_scaling is 3"},
      {"rope_scaling", dynamic, "rope_scaling: rope_type is \"dynamic\""},
      {"rope_scaling", no_factor, "rope_scaling: factor is missing"},
      {"rope_scaling", llama3, "high_freq_factor is 4, expected more than"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(Str(row.field, " ", row.value.dump().substr(0, 80)));
    ExpectFieldRefused(row.field, row.value, row.message);
  }
  std::filesystem::remove(Path("config.json"));
  ExpectRefused(Try(), Path("config.json"), "cannot be opened");
}

TEST_F(HfConfigTest, AWindowCountsWhereItIsSwitchedOn) {
  const auto open = [&] {
    WriteConfig(config_);
    return Open();
  };
  // The window, and the layers before those that have it.
  const auto window = [&] {
    const auto checkpoint = open();
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (!checkpoint.ok()) return std::pair<int, int>();
    const ModelConfig& config = (*checkpoint)->config();
    return std::pair<int, int>(config.window, config.global_layers);
  };
  for (const char* name : {"qwen2", "qwen3"}) {
    SCOPED_TRACE(name);
    WriteFamily(name);
    config_["sliding_window"] = 7;
    EXPECT_EQ(window(), std::pair(0, 0));
    config_["use_sliding_window"] = false;
    EXPECT_EQ(window(), std::pair(0, 0));
    config_["use_sliding_window"] = true;
    EXPECT_EQ(window(), std::pair(7, 28));
    config_["max_window_layers"] = 0;
    EXPECT_EQ(window(), std::pair(7, 0));
    config_["layer_types"] = {"full_attention", "sliding_attention"};
    EXPECT_EQ(window(), std::pair(7, 1));
    config_["sliding_window"] = nullptr;
    EXPECT_EQ(window(), std::pair(0, 0));
    const std::pair<const char*, Json> refused[] = {
        {"sliding_window", 0},
        {"sliding_window", -4},
        {"max_window_layers", -1},
        {"layer_types", {"sliding_attention", "full_attention"}}};
    const Json before = config_;
    for (const auto& [field, value] : refused) {
      config_["sliding_window"] = 7;
      config_[field] = value;
      ExpectRefused(open().status(), Path("config.json"), Str(field, " is "));
      config_ = before;
    }
  }
}

// Fields of other families, with values as JSON, and what is said of them.
constexpr struct {
  const char *architecture, *field, *json, *message;
} kFamilies[] = {
    {"smollm3", "no_rope_layers", "[0, 1]",
     "no_rope_layers is [0,1], expected a number for each of 2"},
    {"smollm3", "no_rope_layers", "[1]", "no_rope_layers is [1], expected a number for each of 2"},
    {"granite", "attention_multiplier", "null", "attention_multiplier is missing, expected a num"},
    {"granite", "residual_multiplier", "0", "residual_multiplier is 0, expected at least 1e-06"},
    {"granite4", "position_embedding_type", R"("nope")", "type is \"nope\", expected \"rope\""},
    {"granite4", "position_embedding_type", "null", "type is missing, expected \"rope\""},
    {"granitehybrid", "position_embedding_type", R"("alibi")",
     "type is \"alibi\", expected \"rope\" or \"nope\""},
    {"granite4", "num_local_experts", "4", "num_local_experts is 4, expected 0"},
    {"granite4", "layer_types", R"(["mamba", "attention"])", "mamba_n_groups is missing"},
    {"olmo2", "layer_types", R"(["full_attention", "sliding_attention"])", "at regular distances"},
    {"seed_oss", "attention_out_bias", "true", "attention_out_bias is true, expected false"},
    {"hunyuan-dense", "rope_scaling", R"({"type": "dynamic", "factor": 2.0})",
     "rope_scaling: type is \"dynamic\", expected default"},
    {"hunyuan-dense", "rope_scaling", R"({"type": "dynamic", "alpha": 0.0})",
     "rope base is 0, expected 1e-06 to"},
    {"mistral3", "rope_scaling", R"({"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": -1.0})",
     "llama_4_scaling_beta is -1, expected 0 to"},
    {"gptneox", "hidden_act", R"("gelu_new")", "hidden_act is \"gelu_new\", expected \"gelu\""},
    {"gptneox", "attention_bias", "false", "attention_bias is false, expected true"},
    {"gptneox", "rotary_pct", "0", "rotary_pct is 0, expected more than 0, at most 1"},
    {"gptneox", "rotary_pct", "0.2", "3 rotated elements of a head"},
    {"opt", "do_layer_norm_before", "false", "do_layer_norm_before is false, expected true"},
    {"opt", "word_embed_proj_dim", "32", "word_embed_proj_dim is 32, expected 64"},
    {"opt", "max_position_embeddings", "258", "embed_positions.weight' has shape [258, 64]"},
    {"phi3", "rope_scaling", R"({"type": "longrope", "long_factor": [1, 1, 1, 1]})",
     "rope_scaling: short_factor is missing, expected a list of 4 numbers"},
    {"phi3", "rope_scaling", R"({"type": "su", "short_factor": [1, 1, 1, 1]})",
     "rope_scaling: long_factor is missing, expected a list of 4 numbers"},
    {"phi3", "rope_scaling",
     R"({"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1, 1]})",
     "original_max_position_embeddings is missing, expected a positive integer"},
    {"phi3", "rope_scaling",
     R"({"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 0, 1],
           "original_max_position_embeddings": 8})",
     "rope scaling: a factor is 0, expected 1e-06 to 1e+12"},
    {"llama4", "moe_layers", "[0]", "moe_layers is [0], expected the last of every 2 layers"},
    {"llama4", "num_experts_per_tok", "2", "num_experts_per_tok is 2, expected 1"},
    {"nemotron_h", "hybrid_override_pattern", R"("*?")",
     "layer_types is [\"attention\",\"?\"], expected \"full_attention\", \"mlp\" or what keeps"},
    {"nemotron_h", "hybrid_override_pattern", R"("M*")",
     "0 layers are a feed-forward network alone, expected some of nemotron_h"},
    {"nemotron_h_moe", "moe_latent_size", "16", "moe_latent_size is 16, expected null"},
    {"falcon", "alibi", "true", "alibi is true, expected false"},
    {"falcon", "parallel_attn", "false", "parallel_attn is false, expected true"},
    {"falcon", "new_decoder_architecture", "false", "input_layernorm.weight' is missing"},
    {"falcon", "num_ln_in_parallel_attn", "3", "norms of a layer is 3, expected 1 to 2"},
    {"falcon", "num_kv_heads", "1", "query_key_value.weight' has shape [128, 64]"}};

TEST_F(HfConfigTest, WhatOtherFamiliesCannotSayIsRefused) {
  for (const auto& row : kFamilies) {
    SCOPED_TRACE(Str(row.architecture, " ", row.field));
    WriteFamily(row.architecture);
    EXPECT_EQ(Try(), absl::OkStatus());
    ExpectFieldRefused(row.field, Json::parse(row.json), row.message);
  }
}

TEST_F(HfConfigTest, AContextEndsWithTheFirstChunkOfAttention) {
  WriteFamily("llama4");
  config_["max_position_embeddings"] = 100'000;
  for (const int64_t chunk : {8192, 50}) {
    config_["attention_chunk_size"] = chunk;
    WriteConfig(config_);
    const auto checkpoint = Open();
    ASSERT_EQ(checkpoint.status(), absl::OkStatus());
    EXPECT_EQ((*checkpoint)->config().context, chunk);
    const auto backend = CreateReferenceBackend();
    EXPECT_THAT(std::string(Model::Load(**checkpoint, *backend,
                                        {.max_batch_tokens = 8, .max_context = chunk + 1})
                                .status()
                                .message()),
                HasSubstr(Str("expected 1 to ", chunk, ", its attention's chunk")));
  }
}

TEST_F(HfConfigTest, LocalLayersAreWhatAPatternSays) {
  WriteFamily("gemma3");
  const auto open = [&](const char* name, const Json& value) {
    Json config = config_;
    config[name] = value;
    WriteConfig(config);
    return Open();
  };
  const auto every = [&](const Json& types) {
    const auto checkpoint = open("layer_types", types);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? (*checkpoint)->config().global_every : 0;
  };
  const char *const kLocal = "sliding_attention", *const kGlobal = "full_attention";
  EXPECT_EQ(every(nullptr), 2);
  EXPECT_EQ(every({kLocal, kLocal}), 3);
  EXPECT_EQ(every({kGlobal, kGlobal}), 1);
  const std::pair<const char*, Json> refused[] = {
      {"layer_types", {kGlobal, kLocal}},   {"layer_types", {kLocal}},
      {"layer_types", "sliding_attention"}, {"sliding_window", 0},
      {"sliding_window", nullptr},          {"sliding_window_pattern", 0},
      {"final_logit_softcapping", 30.0},    {"use_bidirectional_attention", true}};
  for (const auto& [name, value] : refused) {
    ExpectRefused(open(name, value).status(), Path("config.json"), Str(name, " is "));
  }
}

TEST_F(HfConfigTest, Gpt2HeadsMustDivideTheHiddenSize) {
  WriteBy(WriteTinyGpt2Folder);
  ExpectFieldRefused("n_head", 3, "3 heads of 10");
}

TEST_F(HfConfigTest, MistralsWindowIsOfAllLayers) {
  config_["architectures"] = {"MistralForCausalLM"};
  for (const Json& window : {Json(8), Json(nullptr)}) {
    config_["sliding_window"] = window;
    WriteConfig(config_);
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const ModelConfig& config = (*checkpoint)->config();
    EXPECT_EQ(config.context, 16);
    EXPECT_EQ(config.RingLayers(0, config.layers), window.is_null() ? 0 : config.layers);
  }
}

// A model without a tokenizer still says where generation ends.
TEST_F(HfConfigTest, EndIdsAreKnownWithoutATokenizer) {
  const auto end_ids = [&]() -> absl::StatusOr<std::vector<int32_t>> {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Open());
    EXPECT_EQ(checkpoint->tokenizer(), nullptr);
    return checkpoint->end_ids();
  };
  config_["eos_token_id"] = 2;
  WriteConfig(config_);
  EXPECT_THAT(*end_ids(), testing::ElementsAre(2));
  Write("generation_config.json", R"({"eos_token_id": [3, 1]})");
  EXPECT_THAT(*end_ids(), testing::ElementsAre(3, 1));
  Write("generation_config.json", R"({"eos_token_id": 999999})");
  ExpectRefused(end_ids().status(), Path("generation_config.json"), "eos_token_id is 999999");
  Write("generation_config.json", "{}");
  EXPECT_THAT(*end_ids(), testing::ElementsAre(2));
}

TEST_F(HfConfigTest, SamplingIsAsGenerationConfigRecommends) {
  const auto sampling = [&]() -> absl::StatusOr<std::map<std::string, double>> {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Open());
    TREADLE_ASSIGN_OR_RETURN(const RecommendedSampling found, checkpoint->Sampling());
    return found.values;
  };
  using Values = std::map<std::string, double>;
  EXPECT_EQ(*sampling(), Values());
  // Qwen3's, of 2025.
  Write("generation_config.json", R"({"bos_token_id": 1, "do_sample": true, "eos_token_id": [3, 1],
      "pad_token_id": 1, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
      "transformers_version": "4.51.0"})");
  EXPECT_EQ(*sampling(), (Values{{"temperature", 0.6}, {"top_k", 20}, {"top_p", 0.95}}));
  Write("generation_config.json",
        R"({"repetition_penalty": 1.1, "min_p": 0.05, "top_k": null, "temperature": 0.9})");
  EXPECT_EQ(*sampling(),
            (Values{{"repetition_penalty", 1.1}, {"min_p", 0.05}, {"temperature", 0.9}}));
  Write("generation_config.json", R"({"do_sample": false, "temperature": 0.9})");
  EXPECT_EQ(*sampling(), (Values{{"temperature", 0}}));
  for (const auto& [text, problem] :
       {std::pair(R"({"top_p": "high"})", "top_p is \"high\", expected a number"),
        {R"({"do_sample": 1})", "do_sample is 1, expected true or false"}}) {
    Write("generation_config.json", text);
    ExpectRefused(sampling().status(), Path("generation_config.json"), problem);
  }
}

// The union of what tokenizer, configuration and template say.
TEST_F(HfConfigTest, EndIdsOfEveryFileCount) {
  const auto path = WriteTinyLlamaFolder(folder_.path(), {});
  ASSERT_TRUE(path.ok()) << path.status();
  const auto end_ids = [&] {
    const auto checkpoint = Open();
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? (*checkpoint)->end_ids() : std::vector<int32_t>();
  };
  const int32_t turn = TinyEndOfTurn();
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn));
  config_ = Json::parse(Read("config.json"));
  config_["eos_token_id"] = {5, turn};
  WriteConfig(config_);
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn, 5));
  Write("generation_config.json", R"({"eos_token_id": 7})");
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn, 7));
  Json tokenizer = Json::parse(Read("tokenizer_config.json"));
  tokenizer["eos_token"] = "<|endoftext|>";
  Write("tokenizer_config.json", tokenizer.dump());
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn - 2, 7, turn));
}

}  // namespace
}  // namespace treadle
