// Mixtures of experts: what their files may say, and that a row's result is its own.
#include "models/architectures/experts.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "kernels/cpu/cpu_backend.h"
#include "models/architectures/deepseek.h"
#include "models/architectures/glm4.h"
#include "models/architectures/granite.h"
#include "models/architectures/lfm2.h"
#include "models/architectures/qwen35.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/support/assert_ok.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

using Experts = QuantizeCheckpointTest;

std::unique_ptr<Backend> Cpu(ComputeMode compute, int threads) {
  return CreateCpuBackend({.threads = threads, .compute = compute}).value();
}

// N1 and N2: in chunks of other rows, and with other threads, the same bits.
TEST_F(Experts, ARowsResultIsItsOwn) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 60; ++i) ids.push_back(i * i * 31 % TinyVocabulary());
  for (const Architecture* architecture :
       {&kMixtral, &kQwen3Moe, &kQwen2Moe, &kQwen35Moe, &kQwen3Next, &kGlm4Moe, &kMiniMaxM2,
        &kLfm2Moe, &kGraniteHybridMoe, &kDeepseek2, &kDeepseek3}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint,
                         Checkpoint::Open(TinyGguf(*architecture, Options(true))));
    for (const auto& [compute, weights] : {std::pair(ComputeMode::kExact, "nf4"),
                                           {ComputeMode::kInt16, "nf4"},
                                           {ComputeMode::kInt8, "q8_0"},
                                           {ComputeMode::kAuto, "int8"}}) {
      SCOPED_TRACE(Str(architecture->name, " ", weights, " ", Name(compute)));
      const auto logits = [&, compute = compute, weights = weights](int64_t chunk, int threads) {
        auto model =
            TeacherForcing::Create(*checkpoint, Cpu(compute, threads),
                                   {.max_tokens = 60, .chunk = chunk, .weights = Plan(weights)})
                .value();
        return model->Logits(ids);
      };
      const std::vector<float> whole = logits(60, 2);
      EXPECT_EQ(whole, logits(7, 3));
      EXPECT_EQ(whole, logits(1, 1));
    }
  }
}

// A NaN row changes no other row, and every row goes to an expert.
TEST(Route, SendsNaNToExperts) {
  for (const bool normalize : {false, true}) {
    for (const auto& backend : {CreateReferenceBackend(), Cpu(ComputeMode::kAuto, 1)}) {
      float logits[3][4] = {{NAN, NAN, NAN, NAN}, {1, NAN, 3, 3}, {-INFINITY, 2, INFINITY, NAN}};
      float ids[3][4], weights[3][4];
      const auto rows = [](auto& values) { return DenseTensor(values, DType::kF32, 3, 4); };
      backend->Route(rows(logits), {.normalize = normalize}, rows(ids), rows(weights));
      EXPECT_THAT(ids[0], ElementsAre(0, 1, 2, 3)) << backend->name();
      EXPECT_THAT(ids[1], ElementsAre(2, 3, 0, 1)) << backend->name();
      EXPECT_THAT(ids[2], ElementsAre(2, 1, 0, 3)) << backend->name();
      for (const float weight : weights[0]) EXPECT_TRUE(std::isnan(weight)) << backend->name();
    }
  }
}

// A .gguf file whose key says another number.
std::string WithNumber(std::string bytes, const std::string& key, uint32_t value) {
  const size_t at = bytes.find(key);
  TREADLE_CHECK(at != std::string::npos);
  bytes.replace(at + key.size() + sizeof(uint32_t), sizeof(value),
                reinterpret_cast<const char*>(&value), sizeof(value));
  return bytes;
}

TEST_F(Experts, NumbersThatDoNotFitAGgufFileAreRefused) {
  struct Row {
    const Architecture& architecture;
    const char* key;
    uint32_t value;
    const char* message;
  };
  for (const Row& row : {
           Row{kMixtral, "llama.expert_count", 4,
               "tensor 'blk.0.ffn_gate_exps.4.weight' is of expert '4', expected 0 to 3"},
           Row{kMixtral, "llama.expert_count", 6, "has tensors of 5 experts, expected 6"},
           Row{kMixtral, "llama.expert_count", 5000, "experts is 5000, expected 1 to 4096"},
           Row{kMixtral, "llama.expert_count", 0, "tensor 'blk.0.ffn_gate.weight' is missing"},
           Row{kMixtral, "llama.expert_used_count", 6, "experts per token is 6, expected 1 to 5"},
           Row{kMixtral, "llama.expert_used_count", 0,
               "llama.expert_used_count is 0, expected at least 1"},
           Row{kMixtral, "llama.expert_used_coun", 1,
               "metadata 'llama.expert_used_count' is missing"},
           Row{kMixtral, "llama.feed_forward_length", 64,
               "tensor 'blk.0.ffn_gate_exps.0.weight' has shape [128, 64], expected [64, 64]"},
           Row{kQwen3Moe, "qwen3moe.expert_count", 0,
               "qwen3moe.expert_count is 0, expected at least 1"},
       }) {
    const std::string path = TinyGguf(row.architecture, Options(true));
    const std::string name = std::filesystem::path(path).filename().string();
    std::string bytes = Read("in/" + name);
    if (std::string_view(row.key).ends_with("coun")) {
      bytes[bytes.find(row.key) + std::string_view(row.key).size()] = 'x';
    } else {
      bytes = WithNumber(bytes, row.key, row.value);
    }
    Write("in/" + name, bytes);
    ExpectRefused(Load(path), path, row.message);
  }
}

TEST_F(Experts, NumbersThatDoNotFitAFolderAreRefused) {
  const std::string folder = TinyFolder(kQwen3Moe, Options(true));
  const Json config = Json::parse(Read("in/config.json"));
  struct Row {
    Json change;
    const char* message;
  };
  for (const Row& row : {
           Row{{{"num_experts", 6}}, "has tensors of 5 experts, expected 6"},
           Row{{{"num_experts", 3}},
               "tensor 'model.layers.0.mlp.experts.3.down_proj.weight' is of expert '3', expected "
               "0 to 2"},
           Row{{{"num_experts", nullptr}}, "num_experts is missing, expected a positive integer"},
           Row{{{"num_experts_per_tok", 6}}, "experts per token is 6, expected 1 to 5"},
           Row{{{"num_experts_per_tok", 0}}, "num_experts_per_tok is 0"},
           Row{{{"moe_intermediate_size", 64}},
               "tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' has shape [128, 64], "
               "expected [64, 64]"},
           Row{{{"norm_topk_prob", 1}}, "norm_topk_prob is 1, expected true or false"},
           Row{{{"decoder_sparse_step", 2}}, "decoder_sparse_step is 2, expected 1"},
           Row{{{"mlp_only_layers", {0}}}, "mlp_only_layers is [0], expected []"},
       }) {
    Json changed = config;
    changed.update(row.change);
    Write("in/config.json", changed.dump());
    ExpectRefused(Load(folder), folder, row.message);
  }
  Write("in/config.json", config.dump());
  EXPECT_EQ(Load(folder), absl::OkStatus());
  Safetensors file = Safetensors::Parse(Read("in/model.safetensors"));
  const char* const lost = "model.layers.1.mlp.experts.2.up_proj.weight";
  file.header.erase(lost);
  Write("in/model.safetensors", file.Bytes());
  ExpectRefused(Load(folder), folder, Str("tensor '", lost, "' is missing").c_str());
  // Facts that a .gguf file cannot say.
  ExpectRefused(Make(folder, Path("out.gguf"), "keep").status(), folder,
                "'blk.1.ffn_up_exps.3.weight' comes where that of expert 2 is expected");
}

// A copy of a checkpoint of tests/testdata, as `change` leaves its config.json.
std::string Changed(const std::string& name, const std::string& out, const Json& change) {
  const std::string in = Str(TREADLE_TESTDATA "/models/", name);
  std::filesystem::copy(
      in, out,
      std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  Json config = Json::parse(std::ifstream(in + "/config.json"));
  config.update(change);
  std::ofstream(out + "/config.json") << config;
  return out;
}

// Layers behind those that the model has are of a head that guesses; the rest is read.
TEST_F(Experts, LayersBehindTheModelsAreLeftAside) {
  const std::string folder = Changed("glm4moe", folder_.Folder("in"), {{"num_hidden_layers", 2}});
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(folder));
  EXPECT_THAT(checkpoint->left_aside(), ElementsAre("layers.2"));
  EXPECT_EQ(Load(folder), absl::OkStatus());
  ExpectSameBits(folder, ".gguf", "keep");
}

TEST_F(Experts, RoutersThatAreNotComputedAreRefused) {
  for (const auto& [change, message] :
       {std::pair(Json{{"n_group", 2}}, "n_group is 2, expected 1"),
        {Json{{"n_shared_experts", 2}}, "n_shared_experts is 2, expected 1"},
        {Json{{"routed_scaling_factor", 0}}, "routed_scaling_factor is 0, expected at least 1e-06"},
        {Json{{"first_k_dense_replace", 2}},
         "tensor 'model.layers.1.mlp.gate_proj.weight' is missing"}}) {
    const std::string folder = Changed("glm4moe", folder_.Folder("in"), change);
    ExpectRefused(Load(folder), folder, message);
  }
  const std::string gguf = TREADLE_TESTDATA "/models/glm4moe/model.gguf";
  for (const auto& [key, value, message] :
       {std::tuple("glm4moe.expert_group_count", 4, "expert_group_count is 4, expected 1"),
        {"glm4moe.expert_gating_func", 1, "expert_gating_func is 1, expected 2"},
        {"glm4moe.expert_shared_count", 2, "expert_shared_count is 2, expected 1"}}) {
    const std::string bytes = ReadWhole(gguf);
    Write("changed.gguf", WithNumber(bytes, key, static_cast<uint32_t>(value)));
    ExpectRefused(Load(Path("changed.gguf")), Path("changed.gguf"), message);
  }
}

// As llama.cpp wrote them before it had tensors of all experts, and as it does now.
TEST_F(Experts, GgufFilesOfBothAges) {
  GgufWriter writer;
  writer.AddString("general.architecture", "llama");
  const std::string floats(2 * 3 * 4, '\0');
  const std::string all = floats + std::string(floats.size(), '\1');
  writer.AddTensor("blk.0.ffn_up.1.weight", {2, 3}, 0, floats);
  writer.AddTensor("blk.0.ffn_up.weight", {2, 3}, 0, floats);
  writer.AddTensor("blk.0.ffn_down_exps.weight", {2, 2, 3}, 0, all);
  Write("both.gguf", writer.Bytes());
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("both.gguf")));
  std::vector<std::string> names;
  for (const StoredTensor& tensor : file->tensors()) {
    names.push_back(tensor.name);
    EXPECT_THAT(tensor.shape, ElementsAre(2, 3)) << tensor.name;
    EXPECT_EQ(tensor.bytes, floats.size()) << tensor.name;
  }
  EXPECT_THAT(names, ElementsAre("blk.0.ffn_up_exps.1.weight", "blk.0.ffn_up.weight",
                                 "blk.0.ffn_down_exps.0.weight", "blk.0.ffn_down_exps.1.weight"));
  EXPECT_EQ(file->tensors()[3].data[0], std::byte{1});

  GgufWriter many;
  many.AddTensor("blk.0.ffn_up_exps.weight", {4097, 1, 1}, 0, std::string(4097 * 4, '\0'));
  Write("many.gguf", many.Bytes());
  EXPECT_THAT(GgufFile::Read(Path("many.gguf")).status().message(),
              HasSubstr("'blk.0.ffn_up_exps.weight' is of 4097 experts, expected up to 4096"));
}

// A preset spares the router, in both containers; experts are a group of their own.
TEST_F(Experts, WeightsByRole) {
  for (const auto& write : {WriteTinyGguf, WriteTinyFolder}) {
    const std::string path =
        Tiny([&](const auto& in, const auto& o) { return write(kQwen3Moe, in, o); }, Options(true));
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
    const WeightPlan plan = Plan("q8_0,experts=nf4");
    int experts = 0;
    for (const StoredTensor& tensor : checkpoint->tensors()) {
      const TensorName name = ParseTensorName(kQwen3Moe, checkpoint->kind(), tensor.name);
      if (tensor.shape.size() != 2) continue;
      const QuantizeSpec* const to = plan.For(tensor.name, false);
      const bool outside = !InLayer(name.row->part) || name.row->part == Part::kRouter;
      EXPECT_EQ(to == nullptr ? "" : to->name, outside                     ? ""
                                               : InExperts(name.row->part) ? "nf4"
                                                                           : "q8_0")
          << tensor.name;
      experts += name.expert.empty() ? 0 : 1;
    }
    EXPECT_EQ(experts, 2 * 5 * 3);
  }
}

// One tensor of a .gguf file has one format.
TEST_F(Experts, ExpertsOfOneGgufTensorShareAFormat) {
  const std::string folder = TinyFolder(kMixtral, Options(true));
  EXPECT_THAT(Make(folder, Path("out.gguf"), "q8_0,experts.3.w1=q4_0").status().message(),
              HasSubstr("'blk.0.ffn_gate_exps.3.weight' in q4_0, expected q8_0"));
}

// Every row of every layer goes to its experts, and is counted there.
TEST_F(Experts, UseIsCounted) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(TinyGguf(kMixtral, Options(true))));
  const auto backend = Cpu(ComputeMode::kAuto, 1);
  LoadOptions load;
  load.max_batch_tokens = 16;
  ASSERT_OK_AND_ASSIGN(const auto model, Model::Load(*checkpoint, *backend, load));
  const ModelConfig& config = checkpoint->config();
  const KvLayout layout = {config.kv_heads, config.head_dim, 16, 1, DType::kF32};
  std::vector<std::byte> pages(static_cast<size_t>(2 * layout.PageBytes()));
  std::byte* const layers[] = {pages.data(), pages.data() + layout.PageBytes()};
  std::vector<float> hidden(static_cast<size_t>(16 * config.hidden));
  std::vector<int32_t> ids, positions;
  const int32_t page = 0;
  for (int32_t i = 0; i < 16; ++i) ids.push_back(i * 13), positions.push_back(i);
  const SequenceSpan sequence = {0, 16, 0, &page};
  for (int repetition = 0; repetition < 2; ++repetition) {
    ASSERT_TRUE(model
                    ->Forward({ids, positions, std::span(&sequence, 1)}, {layout, layers}, nullptr,
                              DenseTensor(hidden.data(), DType::kF32, 16, config.hidden))
                    .ok());
    const ExpertUse& use = model->expert_use();
    EXPECT_EQ(use.layers, 2);
    EXPECT_EQ(use.rows, 2 * 16 * 2);
    EXPECT_GE(use.used, 2 * 2);
    EXPECT_LE(use.used, 2 * 5);
    EXPECT_GE(use.most_rows * use.used, use.rows);
    EXPECT_LE(use.most_rows, 16);
  }
}

}  // namespace
}  // namespace treadle
