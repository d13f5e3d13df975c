// Files that `treadle quantize` writes: read back, they give the same bits as converting while
// loading; it says what it was made from; and where it fails, nothing remains.
#include "models/checkpoints/write/quantize_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <limits>

#include "models/checkpoints/gguf/gguf_file.h"
#include "models/text/tokenizer.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/support/assert_ok.h"
#include "tests/support/file_sum.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(QuantizeCheckpointTest, FoldersReadBackAsTheSameBits) {
  size_t turn = 0;
  for (const Architecture& architecture : Architectures()) {
    ExpectSameBits(
        TinyFolder(architecture, Options(false)), "",
        {"nf4", "nf4-dq:128", "fp4:32", "fp4-dq", "int8", "fp8", "f16", "bf16", "kbit-int4:64",
         "kbit-float5e2:tensor", "kbit-dynamic6:128", "kbit-quantile3:32", "kbit-int8:1024",
         "nf4,lm_head=int8", "nf4,embedding=fp8,lm_head=kbit-int3:64", "embedding=f16"},
        turn++);
  }
}

TEST_F(QuantizeCheckpointTest, TiedHeadsReadBackAsTheSameBits) {
  TinyModelOptions options = Options(false);
  options.tied_head = true;
  const std::string in = Tiny(WriteTinyLlamaFolder, options);
  for (const char* weights : {"nf4", "int8,lm_head=nf4", "embedding=int8"}) {
    ExpectSameBits(in, "", weights);
  }
}

TEST_F(QuantizeCheckpointTest, GgufFilesReadBackAsTheSameBits) {
  size_t turn = 0;
  for (const Architecture& architecture : Architectures()) {
    for (const char* format : {"f32", "q8_0"}) {
      TinyModelOptions options = Options(true);
      options.format = format;
      ExpectSameBits(TinyGguf(architecture, options), ".gguf",
                     {"q8_0", "q4_0", "q4_1", "f16", "bf16", "f32",
                      "q4_0,lm_head=q8_0,embedding=f16", "q4_1,blk.0.=keep", "q4_k_m", "iq4_xs"},
                     turn++);
    }
  }
}

// The file describes its shape itself, with states and with experts too.
TEST_F(QuantizeCheckpointTest, RandomWeightsBecomeAGgufFile) {
  for (const char* in :
       {"random:smollm2-135m,layers=1,hidden=64,heads=2,kv-heads=1,ffn=96,vocab=64",
        "random:qwen3.6-35b-a3b,layers=2,hidden=256,heads=2,kv-heads=1,ffn=32,"
        "vocab=64,experts=4"}) {
    ExpectSameBits(in, ".gguf", "q4_0");
  }
}

// Rows of Q and K are put in order first, as they are when a GGUF file is converted while loading.
TEST_F(QuantizeCheckpointTest, FoldersFromGgufFilesReadBackAsTheSameBits) {
  size_t turn = 0;
  for (const Architecture& architecture : Architectures()) {
    if (architecture.hugging_face_transposed) continue;
    if (architecture.states != StateKind::kNone) continue;  // refused: states_test.cc
    for (const char* format : {"f32", "q8_0"}) {
      for (const bool tied : {true, false}) {
        TinyModelOptions options = Options(true);
        options.format = format;
        options.tied_head = tied;
        options.window = tied && architecture.rotary ? 8 : 0;
        ExpectSameBits(
            TinyGguf(architecture, options), "",
            {"nf4:128", "int8", "fp8", "f16", "kbit-int4:tensor", "nf4,attn_q=keep,lm_head=int8"},
            turn++);
      }
    }
  }
}

TEST_F(QuantizeCheckpointTest, QuantizedFoldersAreConvertedOrKept) {
  const std::string in = Tiny(WriteTinyGpt2Folder, Options(false));
  for (const char* first : {"nf4-dq", "int8", "fp8", "kbit-quantile4:64"}) {
    std::filesystem::remove_all(Path("first"));
    ASSERT_TRUE(Make(in, Path("first"), first).ok());
    for (const char* second : {"int8", "f32", "nf4:32,h.0.=keep", "embedding=f16"}) {
      ExpectSameBits(Path("first"), "", second);
    }
  }
  for (const char* name : {"nf4-dq", "nf4-128-dq", "fp4-dq", "int8", "fp8-channel", "fp8-tensor",
                           "gptq-v1", "gptq-act-v1"}) {
    ExpectSameBits(Str(TREADLE_TESTDATA "/quantized/", name), "", "embedding=bf16,mlp=nf4");
  }
}

TEST_F(QuantizeCheckpointTest, ShardsBecomeOneFile) {
  const std::string in = TREADLE_TESTDATA "/models/llama-one-kv-head";
  ExpectSameBits(in, "", "nf4:32");
  EXPECT_FALSE(std::filesystem::exists(Path("out/model.safetensors.index.json")));
  const Json metadata = Safetensors::Parse(Read("out/model.safetensors")).header["__metadata__"];
  const std::string first = "model-00001-of-00004.safetensors";
  EXPECT_THAT(metadata["treadle.source_sha256"].get<std::string>(),
              ::testing::StartsWith(Str(first, " ", FileSha256(in + "/" + first), ", model-0")));
}

TEST_F(QuantizeCheckpointTest, TheTokenizerComesAlong) {
  TinyModelOptions options = Options(true);
  const std::string in = Tiny(WriteTinyLlamaGguf, options);
  ASSERT_TRUE(Make(in, Path("out"), "nf4").ok());
  const auto one = Checkpoint::Open(in), other = Checkpoint::Open(Path("out"));
  ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
  EXPECT_EQ((*one)->chat_template(), (*other)->chat_template());
  ASSERT_NE((*other)->tokenizer(), nullptr);
  EXPECT_EQ((*one)->tokenizer()->end_ids, (*other)->tokenizer()->end_ids);
  const auto first = Tokenizer::Create(*(*one)->tokenizer());
  const auto second = Tokenizer::Create(*(*other)->tokenizer());
  ASSERT_TRUE(first.ok() && second.ok());
  for (const char* text :
       {"The other one is in there.", "<|im_start|>user\nna\xc3\xafve 123<|im_end|>",
        "  two  spaces\n\n", "\xe4\xbd\xa0"}) {
    EXPECT_EQ(*(*first)->Encode(text, {}), *(*second)->Encode(text, {})) << text;
  }
}

TEST_F(QuantizeCheckpointTest, OutputsSayWhatTheyWereMadeFrom) {
  const std::string gguf = Tiny(WriteTinyLlamaGguf, Options(true));
  ASSERT_TRUE(Make(gguf, Path("out.gguf"), "q4_0,lm_head=q8_0").ok());
  const auto before = GgufFile::Read(gguf), after = GgufFile::Read(Path("out.gguf"));
  ASSERT_TRUE(before.ok() && after.ok()) << after.status();
  EXPECT_EQ(*(*after)->String("treadle.source"), "tiny-llama.gguf");
  EXPECT_EQ(*(*after)->String("treadle.weights"), "q4_0,lm_head=q8_0");
  EXPECT_EQ(*(*after)->String("treadle.version"), "1.2.3");
  EXPECT_EQ(*(*after)->String("treadle.source_sha256"), FileSha256(gguf));
  EXPECT_EQ(*(*after)->Integer("general.file_type"), 2);
  EXPECT_EQ(*(*after)->Integer("general.quantization_version"), 2);
  for (const auto& pair : (*before)->raw_metadata()) {
    const auto same =
        std::ranges::find((*after)->raw_metadata(), pair.key, &GgufFile::RawPair::key);
    ASSERT_NE(same, (*after)->raw_metadata().end()) << pair.key;
    EXPECT_TRUE(std::ranges::equal(same->bytes, pair.bytes)) << pair.key;
  }

  ASSERT_TRUE(Make(gguf, Path("out"), "nf4").ok());
  const Json metadata = Safetensors::Parse(Read("out/model.safetensors")).header["__metadata__"];
  EXPECT_EQ(metadata["treadle.source_sha256"], FileSha256(gguf));
  EXPECT_EQ(metadata["treadle.weights"], "nf4");
  EXPECT_EQ(metadata["format"], "pt");
}

// Tensors without gaps, each at a multiple of its element's size: what the format's readers want.
TEST_F(QuantizeCheckpointTest, SafetensorsAreDenseAndAligned) {
  const std::string in = Tiny(WriteTinyLlamaFolder, Options(false));
  ASSERT_TRUE(Make(in, Path("out"), "nf4-dq:32,mlp=kbit-int5:64,lm_head=int8").ok());
  const Safetensors file = Safetensors::Parse(Read("out/model.safetensors"));
  std::map<size_t, size_t> ends;  // by begin
  for (const auto& [name, entry] : file.header.items()) {
    if (name == "__metadata__") continue;
    const std::string dtype = entry["dtype"];
    const size_t bytes = dtype == "F32" ? 4 : dtype == "F16" ? 2 : 1;
    EXPECT_EQ(entry["data_offsets"][0].get<size_t>() % bytes, 0u) << name;
    ends[entry["data_offsets"][0]] = entry["data_offsets"][1];
  }
  size_t at = 0;
  for (const auto& [begin, end] : ends) {
    EXPECT_EQ(begin, at);
    at = end;
  }
  EXPECT_EQ(at, file.data.size());
}

TEST_F(QuantizeCheckpointTest, ConfigurationsTellTransformersWhatItNeeds) {
  const std::string in = Tiny(WriteTinyLlamaFolder, Options(false));
  struct Row {
    const char* weights;
    const char* method;
    bool notice;
  };
  for (const Row& row :
       {Row{"nf4", "bitsandbytes", false}, Row{"int8", "bitsandbytes", false},
        Row{"nf4,lm_head=nf4", "bitsandbytes", false}, Row{"nf4,lm_head=int8", "treadle", true},
        Row{"nf4,embedding=nf4", "treadle", true}, Row{"fp8", "treadle", true}}) {
    SCOPED_TRACE(row.weights);
    std::filesystem::remove_all(Path("out"));
    ASSERT_OK_AND_ASSIGN(const auto report, Make(in, Path("out"), row.weights));
    const Json config = Json::parse(Read("out/config.json"));
    EXPECT_EQ(config["quantization_config"]["quant_method"], row.method);
    EXPECT_EQ(config["hidden_size"], 48);
    EXPECT_EQ(!report.notices.empty(), row.notice);
  }
  std::filesystem::remove_all(Path("out"));
  ASSERT_TRUE(Make(in, Path("out"), "int8,layers.0.mlp=keep").ok());
  const Json config = Json::parse(Read("out/config.json"))["quantization_config"];
  EXPECT_THAT(config["llm_int8_skip_modules"].get<std::vector<std::string>>(),
              ::testing::UnorderedElementsAre("lm_head", "model.layers.0.mlp.gate_proj",
                                              "model.layers.0.mlp.up_proj",
                                              "model.layers.0.mlp.down_proj"));
  std::filesystem::remove_all(Path("again"));
  ASSERT_TRUE(Make(Path("out"), Path("again"), "f32").ok());
  EXPECT_FALSE(Json::parse(Read("again/config.json")).contains("quantization_config"));
}

TEST_F(QuantizeCheckpointTest, ReportsAreTrue) {
  const std::string in = Tiny(WriteTinyLlamaFolder, Options(false));
  ASSERT_OK_AND_ASSIGN(const auto report, Make(in, Path("out"), "int8"));
  ASSERT_EQ(report.matrices.size(), 14u);
  const auto& matrix = report.matrices[0];
  EXPECT_EQ(matrix.from, "f32");
  EXPECT_EQ(matrix.to, "int8");
  // 8 bits, and 32 for each row of 80.
  EXPECT_EQ(matrix.name, "model.layers.0.mlp.down_proj.weight");
  EXPECT_DOUBLE_EQ(matrix.bits, 8 + 32.0 / 80);
  // Rounding to steps of absmax / 127: at most half a step, a quarter on average.
  EXPECT_GT(matrix.error.mean_absolute, 0);
  EXPECT_LT(matrix.error.mean_absolute, matrix.error.worst / 1.5);
  EXPECT_GT(matrix.error.relative, 1e-3);
  EXPECT_LT(matrix.error.relative, 2e-2);
  EXPECT_EQ(Json::parse(QuantizeReportJson(report, true))["matrices"][0]["name"], matrix.name);
  EXPECT_THAT(QuantizeReportText(report, true), HasSubstr("48x80"));
  ASSERT_OK_AND_ASSIGN(const auto again, Make(Path("out"), Path("again"), "nf4"));
  EXPECT_THAT(again.notices,
              ::testing::ElementsAre(HasSubstr("14 matrices are quantized already")));
}

TEST_F(QuantizeCheckpointTest, WhatCannotBeIsRefusedAndNothingRemains) {
  const std::string folder = Tiny(WriteTinyLlamaFolder, Options(false));
  const std::string gguf = Tiny(WriteTinyLlamaGguf, Options(false));
  Write("there.gguf", "x");
  struct Row {
    std::string in, out, weights, message;
  };
  const Row rows[] = {
      {gguf, Path("there.gguf"), "q8_0", "is there already, expected a new file"},
      {folder, folder, "nf4", "is there already, expected a new folder"},
      {folder, Path("out.gguf"), "int8", "GGUF has no int8, expected one of f32, f16"},
      {folder, Path("out"), "q8_0", "a Hugging Face folder has no q8_0"},
      {gguf, Path("out.gguf"), "nf4", "GGUF has no nf4, expected one of f32, f16"},
      {gguf, Path("out.gguf"), "q4_0", "attn_q.weight' to q4_0: matrix [48, 48]"},
      {folder, Path("out"), "nf4,nothing=int8", "'nothing=int8' names none of its matrices"},
      {folder, Path("none/out"), "nf4", "cannot be made"},
      {gguf, Path("none/out.gguf"), "f16", "cannot be written"},
      {Path("none"), Path("out"), "nf4", "cannot be opened"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.message);
    const absl::Status status = Make(row.in, row.out, row.weights).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.message));
    EXPECT_EQ(std::string(status.message()).find('\n'), std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(Path("out")));
    EXPECT_FALSE(std::filesystem::exists(Path("out.gguf")));
    EXPECT_THAT(Leftovers(), IsEmpty());
  }
  EXPECT_EQ(Read("there.gguf"), "x");
}

TEST_F(QuantizeCheckpointTest, LinksOutOfTheFolderAreNotCopied) {
  namespace fs = std::filesystem;
  const std::string folder = Tiny(WriteTinyLlamaFolder, Options(false));
  Write("secret", "a key");
  fs::create_symlink("../secret", Path("in/vocab.txt"));
  const absl::Status status = Make(folder, Path("out"), "nf4").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr(Path("in/vocab.txt") + ": links to '"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("secret', outside of its folder"));
  EXPECT_FALSE(fs::exists(Path("out")));
  EXPECT_THAT(Leftovers(), IsEmpty());

  // Links that stay inside are good.
  fs::remove(Path("in/vocab.txt"));
  Write("in/README.md", "text");
  fs::create_symlink("README.md", Path("in/LICENSE"));
  fs::create_symlink("../secret", Path("in/secret"));
  ASSERT_TRUE(Make(folder, Path("out"), "nf4").ok());
  EXPECT_EQ(Read("out/LICENSE"), "text");
  EXPECT_FALSE(fs::exists(Path("out/secret")));

  // As Hugging Face's cache lies on a disk.
  fs::create_directories(Path("cache/blobs"));
  fs::create_directories(Path("cache/snapshots"));
  fs::rename(folder, Path("cache/snapshots/main"));
  fs::remove(Path("cache/snapshots/main/LICENSE"));
  Write("cache/blobs/0123", "of the cache");
  fs::create_symlink("../../blobs/0123", Path("cache/snapshots/main/LICENSE"));
  const auto cached = Make(Path("cache/snapshots/main"), Path("again"), "nf4");
  ASSERT_TRUE(cached.ok()) << cached.status();
  EXPECT_EQ(Read("again/LICENSE"), "of the cache");
}

TEST_F(QuantizeCheckpointTest, FaultsOnTheWayLeaveNothing) {
  const std::string folder = Tiny(WriteTinyLlamaFolder, Options(false));
  for (const std::string& out : {Path("out"), Path("out.gguf")}) {
    const bool gguf = out.ends_with(".gguf");
    const std::string in = gguf ? Tiny(WriteTinyLlamaGguf, Options(true)) : folder;
    QuantizeOptions options;
    options.weights = Plan(gguf ? "q4_0" : "nf4");
    int asked = 0;
    options.cancelled = [&] { return ++asked == 5; };
    EXPECT_TRUE(absl::IsCancelled(QuantizeCheckpoint(in, out, options).status()));
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_THAT(Leftovers(), IsEmpty());
  }

  Safetensors file = Safetensors::Parse(Read("in/model.safetensors"));
  const size_t begin =
      file.header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0].get<size_t>();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(file.data.data() + begin + 4 * 50, &nan, sizeof(nan));
  Write("in/model.safetensors", file.Bytes());
  const absl::Status status = Make(folder, Path("out"), "nf4").status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tensor 'model.layers.1.mlp.up_proj.weight' to nf4: row 1, column 2"));
  EXPECT_FALSE(std::filesystem::exists(Path("out")));
  EXPECT_THAT(Leftovers(), IsEmpty());
}

// As on a full disk: the system refuses to write on.
TEST_F(QuantizeCheckpointTest, AFullDiskLeavesNothing) {
  const std::string in = Tiny(WriteTinyLlamaGguf, Options(true));
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {40'000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status file = Make(in, Path("out.gguf"), "q8_0").status();
  const absl::Status folder = Make(in, Path("out"), "int8").status();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(std::string(file.message()), HasSubstr("out.gguf: cannot be written"));
  EXPECT_THAT(std::string(folder.message()), HasSubstr("cannot be written"));
  EXPECT_FALSE(std::filesystem::exists(Path("out.gguf")));
  EXPECT_FALSE(std::filesystem::exists(Path("out")));
  EXPECT_THAT(Leftovers(), IsEmpty());
}

// FIPS 180-4's examples, in pieces of every kind.
TEST(Sha256Test, GivesTheStandardsSums) {
  const auto sum = [](std::string_view text, size_t piece) {
    Sha256 sha;
    for (size_t at = 0; at < text.size(); at += piece) {
      const std::string_view part = text.substr(at, piece);
      sha.Add(std::as_bytes(std::span(part.data(), part.size())));
    }
    return sha.Finish();
  };
  const std::string million(1'000'000, 'a');
  for (const size_t piece : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}}) {
    EXPECT_EQ(sum("", piece), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(sum("abc", piece),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(sum("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(sum(million, piece),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

}  // namespace
}  // namespace treadle
