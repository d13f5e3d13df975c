// Adapters: logits against PEFT's (tests/oracles/make_adapter_oracles.py), and what is
// refused.
//
// The tolerance is that of the model's own logits (model_test.cc): 8 times fp32's rounding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"
#include "models/adapters/adapter_file.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/identifier.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string kAdapters = TREADLE_TESTDATA "/adapters/";
const std::string kModels = TREADLE_TESTDATA "/models/";

std::unique_ptr<Backend> MakeBackend(std::optional<CpuIsa> isa,
                                     ComputeMode compute = ComputeMode::kExact) {
  if (!isa) return CreateReferenceBackend();
  auto backend = CreateCpuBackend({.threads = 2, .compute = compute, .isa = isa});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

struct Oracle {
  std::string base;
  std::vector<int32_t> ids;
  std::vector<float> logits;  // [ids * vocab]
  double tolerance = 0;
  double effect = 0;  // the most that the adapter changes a logit
};

Oracle ReadOracle(const std::string& name) {
  std::ifstream description(kAdapters + name + "/oracle.json");
  const Json json = Json::parse(description);
  Oracle oracle = {.base = json["base"],
                   .ids = json["token_ids"],
                   .logits = {},
                   .tolerance = 8 * json["fp32_rounding"].get<double>(),
                   .effect = json["effect"]};
  std::ifstream file(kAdapters + name + "/logits.f32", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  oracle.logits.resize(bytes.size() / sizeof(float));
  std::memcpy(oracle.logits.data(), bytes.data(), bytes.size());
  return oracle;
}

std::vector<float> Logits(const std::string& model, const std::string& adapter,
                          std::unique_ptr<Backend> backend, int64_t chunk,
                          std::span<const int32_t> ids) {
  const auto checkpoint = Checkpoint::Open(model);
  TREADLE_CHECK(checkpoint.ok());
  const auto forcing =
      TeacherForcing::Create(**checkpoint, std::move(backend),
                             {.max_tokens = std::ssize(ids), .chunk = chunk, .adapter = adapter});
  EXPECT_TRUE(forcing.ok()) << forcing.status();
  return forcing.ok() ? (*forcing)->Logits(ids) : std::vector<float>();
}

double Largest(std::span<const float> found, std::span<const float> expected) {
  EXPECT_EQ(found.size(), expected.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    EXPECT_TRUE(std::isfinite(found[i]));
    largest = std::max(largest, std::abs(double{found[i]} - double{expected[i]}));
  }
  return largest;
}

class PeftLogits : public ::testing::TestWithParam<const char*> {};

TEST_P(PeftLogits, AreOurs) {
  const Oracle oracle = ReadOracle(GetParam());
  ASSERT_GT(oracle.effect, 100 * oracle.tolerance);
  const std::string model = kModels + oracle.base, adapter = kAdapters + GetParam();
  const auto reference = Logits(model, adapter, MakeBackend({}), 64, oracle.ids);
  EXPECT_LE(Largest(reference, oracle.logits), oracle.tolerance);
  std::vector<float> first;
  for (const CpuIsa isa : SupportedIsas()) {
    for (const int64_t chunk : {64, 7, 1}) {
      SCOPED_TRACE(Str(Name(isa), ", chunks of ", chunk));
      const auto found = Logits(model, adapter, MakeBackend(isa), chunk, oracle.ids);
      EXPECT_LE(Largest(found, oracle.logits), oracle.tolerance);
      if (first.empty()) first = found;
      EXPECT_EQ(found, first);  // whatever the chunks and the instruction set
    }
  }
}

// In plain float arithmetic, on an emulated GPU.
TEST_P(PeftLogits, AreThoseOfAGpu) {
  const Oracle oracle = ReadOracle(GetParam());
  const auto checkpoint = Checkpoint::Open(kModels + oracle.base);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  if ((*checkpoint)->config().latent_dim > 0) return;  // HasLatents
  auto gpu = cuda::MakeCudaBackend(cuda::Device::Open(0).value(), {.dtype = DType::kF32});
  const auto found =
      Logits(kModels + oracle.base, kAdapters + GetParam(), *std::move(gpu), 64, oracle.ids);
  EXPECT_LE(Largest(found, oracle.logits), oracle.tolerance);
}

// The base as a .gguf, whose rows of Q and K are in another order, and the adapter as llama.cpp's
// converter writes it.
TEST_P(PeftLogits, AreThoseOfGgufFiles) {
  const Oracle oracle = ReadOracle(GetParam());
  int found = 0;
  for (const std::string& model : {kModels + oracle.base, kModels + oracle.base + "/model.gguf"}) {
    for (const std::string& adapter :
         {kAdapters + GetParam(), kAdapters + GetParam() + "/adapter.gguf"}) {
      if (!std::filesystem::exists(model) || !std::filesystem::exists(adapter)) continue;
      SCOPED_TRACE(Str(model, " with ", adapter));
      const auto logits = Logits(model, adapter, MakeBackend({}), 64, oracle.ids);
      EXPECT_LE(Largest(logits, oracle.logits), oracle.tolerance);
      ++found;
    }
  }
  const std::string name = GetParam();
  EXPECT_EQ(found, name == "granite" || name == "qwen3" ? 4 : found);
}

INSTANTIATE_TEST_SUITE_P(All, PeftLogits,
                         ::testing::Values("llama", "llama-second", "llama-bf16", "qwen3", "gpt2",
                                           "gptneox", "gemma3", "granite", "phi3", "lfm2",
                                           "granitehybrid", "deepseek3", "soft-llama",
                                           "soft-gemma3", "soft-gemma4", "soft-granite",
                                           "soft-gpt2", "soft-qwen35"),
                         [](const auto& info) { return Identifier(info.param); });

// Factors of floats have 16 bits where activations have them: two of F16 lose 2^-11 of a product,
// here at most four times that of what the adapter changes.
TEST(AdapterFactors, HaveSixteenBitsUnlessExact) {
  class WithFloats final : public ForwardingBackend {
   public:
    using ForwardingBackend::ForwardingBackend;
    DType low_rank_type() const override { return DType::kF32; }
  };
  const Oracle oracle = ReadOracle("llama");
  std::vector<float> first;
  for (const CpuIsa isa : SupportedIsas()) {
    const auto run = [&](std::unique_ptr<Backend> backend) {
      return Logits(kModels + oracle.base, kAdapters + "llama", std::move(backend), 64, oracle.ids);
    };
    const auto found = run(MakeBackend(isa, ComputeMode::kInt16));
    const double lost =
        Largest(found, run(std::make_unique<WithFloats>(MakeBackend(isa, ComputeMode::kInt16))));
    EXPECT_GT(lost, 0);
    EXPECT_LE(lost, oracle.effect / (1 << 9));
    if (first.empty()) first = found;
    EXPECT_EQ(found, first);
  }
}

// -- what is refused -----------------------------------------------------------------------------

class AdapterFiles : public ::testing::Test {
 protected:
  AdapterFiles() {
    const auto checkpoint = Checkpoint::Open(kModels + "llama-grouped");
    TREADLE_CHECK(checkpoint.ok());
    config_ = (*checkpoint)->config();
    std::filesystem::copy(kAdapters + "llama", folder_ / "a");
  }
  absl::StatusOr<std::shared_ptr<const AdapterFile>> Open() const {
    return AdapterFile::Open(folder_ / "a", config_);
  }
  // With a setting in adapter_config.json; null: as it is.
  std::string Refusal(const char* key, const Json& value) const {
    Json json = Json::parse(folder_.Read("a/adapter_config.json"));
    json[key] = value;
    folder_.Write("a/adapter_config.json", json.dump());
    const auto opened = Open();
    return opened.ok() ? "" : std::string(opened.status().message());
  }
  // With the header of adapter_model.safetensors changed.
  std::string RefusalOf(const std::string& from, const std::string& to) const {
    std::string bytes = folder_.Read("a/adapter_model.safetensors");
    TREADLE_CHECK(from.size() == to.size() && bytes.find(from) != bytes.npos);
    bytes.replace(bytes.find(from), from.size(), to);
    folder_.Write("a/adapter_model.safetensors", bytes);
    const auto opened = Open();
    return opened.ok() ? "" : std::string(opened.status().message());
  }

  const TestFolder folder_;
  ModelConfig config_;
};

TEST_F(AdapterFiles, SayWhatTheyAre) {
  const auto adapter = Open();
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  EXPECT_EQ((*adapter)->rank(), 4);
  EXPECT_EQ((*adapter)->factors().size(), 14u);
  EXPECT_EQ((*adapter)->hash().size(), 64u);
  EXPECT_EQ((*adapter)->base(), "tests/testdata/models/llama-grouped");
  // Another setting is another adapter.
  const uint64_t id = (*adapter)->id();
  EXPECT_EQ(Refusal("lora_alpha", 7), "");
  EXPECT_NE((*Open())->id(), id);
}

TEST_F(AdapterFiles, OtherKindsAreRefusedByName) {
  EXPECT_THAT(Refusal("use_dora", true), AllOf(HasSubstr("use_dora is true"), HasSubstr("/a/")));
  Refusal("use_dora", false);
  EXPECT_THAT(Refusal("modules_to_save", {"lm_head"}),
              HasSubstr("modules_to_save is [\"lm_head\"]"));
  Refusal("modules_to_save", nullptr);
  EXPECT_THAT(Refusal("bias", "all"), HasSubstr("bias is \"all\", expected \"none\""));
  Refusal("bias", "none");
  EXPECT_THAT(Refusal("peft_type", "IA3"), HasSubstr("peft_type is \"IA3\", expected \"LORA\""));
  Refusal("peft_type", "LORA");
  EXPECT_THAT(Refusal("init_lora_weights", "pissa"), HasSubstr("init_lora_weights is \"pissa\""));
  Refusal("init_lora_weights", true);
  EXPECT_THAT(Refusal("alpha_pattern", {{"q_.*", 3}}), HasSubstr("alpha_pattern has 'q_.*': 3"));
  Refusal("alpha_pattern", nullptr);
  EXPECT_THAT(Refusal("lora_alpha", "x"), HasSubstr("lora_alpha is \"x\", expected a number"));
}

TEST_F(AdapterFiles, SoftPromptsSayWhatTheyAre) {
  std::filesystem::remove_all(folder_ / "a");
  std::filesystem::copy(kAdapters + "soft-llama", folder_ / "a");
  const auto adapter = Open();
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  EXPECT_EQ((*adapter)->virtual_tokens(), 11);
  EXPECT_EQ((*adapter)->memory(DType::kF16), 11u * 30 * sizeof(float));
  EXPECT_TRUE((*adapter)->factors().empty());
  EXPECT_THAT(Refusal("num_virtual_tokens", 10),
              HasSubstr("the soft prompt is [11, 30], expected [10, 30]"));
  EXPECT_THAT(Refusal("num_virtual_tokens", 0),
              HasSubstr("num_virtual_tokens is 0, expected 1 to"));
  EXPECT_THAT(Refusal("num_virtual_tokens", config_.context), HasSubstr("num_virtual_tokens is"));
  Refusal("num_virtual_tokens", 11);
  EXPECT_THAT(Refusal("token_dim", 31), HasSubstr("token_dim is 31, expected 30"));
  Refusal("token_dim", 30);
  EXPECT_THAT(Refusal("num_transformer_submodules", 2),
              HasSubstr("num_transformer_submodules is 2, expected 1"));
  Refusal("num_transformer_submodules", 1);
  EXPECT_THAT(Refusal("modules_to_save", {"lm_head"}), HasSubstr("modules_to_save is"));
  EXPECT_EQ(Refusal("modules_to_save", nullptr), "");
  config_.layer_embedding = 4;
  EXPECT_THAT(std::string(Open().status().message()),
              HasSubstr("is a soft prompt, and llama models with embeddings of their layers"));
  config_.layer_embedding = 0;
  EXPECT_THAT(RefusalOf("prompt_embeddings", "prompt_embeddingz"),
              HasSubstr("tensor 'prompt_embeddingz' is no soft prompt"));
  EXPECT_THAT(Refusal("peft_type", "LORA"), HasSubstr("lora_alpha is null, expected a number"));
}

TEST_F(AdapterFiles, TensorsThatFitNothingAreRefusedByName) {
  EXPECT_THAT(RefusalOf("layers.1.mlp.up_proj.lora_A", "layers.2.mlp.up_proj.lora_A"),
              HasSubstr("'model.layers.1.mlp.up_proj.weight' has one factor, expected two"));
  EXPECT_THAT(RefusalOf("layers.1.mlp.up_proj.lora_B", "layers.2.mlp.up_proj.lora_B"),
              HasSubstr("'model.layers.2.mlp.up_proj.weight' is no matrix of a llama model with 2 "
                        "layers that an adapter can change"));
}

// The two matrices that kv_b_proj is read as.
TEST(LatentAdapters, KeysAndValuesOfLatentsAreRefusedByName) {
  const TestFolder folder;
  std::filesystem::copy(kAdapters + "deepseek3", folder.Folder("a"),
                        std::filesystem::copy_options::recursive);
  const auto checkpoint = Checkpoint::Open(kModels + "deepseek3");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string bytes = folder.Read("a/adapter_model.safetensors");
  const std::string_view own = "q_a_proj";
  for (const std::string_view other : {"k_b_proj", "v_b_proj"}) {
    std::string changed = bytes;
    for (size_t at = 0; (at = changed.find(own, at)) != bytes.npos; ++at) {
      changed.replace(at, own.size(), other);
    }
    folder.Write("a/adapter_model.safetensors", changed);
    const auto opened = AdapterFile::Open(folder / "a", (*checkpoint)->config());
    EXPECT_THAT(std::string(opened.status().message()),
                HasSubstr(Str("self_attn.", other, ".weight' is no matrix of a deepseek3 model")));
  }
}

TEST_F(AdapterFiles, OfAnotherModelAreRefused) {
  config_.ffn_hidden += 1;
  const auto opened = Open();
  EXPECT_THAT(std::string(opened.status().message()),
              AllOf(HasSubstr("the factors of 'model.layers.0.mlp.down_proj.weight' are [4, 53]"),
                    HasSubstr("expected [4, 54] and [30, 4]")));
  EXPECT_TRUE(absl::IsNotFound(AdapterFile::Open(folder_ / "none", config_).status()));
}

TEST_F(AdapterFiles, AFileThatIsCutShortIsAnError) {
  const std::string bytes = folder_.Read("a/adapter_model.safetensors");
  for (const size_t size : {size_t{0}, size_t{7}, size_t{100}, bytes.size() - 1}) {
    folder_.Write("a/adapter_model.safetensors", bytes.substr(0, size));
    EXPECT_THAT(std::string(Open().status().message()), HasSubstr("adapter_model.safetensors"));
  }
}

}  // namespace
}  // namespace treadle
