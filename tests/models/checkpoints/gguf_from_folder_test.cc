// .gguf files that are made of Hugging Face folders: read back, the same bits; and the metadata
// says what the folder said. That llama.cpp reads them: tests/oracles/check_written_gguf.py, by
// hand.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/inspect/inspect.h"
#include "models/checkpoints/write/gguf_file_writer.h"
#include "models/text/tokenizer.h"
#include "models/text/tokenizer_json.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/support/assert_ok.h"
#include "tests/support/file_sum.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using GgufFromFolder = QuantizeCheckpointTest;

// Into llama.cpp's names and orders, and out of them.
TEST_F(GgufFromFolder, ReadsBackAsTheSameBits) {
  size_t turn = 0;
  for (const Architecture& architecture : Architectures()) {
    if (architecture.states != StateKind::kNone) continue;  // OfLayersThatKeepAState
    for (const char* format : {"f32", "f16", "bf16"}) {
      for (const bool tied : {true, false}) {
        TinyModelOptions options = Options(true);
        options.format = format;
        options.tied_head = tied;
        ExpectSameBits(
            TinyFolder(architecture, options), ".gguf",
            {"keep", "q8_0", "q4_0", "q4_1,embedding=q8_0", "bf16", "f32", "f16,lm_head=q8_0"},
            turn++);
      }
    }
  }
}

// Biases, several shards, a sliding window, GPT-2 without its prefix, rope scaling.
TEST_F(GgufFromFolder, OfEveryKind) {
  for (const char* name : {"llama-grouped",
                           "llama-linear",
                           "llama-one-kv-head",
                           "llama-ungrouped",
                           "mistral",
                           "mistral-window",
                           "gpt2",
                           "gpt2-untied",
                           "qwen2",
                           "qwen2-window",
                           "qwen3",
                           "qwen3-tied",
                           "gptneox",
                           "gptneox-sequential",
                           "opt",
                           "opt-untied",
                           "falcon",
                           "falcon-grouped",
                           "falcon-one-norm",
                           "phi3-long",
                           "phi3",
                           "gemma3",
                           "bloom",
                           "bloom-other-heads",
                           "mixtral",
                           "qwen3moe",
                           "qwen3moe-plain",
                           "gptoss",
                           "gptoss-odd",
                           "gptoss-plain",
                           "llama-yarn",
                           "smollm3-tied",
                           "granite",
                           "granite-tied",
                           "granite4",
                           "olmo2",
                           "olmo3",
                           "seed-oss",
                           "glm4",
                           "exaone4-global",
                           "ernie45",
                           "hunyuan",
                           "ministral3",
                           "phi4-mini",
                           "gemma4",
                           "gemma4-large",
                           "qwen2moe",
                           "glm4moe",
                           "glm4moe-air",
                           "minimax-m2",
                           "deepseek2",
                           "deepseek2-grouped",
                           "deepseek3",
                           "glm47flash",
                           "gemma4moe",
                           "llama4"}) {
    ExpectSameBits(Str(TREADLE_TESTDATA "/models/", name), ".gguf", "f32");
  }
  for (const char* name :
       {"gemma4", "gemma4-large", "qwen2moe", "glm4moe", "minimax-m2", "deepseek2",
        "deepseek2-grouped", "deepseek3", "glm47flash", "gemma4moe", "llama4"}) {  // and back
    ExpectSameBits(Str(TREADLE_TESTDATA "/models/", name, "/model.gguf"), "", "keep");
  }
  // Frequencies are divided by factors that are rounded once; over 12 positions that stays
  // rounding.
  const std::string scaled = TREADLE_TESTDATA "/models/llama-scaled";
  ASSERT_TRUE(Make(scaled, Path("scaled.gguf"), "f32").ok());
  const std::vector<float> wanted = Logits(scaled, "f32"), found = Logits(Path("scaled.gguf"), "");
  ASSERT_EQ(found.size(), wanted.size());
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("scaled.gguf")));
  EXPECT_EQ(file->tensors().back().name, "rope_freqs.weight");
  float largest = 0;
  for (const float logit : wanted) largest = std::max(largest, std::abs(logit));
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], wanted[i], 1e-5 * largest) << i;
}

// The file that llama.cpp's converter makes of the same folder, beside it: every tensor and what it
// says of the model. Rates are powers of logarithms, which two libraries round apart by a unit.
void ExpectAsConverted(const std::string& written, const std::string& converted) {
  const auto file = GgufFile::Read(written), other = GgufFile::Read(converted);
  ASSERT_TRUE(file.ok() && other.ok()) << file.status() << other.status();
  std::map<std::string_view, const StoredTensor*> found;
  for (const StoredTensor& tensor : (*file)->tensors()) found[tensor.name] = &tensor;
  EXPECT_EQ(found.size(), (*other)->tensors().size());
  for (const StoredTensor& tensor : (*other)->tensors()) {
    SCOPED_TRACE(tensor.name);
    ASSERT_TRUE(found.contains(tensor.name));
    const StoredTensor& ours = *found[tensor.name];
    ASSERT_EQ(ours.shape, tensor.shape);
    // The converter orders Nemotron-H's rows of Q and K in pairs, though nothing rotates them.
    const bool either =
        tensor.name.ends_with("attn_q.weight") || tensor.name.ends_with("attn_k.weight");
    if (either && !ArchitectureOf((*Checkpoint::Open(written))->config()).rotary) continue;
    const std::vector<float> wanted = DecodeVector(tensor), values = DecodeVector(ours);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const bool rate = tensor.name.ends_with("ssm_a");
      ASSERT_NEAR(values[i], wanted[i], rate ? std::abs(wanted[i]) * 0x1p-22f : 0) << i;
    }
    const bool taps =
        tensor.name.ends_with("conv.weight") || tensor.name.ends_with("conv1d.weight");
    if (ours.shape.size() == 1 || taps) EXPECT_EQ(ours.format->name, std::string_view("f32"));
  }
  const auto opened = Checkpoint::Open(written), as_converted = Checkpoint::Open(converted);
  ASSERT_TRUE(opened.ok() && as_converted.ok()) << opened.status() << as_converted.status();
  ModelConfig config = (*opened)->config();
  config.context = (*as_converted)->config().context;  // of Granite the converter invents one
  EXPECT_EQ(config, (*as_converted)->config());
  for (const GgufFile::RawPair& pair : (*other)->raw_metadata()) {
    const std::string key(pair.key);
    const auto of = [&](const char* part) { return key.find(part) != key.npos; };
    if (of("nemotron") && of(".rope.")) continue;  // nothing rotates
    if (!of(".ssm.") && !of(".rope.") && !of("shortconv") && !of("_kv") && !of("recurrent")) {
      continue;
    }
    SCOPED_TRACE(key);
    const GgufValue* const ours = (*file)->Find(key);
    ASSERT_NE(ours, nullptr);
    EXPECT_EQ(ours->numbers, (*other)->Find(key)->numbers);
    EXPECT_EQ(ours->strings, (*other)->Find(key)->strings);
  }
}

// Where value heads share key heads, Qwen 3.5's columns of ssm_out have another order in files:
// sums are rounded apart.
TEST_F(GgufFromFolder, OfLayersThatKeepAState) {
  for (const char* name :
       {"qwen35-tied", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "granitehybrid-rope",
        "granitehybridmoe", "nemotron-h", "nemotron-h-moe"}) {
    ExpectSameBits(Str(TREADLE_TESTDATA "/models/", name), ".gguf", "keep");
  }
  ExpectSameBits(TREADLE_TESTDATA "/models/lfm2moe", ".gguf", "f16");
  for (const char* name : {"qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid",
                           "granitehybridmoe", "nemotron-h", "nemotron-h-moe"}) {
    SCOPED_TRACE(name);
    const std::string in = Str(TREADLE_TESTDATA "/models/", name), out = Path("states.gguf");
    std::filesystem::remove(out);
    ASSERT_EQ(Make(in, out, "keep").status(), absl::OkStatus());
    ExpectAsConverted(out, in + "/model.gguf");
    const std::vector<float> wanted = Logits(in, ""), found = Logits(out, "");
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], wanted[i], 1e-4) << i;
  }
}

// A folder of a model that sees images has the model of text in it: its tensors under other names,
// its config.json as a part, and a tensor of the vision tower.
struct WithTower {
  const char* model;   // of text
  const char* before;  // what begins the names that change, and what does then
  const char* after;
  const char* tower;
  const char* family;
  const char* type;
};
constexpr WithTower kWithTowers[] = {
    {"gemma4-large", "model.", "model.language_model.", "model.vision_tower.",
     "Gemma4ForConditionalGeneration", "gemma4"},
    {"llama4", "", "language_model.", "vision_model.", "Llama4ForConditionalGeneration", "llama4"}};
void WriteWithTower(const WithTower& row, const std::string& folder) {
  using Json = nlohmann::json;
  const auto read = [&](const char* file) {
    return ReadWhole(Str(TREADLE_TESTDATA "/models/", row.model, "/", file));
  };
  const std::string bytes = read("model.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const std::string data = bytes.substr(sizeof(length) + length);
  const Json stored = Json::parse(bytes.substr(sizeof(length), length));
  Json header;
  for (const auto& [key, entry] : stored.items()) {
    const bool changes = key != "__metadata__" && key.starts_with(row.before);
    header[changes ? row.after + key.substr(std::strlen(row.before)) : key] = entry;
  }
  header[Str(row.tower, "patch_embedder.weight")] = {
      {"dtype", "F32"}, {"shape", {1, 1}}, {"data_offsets", {data.size(), data.size() + 4}}};
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  length = text.size();
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/model.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), sizeof(length)) << text << data
      << std::string(4, '\0');
  Json config = Json::parse(read("config.json"));
  config.erase("architectures");
  config["use_bidirectional_attention"] = "vision";
  std::ofstream(folder + "/config.json") << Json({{"architectures", {row.family}},
                                                  {"model_type", row.type},
                                                  {"text_config", config},
                                                  {"vision_config", Json::object()}});
}

TEST_F(GgufFromFolder, AVisionTowerIsNamedAndLeftAside) {
  for (const WithTower& row : kWithTowers) {
    SCOPED_TRACE(row.model);
    const std::string in = Path(Str("with-tower-", row.type));
    WriteWithTower(row, in);
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(in));
    ASSERT_EQ(checkpoint->left_aside().size(), 1u);
    const std::string tower = checkpoint->left_aside()[0];
    EXPECT_THAT(row.tower, HasSubstr(tower));
    EXPECT_THAT(ReportText(Inspect(*checkpoint), {}), HasSubstr(tower + ": text alone is served"));
    EXPECT_EQ(Logits(in, "keep"), Logits(Str(TREADLE_TESTDATA "/models/", row.model), "keep"));
    ExpectSameBits(in, ".gguf", "keep");
    ExpectSameBits(in, "", "keep");
  }
}

TEST_F(GgufFromFolder, RefusesAScaleOfScoresThatGgufDoesNotMean) {
  EXPECT_THAT(
      Make(TREADLE_TESTDATA "/models/gemma3-scaled", Path("out.gguf"), "f32").status().message(),
      HasSubstr("divides scores by the root of 7, expected 10"));
}

TEST_F(GgufFromFolder, RefusesLayersWithoutRotationThatGgufDoesNotMean) {
  EXPECT_THAT(Make(TREADLE_TESTDATA "/models/smollm3", Path("out.gguf"), "f32").status().message(),
              HasSubstr("one of 2 layers does not rotate, expected one of 4"));
}

TEST_F(GgufFromFolder, QuantizedMatricesBecomeFloats) {
  for (const char* name : {"gptq-act-v1", "fp8-block", "nf4"}) {
    const std::string in = Str(TREADLE_TESTDATA "/quantized/", name);
    ExpectSameBits(in, ".gguf", "keep");
    ASSERT_OK_AND_ASSIGN(const auto report, Make(in, Path("again.gguf"), "keep"));
    EXPECT_THAT(report.notices, ::testing::ElementsAre(HasSubstr("matrices kept in 32 bits")));
    std::filesystem::remove(Path("again.gguf"));
  }
}

TEST_F(GgufFromFolder, DescribesTheModel) {
  TinyModelOptions options = Options(true);
  options.tied_head = true;
  const std::string in = Tiny(WriteTinyLlamaFolder, options);
  Write("in/generation_config.json", Str("{\"eos_token_id\": [", TinyEndOfTurn(), ", ",
                                         TinyEndOfTurn() - 1, ", ", TinyEndOfTurn() - 2,
                                         R"(], "temperature": 0.5, "top_k": 20, "min_p": 0.25,
                                             "repetition_penalty": 1.5})"));
  ASSERT_OK_AND_ASSIGN(const auto report, Make(in, Path("out.gguf"), "q8_0"));
  EXPECT_THAT(
      report.notices,
      ::testing::ElementsAre(HasSubstr(Str("generation ended at token ", TinyEndOfTurn() - 2))));
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("out.gguf")));
  EXPECT_EQ(*file->String("general.architecture"), "llama");
  EXPECT_EQ(*file->Integer("general.file_type"), 7);
  EXPECT_EQ(*file->Integer("llama.attention.key_length"), 16);
  EXPECT_EQ(*file->Integer("llama.vocab_size"), TinyVocabulary());
  EXPECT_EQ(*file->String("treadle.source_sha256"), FileSha256(in + "/model.safetensors"));
  for (const StoredTensor& tensor : file->tensors()) {
    if (tensor.shape.size() == 1) {
      EXPECT_EQ(tensor.format->name, "f32") << tensor.name;
    }
  }
  const auto one = Checkpoint::Open(in), other = Checkpoint::Open(Path("out.gguf"));
  ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
  // llama.cpp's keys.
  EXPECT_EQ(*file->Number("general.sampling.temp"), 0.5);
  EXPECT_EQ(*file->Integer("general.sampling.top_k"), 20);
  EXPECT_EQ(*file->Number("general.sampling.min_p"), 0.25);
  EXPECT_EQ(*file->Number("general.sampling.penalty_repeat"), 1.5);
  EXPECT_EQ(file->Find("general.sampling.top_p"), nullptr);
  EXPECT_EQ((*one)->Sampling()->values, (*other)->Sampling()->values);
  EXPECT_EQ((*one)->chat_template(), (*other)->chat_template());
  EXPECT_EQ((*other)->end_ids(), (std::vector<int32_t>{TinyEndOfTurn(), TinyEndOfTurn() - 1}));
  EXPECT_EQ((*one)->config().tied_head, (*other)->config().tied_head);
}

// A head that is there although it is tied, and frequencies that older files hold, are left out;
// what no model has is refused.
TEST_F(GgufFromFolder, HoldsWhatTheModelNeeds) {
  TinyModelOptions options = Options(true);
  options.tied_head = true;
  const std::string in = Tiny(WriteTinyLlamaFolder, options);
  Safetensors file = Safetensors::Parse(Read("in/model.safetensors"));
  std::string halves;  // 1.75 and 1.0 in bf16
  for (int i = 0; i < 32; ++i) halves += std::string("\xe0\x3f\x80\x3f", 4);
  file.Set("model.norm.weight", "BF16", {64}, halves);
  Write("in/model.safetensors", file.Bytes());
  const std::vector<float> wanted = Logits(in, "f32");
  const std::string frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq";
  file.Set(frequencies, "F32", {8}, std::string(32, 0));
  file.Set("lm_head.weight", "F32", {TinyVocabulary(), 64},
           std::string(static_cast<size_t>(TinyVocabulary()) * 64 * 4, 0));
  Write("in/model.safetensors", file.Bytes());
  ASSERT_TRUE(Make(in, Path("out.gguf"), "f32").ok());
  EXPECT_EQ(Logits(Path("out.gguf"), ""), wanted);
  ASSERT_OK_AND_ASSIGN(const auto out, GgufFile::Read(Path("out.gguf")));
  for (const StoredTensor& tensor : out->tensors()) {
    EXPECT_EQ(tensor.format->name, "f32") << tensor.name;  // vectors in 16 bits are for nobody
  }
  file.Set("model.layers.0.adapter.weight", "F32", {8}, std::string(32, 0));
  Write("in/model.safetensors", file.Bytes());
  EXPECT_THAT(std::string(Make(in, Path("other.gguf"), "f32").status().message()),
              HasSubstr("tensor 'model.layers.0.adapter.weight' has no place in a .gguf file"));
  EXPECT_THAT(Leftovers(), IsEmpty());
}

// Every kind of tokenizer says of every text in GGUF what it said in the folder.
TEST_F(GgufFromFolder, TokenizersSurviveTheWay) {
  constexpr const char* kTexts[] = {
      "The other one is in there.",
      "  two  spaces\n\n and\ttabs ",
      "1234567 12 3",
      "na\xc3\xafve caf\xc3\xa9, \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80!",
      "It's what they'd've said...",
      "x",
      "",
      "(a+b)*c == d->e; // f"};
  for (const char* name : {"gpt-2", "smollm", "olmo", "bloom", "falcon", "llama-bpe", "qwen2",
                           "gpt-4o", "llama", "mistral", "bare"}) {
    SCOPED_TRACE(name);
    const bool bare = std::string_view(name) == "bare";  // Llama's without its dummy space
    FolderFiles files(Str(TREADLE_TESTDATA "/tokenizers/", bare ? "llama" : name));
    ASSERT_OK_AND_ASSIGN(auto spec, ReadTokenizerJson(files));
    if (bare) spec.add_space_prefix = false;
    GgufMetadataWriter metadata;
    std::vector<std::string> notices;
    const auto vocab = std::ssize(spec.tokens) + 3;  // a model may have room for more
    ASSERT_EQ(DescribeTokenizer(spec, vocab, metadata, notices), absl::OkStatus());
    auto writer = GgufFileWriter::Create(Path(Str(name, ".gguf")), metadata, {}, 32);
    ASSERT_TRUE(writer.ok() && (*writer)->Finish().ok()) << writer.status();
    ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path(Str(name, ".gguf"))));
    const auto read = ReadGgufTokenizer(*file);
    ASSERT_TRUE(read.ok() && read->has_value()) << read.status();
    EXPECT_EQ(std::ssize((*read)->tokens), vocab);
    EXPECT_EQ((*read)->bos, spec.bos);
    EXPECT_EQ((*read)->eos, spec.eos);
    const auto before = Tokenizer::Create(spec), after = Tokenizer::Create(**read);
    ASSERT_TRUE(before.ok() && after.ok()) << before.status() << after.status();
    const bool flagged = std::string_view(name) == "gpt-2";  // <mask> takes white space along
    EXPECT_EQ(notices.empty(), !spec.space_prefix_if_missing && !flagged);
    if (flagged) {
      EXPECT_THAT(notices, ::testing::ElementsAre(HasSubstr("'<mask>' is one")));
    }
    for (const std::string_view text : kTexts) {
      // Facts that GGUF cannot say, and a notice does.
      if (spec.space_prefix_if_missing && text.starts_with(' ')) continue;
      for (const bool special : {false, true}) {
        ASSERT_OK_AND_ASSIGN(const auto ids, (*before)->Encode(text, {.add_special = special}));
        EXPECT_EQ(*(*after)->Encode(text, {.add_special = special}), ids) << text;
      }
    }
  }
}

}  // namespace
}  // namespace treadle
