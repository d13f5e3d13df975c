// Report on a small checkpoint, worked out by hand from its sizes.
#include "models/checkpoints/inspect/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "models/architectures/config_fields.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

class InspectTest : public ScratchCheckpoint {
 protected:
  static TinyModelOptions Options() {
    TinyModelOptions options;
    options.format = "q8_0";
    options.layers = 2;
    options.hidden = 64;
    options.heads = 4;
    options.kv_heads = 2;
    options.ffn_hidden = 128;
    options.context = 256;
    return options;
  }
};

TEST_F(InspectTest, SizesAddUp) {
  ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaGguf(folder_.path(), Options()));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  const ModelReport report = Inspect(*checkpoint);
  const int64_t vocab = TinyVocabulary();
  // Each layer: Q and the output [64, 64], K and V [32, 64], three feed-forward matrices.
  const int64_t matrices = vocab * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64);
  const int64_t vectors = (2 * 2 + 1) * 64;
  EXPECT_EQ(report.kind, "GGUF");
  EXPECT_EQ(report.config.architecture, "llama");
  EXPECT_EQ(report.parameters, matrices + vectors);
  ASSERT_EQ(report.formats.size(), 2u);
  EXPECT_EQ(report.formats[0].format, "q8_0");
  EXPECT_EQ(report.formats[0].tensors, 1 + 2 * 7);
  EXPECT_EQ(report.formats[0].bytes, static_cast<uint64_t>(matrices / 32 * 34));
  EXPECT_EQ(report.formats[1].format, "f32");
  EXPECT_EQ(report.formats[1].bytes, static_cast<uint64_t>(vectors * 4));
  EXPECT_EQ(report.weight_bytes, report.formats[0].bytes + report.formats[1].bytes);
  EXPECT_GT(report.file_bytes, report.weight_bytes);
  // K and V, 2 layers, 2 heads of 16, two bytes each.
  EXPECT_EQ(report.kv_bytes_per_token, 2u * 2 * 2 * 16 * 2);
  EXPECT_EQ(report.tokens, vocab);
  EXPECT_EQ(report.eos, TinyEndOfTurn());
  EXPECT_EQ(report.end_ids, std::vector<int32_t>{TinyEndOfTurn()});
  EXPECT_TRUE(report.chat_template);
  const ServingCost cost = EstimateServingCost(report, 100, 8, 512);
  EXPECT_EQ(cost.weights, report.weight_bytes);
  EXPECT_EQ(cost.kv, report.kv_bytes_per_token * 800);
  EXPECT_EQ(cost.total(), cost.weights + cost.kv + cost.activations);
}

TEST_F(InspectTest, TextAndJsonSayTheSame) {
  ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaGguf(folder_.path(), Options()));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  const ModelReport report = Inspect(*checkpoint);
  const auto json = nlohmann::json::parse(ReportJson(report, {}));
  const std::string text = ReportText(report, {});
  EXPECT_EQ(json["parameters"], report.parameters);
  VisitFields(report.config, [&](const std::string& name, const auto& value) {
    EXPECT_EQ(json[name], nlohmann::json(value)) << name;
  });
  EXPECT_EQ(json["tokenizer"]["model"], "byte-level BPE");
  EXPECT_EQ(json["serving"]["context"], 256);
  EXPECT_EQ(json["formats"][0]["format"], "q8_0");
  EXPECT_THAT(text, HasSubstr(std::to_string(report.parameters)));
  EXPECT_THAT(text, HasSubstr("byte-level BPE"));
  EXPECT_THAT(text, HasSubstr("q8_0: 15 tensors"));
  EXPECT_THAT(text, HasSubstr("8 requests of 256 tokens"));
}

TEST_F(InspectTest, NamesAreForALineThatPeopleRead) {
  ModelReport report;
  report.name = "a\x1b[2J\nb" + std::string(1000, 'x');
  report.tokenizer = "byte-level BPE";
  report.pre_tokenizer = "c\rd\xff";
  const std::string text = ReportText(report, {});
  EXPECT_THAT(text, HasSubstr("a\\x1b[2J\\x0ab" + std::string(100, 'x')));
  EXPECT_THAT(text, HasSubstr("(c\\x0dd\\xff)"));
  EXPECT_THAT(text, testing::Not(HasSubstr(std::string(201, 'x'))));
}

TEST_F(InspectTest, ConstantsOfQuantizedMatricesCount) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(TREADLE_TESTDATA "/quantized/int8"));
  const ModelReport report = Inspect(*checkpoint);
  // Q and the output [36, 36], K and V [12, 36], [52, 36] twice, [36, 52]; embedding and head
  // [41, 36], three vectors.
  const int64_t matrices = 2 * 36 * 36 + 2 * 12 * 36 + 3 * 52 * 36;
  const int64_t rows = 2 * 36 + 2 * 12 + 2 * 52 + 36;
  ASSERT_EQ(report.formats.size(), 2u);
  const auto& use = report.formats[report.formats[0].format == "int8" ? 0 : 1];
  EXPECT_EQ(use.format, "int8");
  EXPECT_EQ(use.tensors, 7);
  EXPECT_EQ(use.parameters, matrices);
  EXPECT_EQ(use.bytes, static_cast<uint64_t>(matrices + 4 * rows));
  EXPECT_EQ(report.parameters, matrices + 2 * 41 * 36 + 3 * 36);
  EXPECT_THAT(ReportText(report, {}), HasSubstr("int8: 7 tensors, 9.8 KiB, 8.83 bits per weight"));
}

TEST_F(InspectTest, ACheckpointWithoutATokenizerSaysSo) {
  TinyModelOptions options = Options();
  options.format = "f32";
  options.tokenizer = false;
  ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyGpt2Folder(folder_.path(), options));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  const ModelReport report = Inspect(*checkpoint);
  EXPECT_EQ(report.kind, "Hugging Face");
  EXPECT_THAT(ReportText(report, {}), HasSubstr("none: token ids only"));
  EXPECT_TRUE(nlohmann::json::parse(ReportJson(report, {}))["tokenizer"].is_null());
  EXPECT_FALSE(report.chat_template);
}

// A model with one more norm, without a gate, under a name that nobody knows.
TEST_F(InspectTest, ModelsThatNobodyServesHaveANearestFamily) {
  const auto path = WriteTinyLlamaGguf(folder_.path(), Options());
  ASSERT_TRUE(path.ok()) << path.status();
  std::string bytes = Read("tiny-llama.gguf");
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (size_t at = bytes.find(from); at != bytes.npos; at = bytes.find(from, at + 1)) {
      bytes.replace(at, from.size(), to);
    }
  };
  replace("llama", "lxama");
  replace("ffn_gate", "ffn_sink");
  Write("other.gguf", bytes);
  EXPECT_TRUE(absl::IsUnimplemented(Checkpoint::Open(Path("other.gguf")).status()));
  EXPECT_EQ(NearestFamily(Path("other.gguf")),
            "nearest known family: llama; it has no part for 'blk.N.ffn_sink.weight'; this model "
            "lacks 'blk.N.ffn_gate.weight'");
  ASSERT_TRUE(WriteTinyGpt2Folder(folder_.path(), {}).ok());
  auto config = nlohmann::json::parse(Read("config.json"));
  config["architectures"] = {"XForCausalLM"};
  config["activation_function"] = "relu";
  Write("config.json", config.dump());
  EXPECT_EQ(NearestFamily(folder_.path()),
            "nearest known family: gpt2; activation_function is \"relu\", there \"gelu_new\"");
  EXPECT_EQ(NearestFamily(Path("missing.gguf")), "");
}

}  // namespace
}  // namespace treadle
