// Logits of small random checkpoints against transformers (tests/oracles/make_logit_oracles.py).
//
// The tolerance. The oracle is computed in float64; beside it lies E, how far transformers' own
// float32 logits are from it: fp32 rounding as this very model propagates it. Our sums run in one
// chain over k, a library's in 16 lanes or more; rounding errors of a chain grow with the square
// root of its length, so ours may be sqrt(16) times theirs. Both are maxima over a few thousand
// logits of different samples: another factor of 2. Hence 8 E.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/reference_backend.h"
#include "models/architectures/architecture.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/assert_ok.h"
#include "tests/support/identifier.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

constexpr double kToleranceFactor = 8;
constexpr size_t kPrompt = 9;  // as in the script

struct Device {
  const char* name;
  std::optional<CpuIsa> isa;  // unset: the reference backend
};
constexpr Device kDevices[] = {
    {"reference", {}}, {"avx2", CpuIsa::kAvx2}, {"avx512", CpuIsa::kAvx512}};

bool RunsHere(const Device& device) {
  const std::vector<CpuIsa> here = SupportedIsas();
  return !device.isa || std::ranges::find(here, *device.isa) != here.end();
}

std::unique_ptr<Backend> MakeBackend(const Device& device, int threads) {
  if (!device.isa) return CreateReferenceBackend();
  CpuBackendOptions options;
  options.threads = threads;
  options.compute = ComputeMode::kExact;
  options.isa = device.isa;
  return CreateCpuBackend(options).value();
}

std::vector<float> Logits(const std::string& path, const Device& device, int64_t chunk,
                          std::span<const int32_t> ids) {
  const auto checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return {};
  const auto model =
      TeacherForcing::Create(**checkpoint, MakeBackend(device, 2),
                             {.max_tokens = static_cast<int64_t>(ids.size()), .chunk = chunk});
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? (*model)->Logits(ids) : std::vector<float>();
}

struct Oracle {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> greedy;  // what transformers goes on with, after the first kPrompt of them
  std::vector<float> logits;    // [tokens * vocab]
  double tolerance = 0;
};

Oracle ReadOracle(const std::string& folder) {
  const nlohmann::json json = nlohmann::json::parse(std::ifstream(folder + "/oracle.json"));
  Oracle oracle;
  oracle.token_ids = json["token_ids"].get<std::vector<int32_t>>();
  oracle.greedy = json["greedy"].get<std::vector<int32_t>>();
  oracle.tolerance = kToleranceFactor * json["fp32_rounding"].get<double>();
  oracle.logits = ReadFloats(folder + "/logits.f32");
  return oracle;
}

// Largest difference; and the same argmax wherever the oracle's lead exceeds twice the tolerance.
void ExpectSameLogits(std::span<const float> found, const Oracle& oracle) {
  ASSERT_EQ(found.size(), oracle.logits.size());
  const size_t vocab = found.size() / oracle.token_ids.size();
  double largest = 0;
  int decided = 0;
  for (size_t position = 0; position < oracle.token_ids.size(); ++position) {
    const auto row = found.subspan(position * vocab, vocab);
    const std::span wanted = std::span(oracle.logits).subspan(position * vocab, vocab);
    for (size_t i = 0; i < vocab; ++i) {
      ASSERT_TRUE(std::isfinite(row[i])) << "position " << position << ", token " << i;
      largest = std::max(largest, std::abs(double{row[i]} - double{wanted[i]}));
    }
    std::vector<float> sorted(wanted.begin(), wanted.end());
    std::ranges::sort(sorted, std::greater());
    if (sorted[0] - sorted[1] <= 2 * oracle.tolerance) continue;
    ++decided;
    EXPECT_EQ(ArgMax(row), ArgMax(wanted)) << "position " << position;
  }
  EXPECT_LE(largest, oracle.tolerance);
  EXPECT_GT(decided, static_cast<int>(oracle.token_ids.size()) / 2);
}

class TransformersLogits : public ::testing::TestWithParam<std::tuple<const char*, Device>> {};

TEST_P(TransformersLogits, AreOurs) {
  const auto& [name, device] = GetParam();
  if (!RunsHere(device)) GTEST_SKIP() << "this processor has no " << device.name;
  const std::string folder = std::string(TREADLE_TESTDATA "/models/") + name;
  const Oracle oracle = ReadOracle(folder);
  for (const int64_t chunk : {int64_t{64}, int64_t{7}}) {
    SCOPED_TRACE(Str("chunks of ", chunk));
    ExpectSameLogits(Logits(folder, device, chunk, oracle.token_ids), oracle);
  }
}

// .gguf files of the same models, as the gguf package or llama.cpp's converter writes them.
TEST(GgufPackage, FilesGiveTheLogitsOfTransformers) {
  for (const char* name : {"qwen2-window",
                           "qwen3-tied",
                           "gptneox",
                           "falcon-grouped",
                           "phi3-long",
                           "gemma3",
                           "bloom",
                           "mixtral",
                           "qwen3moe",
                           "gptoss",
                           "smollm3-tied",
                           "granite",
                           "granite4",
                           "olmo2",
                           "olmo3",
                           "seed-oss",
                           "glm4",
                           "exaone4",
                           "ernie45",
                           "hunyuan",
                           "ministral3",
                           "phi4-mini",
                           "gemma4",
                           "gemma4-large",
                           "apertus",
                           "qwen35",
                           "qwen2moe",
                           "qwen35moe",
                           "qwen3next",
                           "glm4moe",
                           "minimax-m2",
                           "lfm2",
                           "lfm2moe",
                           "granitehybrid",
                           "granitehybridmoe",
                           "deepseek2",
                           "deepseek2-grouped",
                           "deepseek3",
                           "glm47flash",
                           "gemma4moe",
                           "nemotron-h",
                           "nemotron-h-moe",
                           "llama4"}) {
    SCOPED_TRACE(name);
    const std::string folder = std::string(TREADLE_TESTDATA "/models/") + name;
    const Oracle oracle = ReadOracle(folder);
    ExpectSameLogits(Logits(folder + "/model.gguf", kDevices[0], 7, oracle.token_ids), oracle);
  }
}

// Each token is the largest logit behind those before it.
TEST_P(TransformersLogits, GiveTheSameGreedyTokens) {
  const auto& [name, device] = GetParam();
  if (!RunsHere(device)) GTEST_SKIP() << "this processor has no " << device.name;
  const std::string folder = std::string(TREADLE_TESTDATA "/models/") + name;
  const Oracle oracle = ReadOracle(folder);
  std::vector<int32_t> ids(oracle.token_ids.begin(), oracle.token_ids.begin() + kPrompt);
  ids.insert(ids.end(), oracle.greedy.begin(), oracle.greedy.end());
  const std::vector<float> logits = Logits(folder, device, 7, ids);
  ASSERT_FALSE(logits.empty());
  const size_t vocab = logits.size() / ids.size();
  for (size_t next = kPrompt; next < ids.size(); ++next) {
    EXPECT_EQ(ArgMax(std::span(logits).subspan((next - 1) * vocab, vocab)), ids[next]) << next;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TransformersLogits,
    ::testing::Combine(
        ::testing::Values("llama-ungrouped", "llama-grouped", "llama-one-kv-head", "llama-scaled",
                          "llama-linear", "mistral", "gpt2", "gpt2-untied", "qwen2", "qwen2-window",
                          "qwen3", "qwen3-tied", "gptneox", "gptneox-sequential", "opt",
                          "opt-untied", "falcon", "falcon-grouped", "falcon-one-norm", "phi3-long",
                          "phi3-short", "phi3", "gemma3", "gemma3-scaled", "bloom",
                          "bloom-other-heads", "mistral-window", "qwen2-last-window", "mixtral",
                          "qwen3moe", "qwen3moe-plain", "gptoss", "gptoss-odd", "gptoss-plain",
                          "llama-yarn", "smollm3", "smollm3-tied", "granite", "granite-tied",
                          "granite4", "olmo2", "olmo3", "seed-oss", "glm4", "exaone4",
                          "exaone4-global", "ernie45", "hunyuan", "ministral3", "phi4-mini",
                          "gemma4", "gemma4-large", "apertus", "qwen35", "qwen35-tied", "qwen2moe",
                          "qwen35moe", "qwen3next", "glm4moe", "glm4moe-air", "minimax-m2", "lfm2",
                          "lfm2moe", "granitehybrid", "granitehybrid-rope", "granitehybridmoe",
                          "deepseek2", "deepseek2-grouped", "deepseek3", "glm47flash", "gemma4moe",
                          "nemotron-h", "nemotron-h-moe", "llama4", "llama4-tuned"),
        ::testing::ValuesIn(kDevices)),
    [](const auto& info) {
      return Identifier(Str(std::get<0>(info.param), "_", std::get<1>(info.param).name));
    });

// -- the two containers --------------------------------------------------------------------------

class TinyModels : public ::testing::Test {
 protected:
  std::string directory() const { return folder_.path(); }
  std::string folder() const { return folder_.Folder("folder"); }

  static std::vector<int32_t> RandomIds(size_t count) {
    std::mt19937 random(5);
    std::vector<int32_t> ids;
    while (ids.size() < count) {
      ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(TinyVocabulary())));
    }
    return ids;
  }

  const TestFolder folder_;
};

// The same weights, Q and K permuted and GPT-2's matrices transposed in one of them: the same bits.
TEST_F(TinyModels, GgufAndFolderGiveTheSameBits) {
  const std::vector<int32_t> ids = RandomIds(50);
  for (const Architecture& architecture : Architectures()) {
    for (const char* format : {"f32", "f16", "bf16"}) {
      for (const bool tied : {true, false}) {
        TinyModelOptions options;
        options.format = format;
        options.tied_head = tied;
        SCOPED_TRACE(Str(architecture.name, ", ", format, tied ? ", tied" : ", untied"));
        ASSERT_OK_AND_ASSIGN(const auto gguf, WriteTinyGguf(architecture, directory(), options));
        ASSERT_OK_AND_ASSIGN(const auto folder_path,
                             WriteTinyFolder(architecture, folder(), options));
        for (const Device& device : kDevices) {
          if (!RunsHere(device)) continue;
          const std::vector<float> one = Logits(gguf, device, 64, ids);
          const std::vector<float> other = Logits(folder_path, device, 64, ids);
          ASSERT_FALSE(one.empty());
          EXPECT_EQ(one, other) << device.name;
        }
      }
    }
  }
}

// N3: a pipeline split gives the same bits.
TEST_F(TinyModels, LayerRangesGiveWhatTheWholeModelGives) {
  for (const Architecture& architecture : Architectures()) {
    TinyModelOptions options;
    options.layers = 3;
    options.tied_head = !architecture.rotary;
    ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyGguf(architecture, directory(), options));
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
    const ModelConfig& config = checkpoint->config();
    const std::vector<int32_t> ids = RandomIds(20);
    const auto rows = static_cast<int64_t>(ids.size());
    std::vector<int32_t> positions;
    for (int32_t i = 0; i < rows; ++i) positions.push_back(i);
    const int32_t pages[] = {0, 1};
    const SequenceSpan sequence = {0, static_cast<int32_t>(rows), 0, pages};
    KvLayout layout = {config.kv_heads, config.head_dim, 16, 2, DType::kF32};
    layout.latent_dim = config.latent_dim;
    const KvLayout window_layout = {config.KvHeads(/*local=*/true), config.HeadDim(/*local=*/true),
                                    16, 2, DType::kF32};
    const auto options_of = [&](LayerRange range) {
      LoadOptions load;
      load.layers = range;
      load.max_batch_tokens = rows;
      return load;
    };
    const auto run = [&](std::initializer_list<LayerRange> ranges) {
      std::vector<float> hidden(static_cast<size_t>(rows * config.hidden));
      const Tensor tensor = DenseTensor(hidden.data(), DType::kF32, rows, config.hidden);
      std::vector<float> logits(static_cast<size_t>(rows * config.vocab));
      for (const LayerRange& range : ranges) {
        const auto backend = MakeBackend(kDevices[0], 1);
        const auto model = Model::Load(*checkpoint, *backend, options_of(range)).value();
        std::vector<std::vector<std::byte>> memory(
            static_cast<size_t>(config.layers),
            std::vector<std::byte>(
                static_cast<size_t>(2 * std::max(layout.PageBytes(), window_layout.PageBytes()))));
        std::vector<std::byte*> layers;
        for (auto& layer : memory) layers.push_back(layer.data());
        TREADLE_CHECK(model
                          ->Forward({ids, positions, {&sequence, 1}},
                                    {layout, layers, window_layout}, nullptr, tensor)
                          .ok());
        if (model->last_stage()) {
          model->Head(tensor, DenseTensor(logits.data(), DType::kF32, rows, config.vocab));
        }
      }
      return logits;
    };
    EXPECT_EQ(run({{0, 3}}), run({{0, 1}, {1, 2}, {2, 3}}));
  }
}

// Layers 3 to 5 read the K/V of layers 1 and 2: the stage that has them begins with 1 at the
// latest.
TEST(SharedKv, AStageHasTheLayersThatItReads) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(TREADLE_TESTDATA "/models/gemma4"));
  const auto backend = MakeBackend(kDevices[0], 1);
  LoadOptions load;
  load.max_batch_tokens = 4;
  for (const int64_t begin : {1, 2, 4}) {
    load.layers = {begin, 6};
    const auto model = Model::Load(*checkpoint, *backend, load);
    EXPECT_EQ(model.ok(), begin == 1) << begin;
    if (begin == 1) continue;
    EXPECT_THAT(std::string(model.status().message()),
                HasSubstr(Str("layers ", begin, " to 6 read the K/V of layer ", begin / 2,
                              ", expected a range that begins with 0 to 1")));
  }
}

TEST(SlidingWindow, IsOfTheLayersThatTheFileNames) {
  const std::pair<const char*, std::vector<bool>> rows[] = {
      {"mistral-window", {true, true}},
      {"qwen2-last-window", {false, false, true}},
      {"gemma3", {true, false, true}},
      {"gptoss", {true, false}},
      {"gptoss-odd", {true, false, true}},
      {"olmo3", {true, false, true}},
      {"qwen2", {false, false}}};  // switched off
  for (const auto& [name, layers] : rows) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint,
                         Checkpoint::Open(Str(TREADLE_TESTDATA "/models/", name)));
    const ModelConfig& config = checkpoint->config();
    EXPECT_EQ(config.context, 96);
    std::vector<bool> local;
    for (int64_t layer = 0; layer < config.layers; ++layer) local.push_back(config.Local(layer));
    EXPECT_EQ(local, layers) << name;
  }
}

}  // namespace
}  // namespace treadle
