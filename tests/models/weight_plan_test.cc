// Which matrix a plan converts, and to what.
#include "models/checkpoints/weight_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

std::string FormatOf(const std::string& plan, const std::string& tensor, bool tied = false) {
  const auto parsed = WeightPlan::Parse(plan);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok()) return "";
  const QuantizeSpec* spec = parsed->For(tensor, tied);
  return spec == nullptr ? "keep" : spec->name;
}

// Against llama-quantize itself (tests/oracles/make_mixture_oracles.py).
TEST(WeightPlanTest, MixturesAreLlamaQuantizes) {
  const auto oracle =
      nlohmann::json::parse(std::ifstream(TREADLE_TESTDATA "/mixture_oracles.json"));
  const TestFolder folder;
  std::map<std::string, std::unique_ptr<Checkpoint>> models;  // by shape
  for (const auto& [mixture, shapes] : oracle.items()) {
    const WeightPlan plan = WeightPlan::Parse(mixture).value();
    for (const auto& [shape, types] : shapes.items()) {
      SCOPED_TRACE(mixture + ": " + shape);
      TinyModelOptions options = {.tokenizer = false};
      int tied = 0;
      std::istringstream(shape) >> options.layers >> options.heads >> options.kv_heads >>
          options.hidden >> tied;
      options.ffn_hidden = 2 * options.hidden;
      options.tied_head = tied != 0;
      std::unique_ptr<Checkpoint>& checkpoint = models[shape];
      if (checkpoint == nullptr) {
        const std::string path = WriteTinyLlamaGguf(folder.Folder(shape), options).value();
        checkpoint = Checkpoint::Open(path).value();
      }
      const auto format = [&](const std::string& tensor) -> std::string {
        const StoredTensor* const stored = checkpoint->Find(tensor);
        if (stored == nullptr) return "";
        const QuantizeSpec* const to = plan.For(*stored, *checkpoint);
        return to == nullptr ? "keep" : to->name;
      };
      EXPECT_EQ(format("token_embd.weight"), types[0].get<std::string>());
      EXPECT_EQ(format("output.weight"), types[1].get<std::string>());
      for (int64_t layer = 0; layer < options.layers; ++layer) {
        std::string found;
        for (const char* name :
             {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
          found += (found.empty() ? "" : " ") + format(Str("blk.", layer, ".", name, ".weight"));
        }
        EXPECT_EQ(found, types[2 + layer].get<std::string>()) << layer;
      }
    }
  }
  EXPECT_EQ(oracle.size(), 3u);
}

TEST(WeightPlanTest, AMixtureIsOfTheWholeModel) {
  EXPECT_THAT(std::string(WeightPlan::Parse("q4_k_x").status().message()),
              HasSubstr("or a mixture: q3_k_m, q4_k_m, q5_k_m"));
  EXPECT_THAT(std::string(WeightPlan::Parse("attn_q=q4_k_m").status().message()),
              HasSubstr("'attn_q=q4_k_m': cannot make weights 'q4_k_m'"));
}

TEST(WeightPlanTest, TheTableOfMeanings) {
  struct Row {
    const char* plan;
    const char* tensor;
    bool tied;
    const char* format;
  };
  const Row rows[] = {
      {"", "blk.0.attn_q.weight", false, "keep"},
      {"nf4", "blk.0.attn_q.weight", false, "nf4"},
      {"nf4", "blk.0.attn_output.weight", false, "nf4"},  // no head, whatever its name ends in
      {"nf4", "token_embd.weight", false, "keep"},
      {"nf4", "token_embd.weight", true, "keep"},
      {"nf4", "position_embd.weight", true, "keep"},
      {"nf4", "transformer.wpe.weight", true, "keep"},
      {"nf4", "output.weight", false, "keep"},
      {"nf4", "lm_head.weight", false, "keep"},
      {"nf4", "transformer.h.0.mlp.c_fc.weight", false, "nf4"},
      {"nf4,lm_head=int8", "lm_head.weight", false, "int8"},
      {"nf4,lm_head=int8", "output.weight", false, "int8"},
      {"nf4,lm_head=int8", "token_embd.weight", false, "keep"},
      {"nf4,lm_head=int8", "token_embd.weight", true, "int8"},
      {"nf4,lm_head=int8", "model.embed_tokens.weight", true, "int8"},
      {"lm_head=int8", "blk.0.attn_q.weight", false, "keep"},
      {"embedding=f16", "wte.weight", false, "f16"},
      {"embedding=f16", "output.weight", false, "keep"},
      {"embedding=f16", "token_embd.weight", true, "f16"},
      {"nf4,ffn_down=q8_0", "blk.1.ffn_down.weight", false, "q8_0"},
      {"ffn_down=q8_0,nf4", "blk.1.ffn_down.weight", false, "nf4"},  // the later one wins
      {"nf4,blk.1.=keep", "blk.1.ffn_down.weight", false, "keep"},
      {"nf4,blk.1.=keep", "blk.11.ffn_down.weight", false, "nf4"},
      {"int8,nf4-dq:128", "blk.1.ffn_down.weight", false, "nf4-dq:128"},
      {"keep", "blk.1.ffn_down.weight", false, "keep"},
      {"kbit-int4:64", "blk.1.ffn_down.weight", false, "kbit-int4:64"},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(FormatOf(row.plan, row.tensor, row.tied), row.format)
        << row.plan << " " << row.tensor << (row.tied ? " tied" : "");
  }
}

TEST(WeightPlanTest, ErrorsNameThePart) {
  const std::pair<const char*, const char*> rows[] = {
      {"nf5", "'nf5'"},
      {"nf4,lm_head=int9", "'lm_head=int9'"},
      {"nf4,", ""},
      {"nf4,,int8", "''"},
      {"=nf4", "part of a tensor's name before '='"},
      {"nf4:63", "'nf4:63'"},
      {"a=b=c", "'a=b=c'"},
      {"lm_head=", "'lm_head='"},
      {"Keep", "'Keep'"},
  };
  for (const auto& [plan, message] : rows) {
    const absl::Status status = WeightPlan::Parse(plan).status();
    if (message[0] == '\0') {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << plan;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

class WeightPlanLoading : public ScratchCheckpoint {
 protected:
  static absl::StatusOr<std::vector<float>> Logits(const std::string& path,
                                                   const std::string& weights, int threads) {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
    TREADLE_ASSIGN_OR_RETURN(const WeightPlan plan, WeightPlan::Parse(weights));
    TREADLE_ASSIGN_OR_RETURN(
        const auto model,
        TeacherForcing::Create(*checkpoint, CreateReferenceBackend(),
                               {.max_tokens = 8, .chunk = 8, .weights = plan, .threads = threads}));
    return model->Logits(std::vector<int32_t>{5, 4, 3, 2, 1, 0, 9, 8});
  }
};

// Floats that are exact in the other type: nothing may change. Any number of threads: no bit may.
TEST_F(WeightPlanLoading, ConvertsExactlyAndInParallel) {
  TinyModelOptions options;
  options.format = "bf16";
  for (const Architecture& architecture : Architectures()) {
    ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyFolder(architecture, folder_.path(), options));
    ASSERT_OK_AND_ASSIGN(const auto stored, Logits(path, "", 1));
    EXPECT_EQ(*Logits(path, "f32,lm_head=f32", 2), stored);
    ASSERT_OK_AND_ASSIGN(const auto nf4, Logits(path, "nf4,embedding=int8", 1));
    EXPECT_NE(nf4, stored);
    EXPECT_EQ(*Logits(path, "nf4,embedding=int8", 3), nf4);
  }
}

// The file's rows are in GGUF's order in one of them, columns and rows swapped in GPT-2's folder.
TEST_F(WeightPlanLoading, ContainersGiveTheSameBits) {
  TinyModelOptions options;
  options.hidden = 48;
  options.ffn_hidden = 80;
  for (const Architecture& architecture : Architectures()) {
    const auto one = WriteTinyGguf(architecture, folder_.path(), options);
    const auto other = WriteTinyFolder(architecture, folder_.path(), options);
    ASSERT_TRUE(one.ok() && other.ok());
    for (const char* weights : {"nf4", "int8", "kbit-float4e2:tensor", "fp8,lm_head=nf4-dq:128"}) {
      const auto a = Logits(*one, weights, 1);
      const auto b = Logits(*other, weights, 1);
      ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
      EXPECT_EQ(*a, *b) << weights;
    }
  }
}

// Vectors stay floats; matrices have 4 bits and a scale of 32 for each 64 weights, or 8 and one for
// each row.
TEST_F(WeightPlanLoading, BytesAreEstimated) {
  TinyModelOptions options;
  options.layers = 1;
  ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaFolder(folder_.path(), options));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  const uint64_t vectors = 3 * 64 * 4;
  const uint64_t embedding = static_cast<uint64_t>(TinyVocabulary()) * 64;
  const uint64_t matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64;
  const auto bytes = [&](const char* weights) {
    return WeightPlan::Parse(weights)->EstimateBytes(*checkpoint);
  };
  EXPECT_EQ(bytes(""), vectors + 4 * (embedding + matrices));
  EXPECT_EQ(bytes("nf4"), vectors + 4 * embedding + matrices / 2 + matrices / 64 * 4);
  EXPECT_EQ(bytes("f16,embedding=int8"),
            vectors + embedding + static_cast<uint64_t>(TinyVocabulary()) * 4 + 2 * matrices);
}

TEST_F(WeightPlanLoading, FaultsNameTensorOrPart) {
  TinyModelOptions options;
  options.hidden = 48;
  options.ffn_hidden = 80;
  ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaFolder(folder_.path(), options));
  ExpectRefused(Logits(path, "q4_0", 1).status(), path, "q_proj.weight' to q4_0: matrix [48, 48]");
  ExpectRefused(Logits(path, "nf4,nothing=int8", 1).status(), path,
                "'nothing=int8' names none of its matrices");
}

}  // namespace
}  // namespace treadle
