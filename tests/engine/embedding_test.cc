// Pooled hidden states against transformers.
//
// Its logits are the head's product with its final hidden states (last_hidden_state), and the
// matrices here have more rows than columns: a vector whose product with the head is the logits'
// mean is the mean of those states, and one whose product is a row of logits is that row's state.
// The tolerance is that of logits (tests/models/model_test.cc): products and means of what lies
// within it lie within it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "engine/kv/kv_slot_manager.h"
#include "engine/local_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/adapters/adapter_file.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/assert_ok.h"
#include "tests/support/identifier.h"
#include "tests/support/ranks/one_rank.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

constexpr double kToleranceFactor = 8;

struct Oracle {
  std::string model;          // folder
  std::vector<int32_t> ids;   // behind those of a soft prompt
  std::vector<float> logits;  // [ids, vocab]
  double tolerance = 0;
};

Oracle ReadOracle(const std::string& folder) {
  const nlohmann::json json = nlohmann::json::parse(std::ifstream(folder + "/oracle.json"));
  std::vector<int32_t> ids = json["token_ids"];
  const std::string base = json.value("base", "");
  return {base.empty() ? folder : TREADLE_TESTDATA "/models/" + base, std::move(ids),
          ReadFloats(folder + "/logits.f32"),
          kToleranceFactor * json["fp32_rounding"].get<double>()};
}

// adapter: null: none.
std::vector<float> Embedding(const Checkpoint& checkpoint, std::span<const int32_t> ids,
                             const std::shared_ptr<const AdapterFile>& adapter, Pooling pooling,
                             size_t chunk) {
  auto backend = *CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact});
  LoadOptions load;
  load.max_batch_tokens = 64;
  load.threads = 1;
  auto model = Model::Load(checkpoint, *backend, load).value();
  const auto length = static_cast<int32_t>(ids.size());
  const KvPaging paging = KvPaging::Of(model->config(), /*page_size=*/64,
                                       /*max_batch_tokens=*/64);
  KvSlotManager kv(paging.PagesFor(length), paging);
  SequencePages pages = std::move(kv.Admit(length, length, 1)->front());
  EngineRunner runner(*OneRankEngine(std::move(backend), std::move(model),
                                     {.max_batch_tokens = 64,
                                      .page_size = 64,
                                      .kv_pages = paging.PagesFor(length),
                                      .kv_dtype = DType::kF32}));
  IterationPlan plan =
      PlanOf(1, 0).Start(StartOf(1, length, pages[PageKind::kWhole], pages[PageKind::kWindow]));
  plan.starts[0].mean_pooling = pooling == Pooling::kMean;
  if (adapter) {
    EXPECT_EQ(runner.engine().LoadAdapter(adapter), absl::OkStatus());
    plan.starts[0].adapter = adapter->id();
  }
  for (size_t at = 0;; at += chunk) {
    const auto part = ids.subspan(at, std::min(chunk, ids.size() - at));
    const Step step = StepOf(1, static_cast<int32_t>(at), {part.begin(), part.end()});
    const bool last = at + part.size() == ids.size();
    plan.steps = {last ? HiddenOf(step) : step};
    runner.engine().Submit(plan);
    IterationResult result = runner.Next();
    if (last) return std::move(result.steps[0].outputs[0].hidden);
    plan = PlanOf(1, plan.iteration + 1);
  }
}

class TransformersStates : public testing::TestWithParam<const char*> {};

TEST_P(TransformersStates, ArePooled) {
  const bool soft = std::string_view(GetParam()).starts_with("soft-");
  const std::string folder = Str(TREADLE_TESTDATA, soft ? "/adapters/" : "/models/", GetParam());
  Oracle oracle = ReadOracle(folder);
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(oracle.model));
  std::shared_ptr<const AdapterFile> adapter;
  if (soft) {
    ASSERT_OK_AND_ASSIGN(const auto opened, AdapterFile::Open(folder, checkpoint->config()));
    adapter = opened;
    oracle.ids.insert(oracle.ids.begin(), static_cast<size_t>(adapter->virtual_tokens()), 0);
  }
  const auto begin = static_cast<size_t>(adapter ? adapter->virtual_tokens() : 0);  // of the text
  const int64_t vocab = checkpoint->config().vocab, hidden = checkpoint->config().hidden;
  const double divisor = checkpoint->config().logits_divisor;
  const StoredTensor* head = nullptr;
  for (const char* name :
       {"lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"}) {
    if (head == nullptr) head = checkpoint->Find(name);
  }
  ASSERT_NE(head, nullptr);
  ASSERT_GT(vocab, hidden);
  MatrixConstants constants;
  ASSERT_OK_AND_ASSIGN(const auto matrix, SourceOf(*head, vocab, hidden, constants));
  for (const Pooling pooling : {Pooling::kMean, Pooling::kLast}) {
    const std::vector<float> embedding = Embedding(*checkpoint, oracle.ids, adapter, pooling, 7);
    ASSERT_EQ(embedding.size(), static_cast<size_t>(hidden));
    EXPECT_EQ(embedding, Embedding(*checkpoint, oracle.ids, adapter, pooling, 64));
    const size_t first = pooling == Pooling::kMean ? begin : oracle.ids.size() - 1;
    double largest = 0, scale = 0;
    std::vector<float> row(static_cast<size_t>(hidden));
    for (int64_t token = 0; token < vocab; ++token) {
      DecodeSourceRow(matrix, token, row.data());
      double product = 0, wanted = 0;
      for (size_t i = 0; i < row.size(); ++i) product += double{row[i]} * double{embedding[i]};
      for (size_t i = first; i < oracle.ids.size(); ++i) {
        wanted += oracle.logits[i * static_cast<size_t>(vocab) + static_cast<size_t>(token)];
      }
      wanted *= divisor / static_cast<double>(oracle.ids.size() - first);
      largest = std::max(largest, std::abs(product - wanted));
      scale = std::max(scale, std::abs(wanted));
    }
    EXPECT_LE(largest, oracle.tolerance * divisor) << WordOf(kPoolings, pooling);
    EXPECT_GT(scale, 100 * oracle.tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(All, TransformersStates,
                         testing::Values("llama-grouped", "mistral", "mistral-window", "gpt2",
                                         "gpt2-untied", "qwen2", "qwen3", "qwen3-tied", "gemma3",
                                         "gemma3-scaled", "mixtral", "qwen3moe-plain", "granite",
                                         "olmo3", "exaone4", "glm4", "soft-llama", "soft-gemma3"),
                         [](const auto& info) { return Identifier(info.param); });

}  // namespace
}  // namespace treadle
