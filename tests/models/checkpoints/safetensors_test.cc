// Hugging Face folders: good ones, and tables of bad ones, each refused with a line that names the
// file and the fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "kernels/reference/reference_backend.h"
#include "models/architectures/architecture.h"
#include "models/model.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

class SafetensorsTest : public ScratchCheckpoint {
 protected:
  void SetUp() override { WriteTiny(WriteTinyLlamaFolder); }
  void WriteTiny(absl::StatusOr<std::string> (*write)(const std::string&,
                                                      const TinyModelOptions&)) {
    TinyModelOptions options;
    options.layers = 1;
    options.hidden = options.ffn_hidden = 32;
    options.heads = 2;
    options.kv_heads = 1;
    options.context = 16;
    options.tokenizer = false;
    const auto path = write(folder_.path(), options);
    ASSERT_TRUE(path.ok()) << path.status();
    good_ = Safetensors::Parse(Read(kWeights));
    config_ = Json::parse(Read("config.json"));
  }
  absl::Status Try() const { return Load(folder_.path()); }

  Safetensors good_;
  Json config_;
};

TEST_F(SafetensorsTest, GoodFoldersLoad) {
  EXPECT_EQ(Try(), absl::OkStatus());
  for (const Architecture& architecture : Architectures()) {
    ASSERT_TRUE(WriteTinyFolder(architecture, folder_.path(), {}).ok());
    EXPECT_EQ(Try(), absl::OkStatus()) << architecture.name;
  }
}

// Whoever opens a pipe without a writer waits for one.
TEST_F(SafetensorsTest, PipesAreRefused) {
  for (const char* name : {"config.json", kWeights}) {
    const std::string bytes = Read(name);
    std::filesystem::remove(Path(name));
    ASSERT_EQ(mkfifo(Path(name).c_str(), 0600), 0);
    ExpectRefused(Try(), Path(name), "is not a regular file");
    std::filesystem::remove(Path(name));
    Write(name, bytes);
  }
}

TEST_F(SafetensorsTest, EveryCorruptHeaderIsRefused) {
  const std::string q = "model.layers.0.self_attn.q_proj.weight";
  struct Row {
    const char* name;
    std::function<void(Safetensors&)> corrupt;
    std::string message;
  };
  const auto set = [&](const char* field, Json value) {
    return [=](Safetensors& file) { file.header[q][field] = value; };
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const Row rows[] = {
      {"missing", [&](Safetensors& file) { file.header.erase(q); }, "'" + q + "' is missing"},
      {"no object", [&](Safetensors& file) { file.header[q] = 3; }, "not described by an object"},
      {"dtype", set("dtype", "I32"), "'" + q + "' has dtype 'I32', expected F32, F16 or BF16"},
      {"unknown dtype", set("dtype", "F6"), "'" + q + "' has dtype 'F6', expected F32, F16"},
      {"smaller dtype", set("dtype", "I8"), "has 4096 bytes, expected 1024 elements of I8"},
      {"no dtype", set("dtype", 7), "'" + q + "' has no dtype"},
      {"no shape", set("shape", "x"), "'" + q + "' has no shape"},
      {"shape", set("shape", {16, 64}), "'" + q + "' has shape [16, 64], expected [32, 32]"},
      {"dimensions", set("shape", {1024}), "'" + q + "' has shape [1024], expected [32, 32]"},
      {"smaller shape", set("shape", {16, 32}), "has 4096 bytes, expected 512 elements"},
      {"negative extent", set("shape", {-32, -32}), "impossible shape"},
      {"wrapping extents", set("shape", {uint64_t{1} << 33, uint64_t{1} << 33}),
       "impossible shape"},
      {"huge extent", set("shape", {kHuge}), "impossible shape"},
      {"wrapping bytes", set("shape", {uint64_t{1} << 62}), "has 4096 bytes"},
      {"fraction", set("shape", {32.5, 32}), "impossible shape"},
      {"no offsets", set("data_offsets", Json()), "no pair of data_offsets"},
      {"three offsets", set("data_offsets", {0, 1, 2}), "no pair of data_offsets"},
      {"negative offset", set("data_offsets", {-1, 4095}), "no pair of data_offsets"},
      {"reversed offsets", set("data_offsets", {4096, 0}), "data_offsets [4096, 0], outside"},
      {"offset outside", set("data_offsets", {kHuge - 4096, kHuge}), "outside the file's"},
      {"overlap", set("data_offsets", {0, 4096}), "overlap"},
      {"truncated data", [](Safetensors& file) { file.data.pop_back(); }, "(truncated?)"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    Safetensors bad = good_;
    row.corrupt(bad);
    Write(kWeights, bad.Bytes());
    ExpectRefused(Try(), folder_.path(), row.message);
  }
}

TEST_F(SafetensorsTest, EveryCorruptFileIsRefused) {
  const auto number = [](uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const std::string entry = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  const std::pair<std::string, const char*> rows[] = {
      {"", "is empty"},
      {"1234567", "truncated"},
      {number(~uint64_t{0}), "header length is 18446744073709551615, expected at most 0"},
      {number(100) + "{}", "header length is 100, expected at most 2"},
      {Safetensors::Join("", ""), "is not valid JSON"},
      {Safetensors::Join("[]", ""), "expected a JSON object"},
      {Safetensors::Join("{\"a\":", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"\xff\":1}", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"a\":1e999}", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"a\":" + std::string(1'000'000, '[') + "}", ""), "64 levels deep"},
      {Safetensors::Join("{\"a\":" + entry + ",\"a\":" + entry + "}", ""), "'a' appears twice"},
  };
  for (const auto& [bytes, message] : rows) {
    SCOPED_TRACE(message);
    Write(kWeights, bytes);
    ExpectRefused(Try(), Path(kWeights), message);
  }
}

TEST_F(SafetensorsTest, EveryWrongConfigurationIsRefused) {
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
    Json config = config_;
    config[row.field] = row.value;
    if (row.value.is_null()) config.erase(row.field);
    Write("config.json", config.dump());
    ExpectRefused(Try(), folder_.path(), row.message);
  }
  std::filesystem::remove(Path("config.json"));
  ExpectRefused(Try(), Path("config.json"), "cannot be opened");
}

TEST_F(SafetensorsTest, AWindowCountsWhereItIsSwitchedOn) {
  const auto open = [&] {
    Write("config.json", config_.dump());
    return Checkpoint::Open(folder_.path());
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
    ASSERT_TRUE(WriteTinyFolder(*FindArchitecture(name), folder_.path(), {}).ok());
    config_ = Json::parse(Read("config.json"));
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

TEST_F(SafetensorsTest, WhatOtherFamiliesCannotSayIsRefused) {
  struct Row {
    const char* architecture;
    const char* field;
    Json value;
    std::string message;
  };
  const Row rows[] = {
      {"smollm3",
       "no_rope_layers",
       {0, 1},
       "no_rope_layers is [0,1], expected a number for each of 2"},
      {"smollm3", "no_rope_layers", {1}, "no_rope_layers is [1], expected a number for each of 2"},
      {"granite", "attention_multiplier", nullptr,
       "attention_multiplier is missing, expected a num"},
      {"granite", "residual_multiplier", 0, "residual_multiplier is 0, expected at least 1e-06"},
      {"granite4", "position_embedding_type", "nope", "type is \"nope\", expected \"rope\""},
      {"granite4", "position_embedding_type", nullptr, "type is missing, expected \"rope\""},
      {"granitehybrid", "position_embedding_type", "alibi",
       "type is \"alibi\", expected \"rope\" or \"nope\""},
      {"granite4", "num_local_experts", 4, "num_local_experts is 4, expected 0"},
      {"granite4", "layer_types", {"mamba", "attention"}, "mamba_n_groups is missing"},
      {"olmo2", "layer_types", {"full_attention", "sliding_attention"}, "at regular distances"},
      {"seed_oss", "attention_out_bias", true, "attention_out_bias is true, expected false"},
      {"hunyuan-dense",
       "rope_scaling",
       {{"type", "dynamic"}, {"factor", 2.0}},
       "rope_scaling: type is \"dynamic\", expected default"},
      {"hunyuan-dense",
       "rope_scaling",
       {{"type", "dynamic"}, {"alpha", 0.0}},
       "rope base is 0, expected 1e-06 to"},
      {"mistral3",
       "rope_scaling",
       {{"type", "yarn"}, {"factor", 2.0}, {"llama_4_scaling_beta", -1.0}},
       "llama_4_scaling_beta is -1, expected 0 to"},
      {"gptneox", "hidden_act", "gelu_new", "hidden_act is \"gelu_new\", expected \"gelu\""},
      {"gptneox", "attention_bias", false, "attention_bias is false, expected true"},
      {"gptneox", "rotary_pct", 0, "rotary_pct is 0, expected more than 0, at most 1"},
      {"gptneox", "rotary_pct", 0.2, "3 rotated elements of a head"},
      {"opt", "do_layer_norm_before", false, "do_layer_norm_before is false, expected true"},
      {"opt", "word_embed_proj_dim", 32, "word_embed_proj_dim is 32, expected 64"},
      {"opt", "max_position_embeddings", 258, "embed_positions.weight' has shape [258, 64]"},
      {"phi3",
       "rope_scaling",
       {{"type", "longrope"}, {"long_factor", {1, 1, 1, 1}}},
       "rope_scaling: short_factor is missing, expected a list of 4 numbers"},
      {"phi3",
       "rope_scaling",
       {{"type", "su"}, {"short_factor", {1, 1, 1, 1}}},
       "rope_scaling: long_factor is missing, expected a list of 4 numbers"},
      {"phi3",
       "rope_scaling",
       {{"type", "longrope"}, {"short_factor", {1, 1, 1, 1}}, {"long_factor", {1, 1, 1, 1}}},
       "original_max_position_embeddings is missing, expected a positive integer"},
      {"phi3",
       "rope_scaling",
       {{"type", "longrope"},
        {"short_factor", {1, 1, 1, 1}},
        {"long_factor", {1, 1, 0, 1}},
        {"original_max_position_embeddings", 8}},
       "rope scaling: a factor is 0, expected 1e-06 to 1e+12"},
      {"llama4", "moe_layers", {0}, "moe_layers is [0], expected the last of every 2 layers"},
      {"llama4", "num_experts_per_tok", 2, "num_experts_per_tok is 2, expected 1"},
      {"nemotron_h", "hybrid_override_pattern", "*?",
       "layer_types is [\"attention\",\"?\"], expected \"full_attention\", \"mlp\" or what keeps"},
      {"nemotron_h", "hybrid_override_pattern", "M*",
       "0 layers are a feed-forward network alone, expected some of nemotron_h"},
      {"nemotron_h_moe", "moe_latent_size", 16, "moe_latent_size is 16, expected null"},
      {"falcon", "alibi", true, "alibi is true, expected false"},
      {"falcon", "parallel_attn", false, "parallel_attn is false, expected true"},
      {"falcon", "new_decoder_architecture", false, "input_layernorm.weight' is missing"},
      {"falcon", "num_ln_in_parallel_attn", 3, "norms of a layer is 3, expected 1 to 2"},
      {"falcon", "num_kv_heads", 1, "query_key_value.weight' has shape [128, 64]"}};
  for (const Row& row : rows) {
    SCOPED_TRACE(Str(row.architecture, " ", row.field));
    ASSERT_TRUE(WriteTinyFolder(*FindArchitecture(row.architecture), folder_.path(), {}).ok());
    EXPECT_EQ(Try(), absl::OkStatus());
    config_ = Json::parse(Read("config.json"));
    config_[row.field] = row.value;
    Write("config.json", config_.dump());
    ExpectRefused(Try(), folder_.path(), row.message);
  }
}

TEST_F(SafetensorsTest, AContextEndsWithTheFirstChunkOfAttention) {
  ASSERT_TRUE(WriteTinyFolder(*FindArchitecture("llama4"), folder_.path(), {}).ok());
  Json config = Json::parse(Read("config.json"));
  config["max_position_embeddings"] = 100'000;
  for (const int64_t chunk : {8192, 50}) {
    config["attention_chunk_size"] = chunk;
    Write("config.json", config.dump());
    const auto checkpoint = Checkpoint::Open(folder_.path());
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

TEST_F(SafetensorsTest, LocalLayersAreWhatAPatternSays) {
  ASSERT_TRUE(WriteTinyFolder(*FindArchitecture("gemma3"), folder_.path(), {}).ok());
  const Json good = Json::parse(Read("config.json"));
  const auto open = [&](const char* name, const Json& value) {
    Json config = good;
    config[name] = value;
    Write("config.json", config.dump());
    return Checkpoint::Open(folder_.path());
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

TEST_F(SafetensorsTest, Gpt2HeadsMustDivideTheHiddenSize) {
  WriteTiny(WriteTinyGpt2Folder);
  config_["n_head"] = 3;
  Write("config.json", config_.dump());
  ExpectRefused(Try(), folder_.path(), "3 heads of 10");
}

TEST_F(SafetensorsTest, ShardsAreReadThroughTheIndex) {
  // Every other tensor into a second file: both hold all of the data.
  Safetensors parts[] = {good_, good_};
  Json map = Json::object();
  int next = 0;
  for (const auto& [name, entry] : good_.header.items()) {
    const int shard = next++ % 2;
    parts[1 - shard].header.erase(name);
    map[name] = Str("part-", shard, ".safetensors");
  }
  std::filesystem::remove(Path(kWeights));
  ExpectRefused(Try(), folder_.path(), "neither model.safetensors nor");
  Write("part-0.safetensors", parts[0].Bytes());
  Write("part-1.safetensors", parts[1].Bytes());
  Write(kIndex, Json({{"weight_map", map}}).dump());
  EXPECT_EQ(Try(), absl::OkStatus());

  Write(kIndex, "{}");
  ExpectRefused(Try(), Path(kIndex), "weight_map is not an object");
  const std::string first = map.begin().key();
  for (const Json& name : {Json("../part-0.safetensors"), Json("/etc/passwd"), Json(".."), Json(""),
                           Json(std::string("a\0b", 3)), Json("a\nb"), Json(7), Json()}) {
    Json bad = map;
    bad[first] = name;
    Write(kIndex, Json({{"weight_map", bad}}).dump());
    ExpectRefused(Try(), Path(kIndex), "is not a file name");
  }
  Json bad = map;
  bad[first] = "part-9.safetensors";
  Write(kIndex, Json({{"weight_map", bad}}).dump());
  ExpectRefused(Try(), Path("part-9.safetensors"), "cannot be opened");

  Write(kIndex, Json({{"weight_map", map}}).dump());
  Write("part-1.safetensors", good_.Bytes());
  ExpectRefused(Try(), Path("part-1.safetensors"), "is in another shard too");
}

// Whatever the bytes, an answer: loaded, or refused with a line that names a file of the folder.
TEST_F(SafetensorsTest, RandomMutationsNeverCrash) {
  std::mt19937 random(21);
  int loaded = 0, refused = 0;
  const std::string config = config_.dump(), weights = good_.Bytes();
  const size_t header = weights.size() - good_.data.size();
  for (int i = 0; i < 3000; ++i) {
    const bool in_config = i % 2 == 0;
    Write("config.json", in_config ? Mutate(config, config.size(), random) : config);
    Write(kWeights, in_config ? weights : Mutate(weights, header, random));
    const absl::Status status = Try();
    ++(status.ok() ? loaded : refused);
    if (!status.ok()) ExpectRefused(status, folder_.path(), "");
    if (HasFailure()) FAIL() << "mutation " << i;
  }
  EXPECT_GT(loaded, 10);
  EXPECT_GT(refused, 1000);
}

// Readers follow a value's nesting by recursion: too deep a file is refused before that.
TEST_F(SafetensorsTest, DeepOrBrokenTextFilesAreRefused) {
  TinyModelOptions options;
  ASSERT_TRUE(WriteTinyLlamaFolder(folder_.path(), options).ok());
  ASSERT_EQ(Try(), absl::OkStatus());
  constexpr int kDeep = 200'000;
  std::string deep = "{\"normalizer\":";
  for (int i = 0; i < kDeep; ++i) deep += R"({"type":"Sequence","normalizers":[)";
  for (int i = 0; i < kDeep; ++i) deep += "]}";
  deep += "}";
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    SCOPED_TRACE(name);
    const std::string good = Read(name);
    Write(name, deep);
    ExpectRefused(Try(), Path(name), "64 levels deep");
    Write(name, "{\"chat_template\":");
    ExpectRefused(Try(), Path(name), "is not valid JSON");
    if (good.empty()) {
      std::filesystem::remove(Path(name));
    } else {
      Write(name, good);
    }
  }
}

// A model without a tokenizer still says where generation ends.
TEST_F(SafetensorsTest, EndIdsAreKnownWithoutATokenizer) {
  const auto end_ids = [&]() -> absl::StatusOr<std::vector<int32_t>> {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder_.path()));
    EXPECT_EQ(checkpoint->tokenizer(), nullptr);
    return checkpoint->end_ids();
  };
  config_["eos_token_id"] = 2;
  Write("config.json", config_.dump());
  EXPECT_THAT(*end_ids(), testing::ElementsAre(2));
  Write("generation_config.json", R"({"eos_token_id": [3, 1]})");
  EXPECT_THAT(*end_ids(), testing::ElementsAre(3, 1));
  Write("generation_config.json", R"({"eos_token_id": 999999})");
  ExpectRefused(end_ids().status(), Path("generation_config.json"), "eos_token_id is 999999");
  Write("generation_config.json", "{}");
  EXPECT_THAT(*end_ids(), testing::ElementsAre(2));
}

TEST_F(SafetensorsTest, SamplingIsAsGenerationConfigRecommends) {
  const auto sampling = [&]() -> absl::StatusOr<std::map<std::string, double>> {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder_.path()));
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
TEST_F(SafetensorsTest, EndIdsOfEveryFileCount) {
  const auto path = WriteTinyLlamaFolder(folder_.path(), {});
  ASSERT_TRUE(path.ok()) << path.status();
  const auto end_ids = [&] {
    const auto checkpoint = Checkpoint::Open(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? (*checkpoint)->end_ids() : std::vector<int32_t>();
  };
  const int32_t turn = TinyEndOfTurn();
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn));
  Json config = Json::parse(Read("config.json"));
  config["eos_token_id"] = {5, turn};
  Write("config.json", config.dump());
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn, 5));
  Write("generation_config.json", R"({"eos_token_id": 7})");
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn, 7));
  Json tokenizer = Json::parse(Read("tokenizer_config.json"));
  tokenizer["eos_token"] = "<|endoftext|>";
  Write("tokenizer_config.json", tokenizer.dump());
  EXPECT_THAT(end_ids(), testing::ElementsAre(turn - 2, 7, turn));
}

TEST_F(SafetensorsTest, MistralsWindowIsOfAllLayers) {
  config_["architectures"] = {"MistralForCausalLM"};
  for (const Json& window : {Json(8), Json(nullptr)}) {
    config_["sliding_window"] = window;
    Write("config.json", config_.dump());
    const auto checkpoint = Checkpoint::Open(folder_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const ModelConfig& config = (*checkpoint)->config();
    EXPECT_EQ(config.context, 16);
    EXPECT_EQ(config.RingLayers(0, config.layers), window.is_null() ? 0 : config.layers);
  }
}

}  // namespace
}  // namespace treadle
