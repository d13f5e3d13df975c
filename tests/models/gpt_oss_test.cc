// Contents of gpt-oss' files: experts that share tensors, in floats and in MXFP4; and YaRN.
#include "models/architectures/gpt_oss.h"

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "models/checkpoints/gguf/gguf_file.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr int64_t kExperts = 5, kHidden = 64, kInner = 128;  // of the tiny model

std::string Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}
std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// All experts' rows [n, k] of a layer, in MXFP4 as OpenAI's files have it.
struct Coded {
  int64_t n, k;
  std::string blocks, scales;
  std::vector<float> values;  // [experts, n, k]

  Coded(int64_t rows, int64_t columns, std::mt19937& random) : n(rows), k(columns) {
    constexpr float kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int64_t group = 0; group < kExperts * n * k / 32; ++group) {
      const uint32_t exponent = 122 + random() % 3;
      scales += static_cast<char>(exponent);
      for (int i = 0; i < 32; ++i) {
        const uint32_t code = random() % 16;
        const float scale = std::ldexp(code < 8 ? 1.0f : -1.0f, static_cast<int>(exponent) - 127);
        values.push_back(scale * kMagnitudes[code % 8]);
        if (i % 2 == 0) blocks += static_cast<char>(code);
        if (i % 2 == 1) blocks.back() = static_cast<char>(blocks.back() | code << 4);
      }
    }
  }
  // [experts, k, n]
  std::vector<float> Transposed() const {
    std::vector<float> out;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t i = 0; i < k * n; ++i) out.push_back(values[(e * n + i % n) * k + i / n]);
    }
    return out;
  }
  // Every `step`th row of one expert.
  std::vector<float> Part(int64_t expert, int64_t step, int64_t first) const {
    std::vector<float> out;
    for (int64_t row = first; row < n; row += step) {
      const auto begin = values.begin() + (expert * n + row) * k;
      out.insert(out.end(), begin, begin + k);
    }
    return out;
  }
};

class GptOss : public QuantizeCheckpointTest {
 protected:
  enum class Kind { kSplit, kFloats, kMxFp4 };

  // The same model, its experts' values those that MXFP4 can hold.
  std::string Folder(Kind kind) const {
    const std::string folder = TinyFolder(kGptOss, Options(true));
    Safetensors file = Safetensors::Parse(Read("in/model.safetensors"));
    std::mt19937 random(3);
    for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
      const std::string experts = Str(layer, "mlp.experts.");
      Fuse(file, experts, Coded(2 * kInner, kHidden, random), "gate_up", {"gate", "up"}, kind);
      Fuse(file, experts, Coded(kHidden, kInner, random), "down", {"down"}, kind);
      if (kind == Kind::kSplit) continue;
      const std::string sinks = Str(layer, "self_attn.sinks");
      file.header[sinks] = file.header[sinks + ".weight"];
      file.header.erase(sinks + ".weight");
    }
    Write("in/model.safetensors", file.Bytes());
    if (kind != Kind::kMxFp4) return folder;
    Json config = Json::parse(Read("in/config.json"));
    config["quantization_config"] = {{"quant_method", "mxfp4"},
                                     {"modules_to_not_convert", {"model.embed_tokens"}}};
    Write("in/config.json", config.dump());
    return folder;
  }

  static void Fuse(Safetensors& file, const std::string& experts, const Coded& coded,
                   const std::string& fused, const std::vector<std::string>& parts, Kind kind) {
    const auto step = std::ssize(parts);
    std::vector<float> biases(static_cast<size_t>(kExperts * coded.n));
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t part = 0; part < step; ++part) {
        const std::string name = Str(experts, e, ".", parts[part], "_proj");
        file.Set(name + ".weight", "F32", {coded.n / step, coded.k},
                 Bytes(coded.Part(e, step, part)));
        const std::vector<float> bias = Floats(file.Tensor(name + ".bias"));
        for (int64_t i = 0; i < coded.n / step; ++i) {
          biases[e * coded.n + i * step + part] = bias[i];
        }
        if (kind == Kind::kSplit) continue;
        file.header.erase(name + ".weight");
        file.header.erase(name + ".bias");
      }
    }
    if (kind == Kind::kSplit) return;
    const std::string name = Str(experts, fused, "_proj");
    file.Set(name + "_bias", "F32", {kExperts, coded.n}, Bytes(biases));
    if (kind == Kind::kFloats) {
      file.Set(name, "F32", {kExperts, coded.k, coded.n}, Bytes(coded.Transposed()));
      return;
    }
    file.Set(name + "_blocks", "U8", {kExperts, coded.n, coded.k / 32, 16}, coded.blocks);
    file.Set(name + "_scales", "U8", {kExperts, coded.n, coded.k / 32}, coded.scales);
  }
};

TEST_F(GptOss, MxFp4IsWhatItsValuesAre) {
  const std::vector<float> wanted = Logits(Folder(Kind::kSplit), "");
  ASSERT_FALSE(wanted.empty());
  EXPECT_EQ(Logits(Folder(Kind::kFloats), ""), wanted);
  const std::string folder = Folder(Kind::kMxFp4);
  EXPECT_EQ(Logits(folder, ""), wanted);
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(folder));
  const StoredTensor* const up = checkpoint->Find("model.layers.1.mlp.experts.4.up_proj.weight");
  ASSERT_NE(up, nullptr);
  EXPECT_EQ(up->format->name, "mxfp4");
  EXPECT_THAT(up->shape, ElementsAre(kInner, kHidden));
}

// Into either container, as stored, as other blocks, and as what has constants.
TEST_F(GptOss, FusedExpertsAreWritten) {
  for (const Kind kind : {Kind::kFloats, Kind::kMxFp4}) {
    const std::string folder = Folder(kind);
    for (const char* weights : {"keep", "q8_0", "experts=q4_0", "f16"}) {
      ExpectSameBits(folder, ".gguf", weights);
    }
    for (const char* weights : {"keep", "nf4", "experts=int8"}) {
      ExpectSameBits(folder, "-folder", weights);
    }
  }
  const auto report = Make(Folder(Kind::kMxFp4), Path("kept.gguf"), "keep");
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("kept.gguf")));
  EXPECT_EQ(*file->Integer("general.file_type"), 38);
  EXPECT_EQ(*file->String("general.architecture"), "gpt-oss");
  const auto named =
      std::ranges::find(file->tensors(), "blk.1.ffn_up_exps.4.weight", &StoredTensor::name);
  ASSERT_NE(named, file->tensors().end());
  EXPECT_EQ(named->format->name, "mxfp4");
  ASSERT_OK_AND_ASSIGN(const auto other, Make(Path("kept.gguf"), Path("folder"), "keep"));
  EXPECT_THAT(other.notices, ::testing::Contains(HasSubstr("wants all experts of a layer in one")));
}

TEST_F(GptOss, WrongFilesSayWhatIsWrong) {
  const std::string folder = Folder(Kind::kMxFp4);
  const Safetensors good = Safetensors::Parse(Read("in/model.safetensors"));
  const std::string layer = "model.layers.1.", experts = layer + "mlp.experts.";
  struct Row {
    std::string tensor;
    const char* field;  // null: the tensor is lost
    Json value;
    std::string message;
  };
  for (const Row& row : {
           Row{experts + "gate_up_proj_scales",
               nullptr,
               {},
               "gate_up_proj_scales' is missing, expected U8 [2560] beside the codes"},
           Row{experts + "gate_up_proj_scales",
               "shape",
               {kExperts, 2, 2 * kInner},
               "gate_up_proj_scales' has shape [5, 2, 256], expected [5, 256, 2]"},
           Row{experts + "gate_up_proj_scales", "dtype", "I8",
               "gate_up_proj_scales' is I8 [5, 256, 2], expected U8 [2560]"},
           Row{experts + "down_proj_blocks", "dtype", "I8", "down_proj_blocks' is I8, expected U8"},
           Row{experts + "down_proj_blocks",
               "shape",
               {kExperts, kHidden, 4 * 16},
               "has shape [5, 64, 64], expected [experts, rows, groups, 16]"},
           Row{experts + "down_proj_blocks",
               "shape",
               {kExperts, kHidden, 4 * 2, 8},
               "has shape [5, 64, 8, 8], expected [experts, rows, groups, 16]"},
           Row{experts + "gate_up_proj_bias",
               "shape",
               {kExperts * 2 * kInner / 5, 5},
               "has shape [256, 5], expected [experts, rows], up to 4096 experts and even rows"},
           Row{experts + "gate_up_proj_bias", "dtype", "I32",
               "gate_up_proj_bias' is I32, expected F32, F16 or BF16"},
           Row{experts + "down_proj_bias",
               nullptr,
               {},
               "tensor 'model.layers.1.mlp.experts.0.down_proj.bias' is missing"},
           Row{experts + "down_proj_blocks",
               nullptr,
               {},
               "tensor 'model.layers.1.mlp.experts.0.down_proj.weight' is missing"},
           Row{layer + "self_attn.sinks",
               nullptr,
               {},
               "tensor 'model.layers.1.self_attn.sinks.weight' is missing"},
           Row{layer + "self_attn.sinks", "shape", {2, 2}, "has shape [2, 2], expected [4]"},
           Row{layer + "mlp.router.bias",
               nullptr,
               {},
               "tensor 'model.layers.1.mlp.router.bias' is missing"},
       }) {
    Safetensors bad = good;
    if (row.field == nullptr) {
      bad.header.erase(row.tensor);
    } else {
      bad.header[row.tensor][row.field] = row.value;
    }
    Write("in/model.safetensors", bad.Bytes());
    ExpectRefused(Load(folder), folder, row.message);
  }
  Write("in/model.safetensors", good.Bytes());
  const Json config = Json::parse(Read("in/config.json"));
  const std::pair<Json, const char*> fields[] = {
      {{{"num_local_experts", 6}}, "has tensors of 5 experts, expected 6"},
      {{{"num_local_experts", 4}}, "is of expert '4', expected 0 to 3"},
      {{{"swiglu_limit", 6.5}}, "swiglu_limit is 6.5, expected 7.0"},
      {{{"attention_bias", false}}, "attention_bias is false, expected true"},
      {{{"layer_types", {"full_attention", "sliding_attention"}}}, "layer_types is "}};
  for (const auto& [change, message] : fields) {
    Json changed = config;
    changed.update(change);
    Write("in/config.json", changed.dump());
    ExpectRefused(Load(folder), folder, message);
  }
  Write("in/config.json", config.dump());
  EXPECT_EQ(Load(folder), absl::OkStatus());
}

TEST_F(GptOss, YarnThatCannotBeIsRefused) {
  const std::string folder = TinyFolder(kLlama, Options(true));
  const Json config = Json::parse(Read("in/config.json"));
  const Json good = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
  const auto load = [&](const char* name, const Json& value) {
    Json changed = config;
    changed["rope_scaling"] = good;
    changed["rope_scaling"][name] = value;
    Write("in/config.json", changed.dump());
    return Load(folder);
  };
  EXPECT_EQ(load("factor", 4), absl::OkStatus());
  EXPECT_EQ(load("beta_fast", nullptr), absl::OkStatus());
  const std::tuple<const char*, Json, const char*> rows[] = {
      {"factor", 0.5, "rope scaling: factor is 0.5, expected 1 to"},
      {"factor", "4", "factor is \"4\", expected a number"},
      {"beta_slow", 0, "rope scaling: beta_slow is 0, expected"},
      {"beta_fast", 1, "rope scaling: beta_fast is 1, expected more than beta_slow, 1"},
      {"beta_fast", 1e30, "rope scaling: beta_fast is 1e+30, expected"},
      {"attention_factor", 0, "rope scaling: attention_factor is 0, expected"},
      {"original_max_position_embeddings", 0, "original_max_position_embeddings is 0, expected"},
      {"truncate", 3, "truncate is 3, expected true or false"},
      {"rope_theta", 1, "rope scaling: base is 1, expected more than 1"}};
  for (const auto& [name, value, message] : rows) {
    ExpectRefused(load(name, value), folder, message);
  }
}

// Factors that transformers works out of mscale, where nothing gives the factor itself; and what a
// .gguf file leaves out.
TEST_F(GptOss, YarnsAttentionFactor) {
  const std::string folder = TinyFolder(kLlama, Options(true));
  const Json config = Json::parse(Read("in/config.json"));
  const auto factor = [&](const Json& more) {
    Json changed = config;
    changed["rope_scaling"] = {{"type", "yarn"}, {"factor", 16.0}};
    changed["rope_scaling"].update(more);
    Write("in/config.json", changed.dump());
    const auto checkpoint = Checkpoint::Open(folder).value();
    const Yarn& yarn = *checkpoint->config().yarn;
    EXPECT_EQ(yarn.original_context, checkpoint->config().context);
    return yarn.attention_factor;
  };
  const double log = 0.1 * std::log(16.0);
  EXPECT_DOUBLE_EQ(factor({{"factor", 16.0}}), 1 + log);
  EXPECT_DOUBLE_EQ(factor({{"factor", 1.0}}), 1);
  EXPECT_DOUBLE_EQ(factor({{"mscale", 0.5}}), 1 + log);
  EXPECT_DOUBLE_EQ(factor({{"mscale", 0.5}, {"mscale_all_dim", 2.0}}),
                   (1 + 0.5 * log) / (1 + 2 * log));
  EXPECT_DOUBLE_EQ(factor({{"mscale", 0.5}, {"attention_factor", 3.0}}), 3);
  for (const Architecture* architecture : {&kLlama, &kGptOss}) {
    ASSERT_OK_AND_ASSIGN(
        const auto checkpoint,
        Checkpoint::Open(architecture == &kGptOss ? TREADLE_TESTDATA "/models/gptoss/model.gguf"
                                                  : TREADLE_TESTDATA "/models/llama-yarn"));
    const Yarn& yarn = *checkpoint->config().yarn;
    EXPECT_EQ(yarn.truncate, architecture->yarn_truncates);
    EXPECT_DOUBLE_EQ(yarn.attention_factor, 1 + 0.1 * std::log(yarn.factor));
  }
}

}  // namespace
}  // namespace treadle
