// Models of named shapes: their sizes against published ones, their weights, and that they run.
#include "models/checkpoints/random/random_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "base/mapped_file.h"
#include "base/status.h"
#include "kernels/reference/reference_backend.h"
#include "models/checkpoints/inspect/inspect.h"
#include "tests/models/teacher_forcing.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<Checkpoint> Open(const std::string& shape) {
  auto checkpoint = Checkpoint::Open("random:" + shape);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

// Parameters as the models' own cards count them.
TEST(RandomCheckpoint, ParametersAsPublished) {
  struct Row {
    const char* shape;
    int64_t parameters;
  };
  for (const Row& row : {Row{"llama-3.1-8b", 8'030'261'248}, Row{"llama-3.2-1b", 1'235'814'400},
                         Row{"smollm2-135m", 134'515'008}, Row{"tinyllama-1.1b", 1'100'048'384},
                         Row{"qwen2.5-0.5b", 494'032'768}, Row{"qwen3-0.6b", 596'049'920},
                         Row{"gemma-3-270m", 268'098'176}, Row{"gpt2-124m", 124'439'808},
                         Row{"pythia-1.4b", 1'414'647'808}, Row{"opt-1.3b", 1'315'758'080},
                         Row{"falcon-7b", 6'921'720'704}, Row{"bloom-560m", 559'214'592},
                         Row{"phi-3-mini", 3'821'079'552}, Row{"mistral-7b", 7'241'732'096},
                         Row{"mixtral-8x7b", 46'702'792'704}, Row{"qwen3-30b-a3b", 30'532'122'624},
                         Row{"gpt-oss-20b", 20'914'757'184}}) {
    const auto checkpoint = Open(row.shape);
    ASSERT_NE(checkpoint, nullptr);
    const ModelReport report = Inspect(*checkpoint);
    EXPECT_EQ(report.parameters, row.parameters) << row.shape;
    EXPECT_EQ(report.weight_bytes, 2u * static_cast<uint64_t>(row.parameters)) << row.shape;
    EXPECT_EQ(report.kind, "random weights");
  }
  // "13B" and "3.3B" of them are active.
  EXPECT_EQ(Inspect(*Open("mixtral-8x7b")).parameters_per_token, 12'879'925'248);
  EXPECT_EQ(Inspect(*Open("qwen3-30b-a3b")).parameters_per_token, 3'353'032'704);
  // "3.61B", to which the card does not count the embedding.
  EXPECT_EQ(Inspect(*Open("gpt-oss-20b")).parameters_per_token - int64_t{201088} * 2880,
            3'608'307'264);
  // ORCA's Table 1 gives layers, hidden size and a rounded number.
  const ModelReport orca = Inspect(*Open("orca-13b"));
  EXPECT_EQ(std::lround(static_cast<double>(orca.parameters) * 1e-9), 13);
  EXPECT_EQ(orca.config.head_dim, 128);
}

// Whatever changes a size changes what weights depend on; a change to what is there does not.
TEST(RandomCheckpoint, TheRecipeTellsModelsApart) {
  const std::string small = "llama-3.2-1b,layers=2,hidden=64,heads=4,kv-heads=2,ffn=128,vocab=300";
  std::set<std::string> recipes = {Open(small)->recipe()};
  EXPECT_EQ(Open(small + ",layers=2")->recipe(), *recipes.begin());
  for (const char* change : {"layers=3", "hidden=128", "heads=2", "kv-heads=4", "ffn=256",
                             "vocab=301", "context=4096"}) {
    EXPECT_TRUE(recipes.insert(Open(Str(small, ",", change))->recipe()).second) << change;
  }
  // Another model's rotary embedding, and another architecture.
  const char* const sizes = ",layers=2,hidden=64,heads=4,kv-heads=4,ffn=128,vocab=300,context=512";
  for (const char* shape : {"llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "tinyllama-1.1b",
                            "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-270m", "gpt2-124m",
                            "qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x7b,experts=4"}) {
    EXPECT_TRUE(recipes.insert(Open(Str(shape, sizes))->recipe()).second) << shape;
  }
}

TEST(RandomCheckpoint, TheSameTextHasTheSameWeights) {
  const std::string shape = "llama-3.2-1b,layers=2,hidden=256,heads=4,kv-heads=2,ffn=512,vocab=700";
  const auto one = Open(shape), other = Open(shape);
  ASSERT_TRUE(one && other);
  ASSERT_EQ(one->tensors().size(), 2u + 2 * 9);
  for (size_t i = 0; i < one->tensors().size(); ++i) {
    const StoredTensor& a = one->tensors()[i];
    const StoredTensor& b = other->tensors()[i];
    ASSERT_EQ(a.bytes, b.bytes);
    EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes), 0) << a.name;
  }
  // Matrices of one shape differ from layer to layer.
  const StoredTensor* first = one->Find("blk.0.attn_q.weight");
  const StoredTensor* second = one->Find("blk.1.attn_q.weight");
  EXPECT_NE(std::memcmp(first->data, second->data, first->bytes), 0);
}

TEST(RandomCheckpoint, WeightsHaveTheSpreadOfAFreshModel) {
  const auto checkpoint = Open("llama-3.2-1b,layers=1");
  ASSERT_NE(checkpoint, nullptr);
  const std::vector<float> values = DecodeVector(*checkpoint->Find("blk.0.ffn_down.weight"));
  const auto count = static_cast<double>(values.size());  // 16.8 M, of which half are distinct
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  for (const float value : values) squares += double{value} * value;
  // Five standard errors of 8 M uniform numbers: of the mean 0.02 / sqrt(8e6), of the deviation
  // about a third of that in proportion.
  EXPECT_NEAR(mean, 0, 5 * 0.02 / std::sqrt(8e6));
  EXPECT_NEAR(std::sqrt(squares / count), 0.02, 5 * 0.02 / std::sqrt(8e6));
  const std::vector<float> gains = DecodeVector(*checkpoint->Find("blk.0.attn_norm.weight"));
  EXPECT_EQ(std::ranges::count(gains, 20.0f), 6);
  EXPECT_EQ(std::ranges::count(gains, 1.0f), 2048 - 6);
}

// 26 GB of weights lie in the address range of their largest matrix, and dropping pages loses none.
TEST(RandomCheckpoint, AllTensorsShareOneRange) {
  const auto checkpoint = Open("orca-13b");
  ASSERT_NE(checkpoint, nullptr);
  const std::byte *first = nullptr, *last = nullptr;
  uint64_t largest = 0;
  for (const StoredTensor& tensor : checkpoint->tensors()) {
    if (tensor.shape.size() < 2) continue;
    if (first == nullptr || tensor.data < first) first = tensor.data;
    last = std::max(last, tensor.data + tensor.bytes);
    largest = std::max(largest, tensor.bytes);
  }
  EXPECT_GT(checkpoint->file_bytes(), 25'000'000'000u);
  EXPECT_LT(static_cast<uint64_t>(last - first), largest + (32u << 20));

  const StoredTensor& embedding = *checkpoint->Find("token_embd.weight");
  const std::byte* const tail = embedding.data + embedding.bytes - 4096;
  const std::vector<std::byte> before(tail, tail + 4096);
  DropMappedPages(embedding.data, embedding.bytes);
  EXPECT_TRUE(std::ranges::equal(before, std::span(tail, 4096)));
  EXPECT_FALSE(std::ranges::all_of(before, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(RandomCheckpoint, RunsWithFiniteLogitsInEveryArchitectureAndFormat) {
  std::vector<int32_t> ids(24);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 37 % 300);
  for (const char* shape :
       {"llama-3.1-8b,layers=3,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "smollm2-135m,layers=2,hidden=192,heads=3,kv-heads=1,ffn=256,vocab=300,context=64",
        "qwen2.5-0.5b,layers=3,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "qwen3-0.6b,layers=3,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "gemma-3-270m,layers=6,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "gemma-4-e4b,layers=6,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "apertus-8b,layers=2,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64",
        "orca-13b,layers=3,hidden=128,heads=4,ffn=512,vocab=300,context=64",
        "pythia-1.4b,layers=3,hidden=128,heads=4,ffn=512,vocab=300,context=64",
        "phi-3-mini,layers=3,hidden=128,heads=4,kv-heads=2,ffn=512,vocab=300,context=64",
        "opt-1.3b,layers=3,hidden=128,heads=4,ffn=512,vocab=300,context=64",
        "bloom-560m,layers=3,hidden=128,heads=4,ffn=512,vocab=300,context=64",
        "falcon-7b,layers=3,hidden=128,heads=4,ffn=512,vocab=300,context=64",
        "gpt-oss-20b,layers=3,hidden=128,heads=4,kv-heads=2,ffn=256,vocab=300,context=64,"
        "experts=6"}) {
    for (const char* weights : {"", "nf4", "int8"}) {
      const auto checkpoint = Open(shape);
      ASSERT_NE(checkpoint, nullptr);
      TeacherForcing::Options options = {.max_tokens = 32, .chunk = 8};
      if (*weights != '\0') options.weights = WeightPlan::Parse(weights).value();
      auto model =
          TeacherForcing::Create(*checkpoint, CreateReferenceBackend(ComputeMode::kExact), options);
      ASSERT_TRUE(model.ok()) << shape << ": " << model.status();
      const std::vector<float> logits = (*model)->Logits(ids);
      ASSERT_EQ(logits.size(), ids.size() * 300);
      EXPECT_TRUE(std::ranges::all_of(logits, [](float x) { return std::isfinite(x); })) << shape;
      const auto [low, high] = std::ranges::minmax(logits);
      EXPECT_GT(high - low, 0.1f) << shape << " " << weights;
      EXPECT_LT(std::max(high, -low), 100.0f) << shape << " " << weights;
    }
  }
}

TEST(RandomCheckpoint, WrongShapesSayWhatIsWrong) {
  struct Row {
    const char* shape;
    const char* message;
  };
  for (const Row& row :
       {Row{"llama-9", "random:llama-9: no shape is named 'llama-9', expected one of llama-3.1-8b"},
        Row{"", "no shape is named ''"}, Row{"gpt2-124m,width=3", "has 'width=3', expected NAME="},
        Row{"gpt2-124m,layers=x", "layers is 'x', expected a number"},
        Row{"gpt2-124m,layers=", "layers is '', expected a number"},
        Row{"gpt2-124m,", "has '', expected NAME="},
        Row{"gpt2-124m,layers=0", "layers is 0, expected 1 to"},
        Row{"gpt2-124m,heads=0", "768 and 0 heads, expected a multiple"},
        Row{"gpt2-124m,hidden=770", "770 and 12 heads, expected a multiple"},
        Row{"llama-3.1-8b,kv-heads=3", "32 heads cannot share 3 K/V heads"},
        Row{"gpt2-124m,layers=99999999999999999999", "expected a number"}}) {
    const auto checkpoint = Checkpoint::Open(Str("random:", row.shape));
    ASSERT_FALSE(checkpoint.ok()) << row.shape;
    EXPECT_THAT(std::string(checkpoint.status().message()), HasSubstr(row.message));
  }
}

}  // namespace
}  // namespace treadle
