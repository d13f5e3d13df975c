// GGUF files: good ones, and a table of bad ones, each refused with a line that names the fault.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "models/checkpoints/gguf/gguf_file.h"
#include "models/text/tokenizer_json.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_model.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// `bytes` written `offset` after the end of the first `anchor` ("": the file's begin).
struct Corruption {
  const char* name;
  std::string anchor;
  size_t offset;
  std::string bytes;
  std::string message;
};

// After a key: u32 type, value (array: u32 type, u64 count). After a tensor's name: u32 dimensions,
// i64 extents (innermost first), u32 type, u64 offset.
std::vector<Corruption> Corruptions() {
  const std::string q = "blk.0.attn_q.weight", k = "blk.0.attn_k.weight";
  const std::string tokens = "tokenizer.ggml.tokens";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"magic", "", 0, "GGUX", "does not begin with 'GGUF'"},
      {"old version", "", 4, Raw<uint32_t>(2), "version is 2, expected 3"},
      {"new version", "", 4, Raw<uint32_t>(4), "version is 4, expected 3"},
      {"byte order", "", 4, Raw<uint32_t>(0x03000000), "big-endian"},
      {"tensor count", "", 8, Raw(kHuge), "tensor count is 18446744073709551615"},
      {"metadata count", "", 16, Raw(kHuge), "metadata count is 18446744073709551615"},
      {"no metadata", "", 16, Raw<uint64_t>(0), ""},
      {"key length", "", 24, Raw(kHuge), "truncated: metadata key 0"},
      {"key length that wraps", "", 24, Raw(kHuge - 31), "truncated: metadata key 0"},
      {"value type", "general.architecture", 0, Raw<uint32_t>(13), "has type 13, expected 0 to 12"},
      {"string length", "general.architecture", 4, Raw(kHuge), "truncated: metadata"},
      {"architecture", "general.architecture", 12, "lxama", "general.architecture is 'lxama'"},
      {"control characters", "general.architecture", 12, "ll\nma",
       "general.architecture is 'll\\x0ama'"},
      {"type of a setting", "llama.block_count", 0, Raw<uint32_t>(6), "llama.block_count' is f32"},
      {"no layers", "llama.block_count", 4, Raw<uint32_t>(0), "llama.block_count is 0"},
      {"another layer", "llama.block_count", 4, Raw<uint32_t>(2),
       "tensor 'blk.1.attn_norm.weight' is missing"},
      {"layers", "llama.block_count", 4, Raw<uint32_t>(0xffffffff), "layers is 4294967295"},
      {"hidden size", "llama.embedding_length", 4, Raw<uint32_t>(48),
       "token_embd.weight' has shape"},
      {"no heads", "llama.attention.head_count", 4, Raw<uint32_t>(0), "head_count is 0"},
      {"no K/V heads", "llama.attention.head_count_kv", 4, Raw<uint32_t>(0), "head_count_kv is 0"},
      {"uneven heads", "llama.attention.head_count_kv", 4, Raw<uint32_t>(3), "evenly"},
      {"K/V heads", "llama.attention.head_count_kv", 4, Raw<uint32_t>(2), k},
      {"no context", "llama.context_length", 4, Raw<uint32_t>(0), "context_length is 0"},
      {"feed-forward size", "llama.feed_forward_length", 4, Raw<uint32_t>(64), "blk.0.ffn_gate"},
      {"epsilon", "layer_norm_rms_epsilon", 4, Raw(nan), "expected a finite number"},
      {"large epsilon", "layer_norm_rms_epsilon", 4, Raw(2.0f), "norm epsilon is 2"},
      {"missing setting", "llama.embedding_lengt", 0, "x", "llama.embedding_length' is missing"},
      {"element type", tokens, 4, Raw<uint32_t>(99), "type 99"},
      {"array of arrays", tokens, 4, Raw<uint32_t>(9), "metadata '" + tokens + "'"},
      {"array count", tokens, 8, Raw(kHuge), tokens},
      {"array count that wraps", tokens, 8, Raw(uint64_t{1} << 61), tokens},
      {"fewer tokens", tokens, 8, Raw<uint64_t>(3), ""},
      {"numbers for tokens", tokens, 4, Raw<uint32_t>(0), ""},
      {"token kind", "tokenizer.ggml.token_type", 16, Raw<int32_t>(7),
       "token_type of token 0 is 7"},
      {"token id", "tokenizer.ggml.eos_token_id", 4, Raw<uint32_t>(9999), "eos_token_id is 9999"},
      {"tokenizer model", "tokenizer.ggml.model", 12, "xxxx", "tokenizer.ggml.model is 'xxxx'"},
      {"no dimensions", q, 0, Raw<uint32_t>(0), q + "' has 0 dimensions"},
      {"five dimensions", q, 0, Raw<uint32_t>(5), q + "' has 5 dimensions"},
      {"another dimension", q, 0, Raw<uint32_t>(3), "truncated: name of tensor 3"},
      {"negative extent", q, 4, Raw<int64_t>(-32), q + "' has extent -32"},
      {"no extent", q, 12, Raw<int64_t>(0), q + "' has extent 0"},
      {"shape that wraps", q, 4, Raw<int64_t>(int64_t{1} << 62), q + "': shape overflows"},
      {"large shape", q, 4, Raw<int64_t>(int64_t{1} << 50), q},
      {"other shape", q, 12, Raw<int64_t>(16), q + "' has shape [16, 32], expected [32, 32]"},
      {"unknown type", q, 20, Raw<uint32_t>(99), q + "' has ggml type 99, expected one of f32"},
      {"type without rows", q, 20, Raw<uint32_t>(12), "expected a multiple of 256"},
      {"offset outside", q, 24, Raw(uint64_t{1} << 40), "outside the file's"},
      {"offset that wraps", q, 24, Raw(kHuge - 31), "outside the file's"},
      {"odd offset", q, 24, Raw<uint64_t>(1), "expected a multiple of 32"},
      {"overlap", q, 24, Raw<uint64_t>(0), "overlap"},
      {"duplicate tensor", "blk.0.attn_", 0, "k", "tensor 'blk.0.attn_k.weight' appears twice"},
      {"missing tensor", "blk.0.ffn_u", 0, "x", "tensor 'blk.0.ffn_up.weight' is missing"},
  };
}

class GgufTest : public ScratchCheckpoint {
 protected:
  static constexpr const char* kName = "tiny-llama.gguf";

  std::string WriteTiny(const char* format, bool tokenizer,
                        const std::map<std::string, float>& numbers = {}) {
    TinyModelOptions options;
    options.numbers = numbers;
    options.format = format;
    options.layers = 1;
    options.hidden = options.ffn_hidden = 32;
    options.heads = 2;
    options.kv_heads = 1;
    options.context = 16;
    options.tokenizer = tokenizer;
    const auto path = WriteTinyLlamaGguf(folder_.path(), options);
    EXPECT_TRUE(path.ok()) << path.status();
    return Read(kName);
  }
};

TEST_F(GgufTest, GoodFilesLoad) {
  for (const char* format : {"f32", "f16", "bf16", "q8_0", "q4_1"}) {
    WriteTiny(format, true);
    EXPECT_EQ(Load(Path(kName)), absl::OkStatus()) << format;
  }
}

TEST_F(GgufTest, EveryCorruptionIsRefused) {
  const std::string good = WriteTiny("f32", true);
  for (const Corruption& corruption : Corruptions()) {
    SCOPED_TRACE(corruption.name);
    std::string bytes = good;
    size_t at = good.find(corruption.anchor);
    ASSERT_NE(at, std::string::npos);
    at += corruption.anchor.size() + corruption.offset;
    // "blk.0.attn_" is followed by its own letter: the anchor's first match is attn_norm's.
    if (std::string(corruption.name) == "duplicate tensor") at = good.find("attn_q") + 5;
    ASSERT_LE(at + corruption.bytes.size(), bytes.size());
    bytes.replace(at, corruption.bytes.size(), corruption.bytes);
    Write("bad.gguf", bytes);
    ExpectRefused(Load(Path("bad.gguf")), Path("bad.gguf"), corruption.message);
  }
}

// As llama.cpp takes them: a factor without a type is linear, and 0 none; so is the older key.
TEST_F(GgufTest, EveryKeyAboutRotationIsReadOrRefused) {
  const auto factor = [&](const std::map<std::string, float>& numbers) {
    WriteTiny("f32", true, numbers);
    const auto checkpoint = Checkpoint::Open(Path(kName));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? (*checkpoint)->config().rope_linear_factor : -1;
  };
  EXPECT_EQ(factor({}), 1);
  EXPECT_EQ(factor({{"rope.scaling.factor", 4}}), 4);
  EXPECT_EQ(factor({{"rope.scale_linear", 2}}), 2);
  EXPECT_EQ(factor({{"rope.scaling.factor", 4}, {"rope.scale_linear", 2}}), 4);
  EXPECT_EQ(factor({{"rope.scaling.factor", 0}}), 1);
  WriteTiny("f32", true, {{"rope.scaling.alpha", 3}});
  ExpectRefused(Load(Path(kName)), Path(kName), "'llama.rope.scaling.alpha' says how positions");
  WriteTiny("f32", true, {{"rope.scale_linear", -2}});
  ExpectRefused(Load(Path(kName)), Path(kName), "linear factor is -2");
}

// The tiny template ends turns with <|im_end|>; files often name <|endoftext|> alone.
TEST_F(GgufTest, WhatEndsATurnInTheTemplateIsAnEnd) {
  std::string bytes = WriteTiny("f32", true);
  const auto end_of_text = static_cast<uint32_t>(TinyEndOfTurn() - 2);
  const std::string key = "tokenizer.ggml.eos_token_id";
  bytes.replace(bytes.find(key) + key.size() + 4, 4, Raw(end_of_text));
  Write("other.gguf", bytes);
  const auto ends = [&](const std::string& name) {
    const auto checkpoint = Checkpoint::Open(Path(name));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? (*checkpoint)->end_ids() : std::vector<int32_t>();
  };
  EXPECT_EQ(ends("other.gguf"), (std::vector<int32_t>{TinyEndOfTurn() - 2, TinyEndOfTurn()}));
  EXPECT_EQ(ends(kName), (std::vector<int32_t>{TinyEndOfTurn()}));
  const std::string in_template = "tokenizer.chat_template";
  const size_t at = bytes.find("<|im_end|>", bytes.find(in_template));
  for (size_t i = at; i != std::string::npos; i = bytes.find("<|im_end|>", i)) {
    bytes.replace(i, 10, "<|xx_xxx|>");
  }
  Write("another.gguf", bytes);
  EXPECT_EQ(ends("another.gguf"), (std::vector<int32_t>{TinyEndOfTurn() - 2}));
}

TEST_F(GgufTest, TruncatedFilesAreRefused) {
  const std::string good = WriteTiny("q8_0", false);
  const size_t header = good.find("output_norm.weight");
  ASSERT_NE(header, std::string::npos);
  for (size_t size = 1; size < good.size(); size += size < header + 64 ? 1 : 97) {
    Write("bad.gguf", good.substr(0, size));
    const absl::Status status = Load(Path("bad.gguf"));
    ASSERT_FALSE(status.ok()) << size;
    ExpectRefused(status, Path("bad.gguf"), "");
    if (HasFailure()) FAIL() << "cut to " << size << " bytes";
  }
  Write("bad.gguf", "");
  ExpectRefused(Load(Path("bad.gguf")), Path("bad.gguf"), "is empty");
  ExpectRefused(Load(Path("none.gguf")), Path("none.gguf"), "cannot be opened");
}

// By whoever copies another one over it, or a disk that is full.
TEST_F(GgufTest, AFileThatChangesWhileItLoadsIsRefused) {
  const auto backend = CreateReferenceBackend();
  for (const bool longer : {false, true}) {
    const std::string good = WriteTiny("f32", true);
    ASSERT_GT(good.size(), size_t{3} << 14);
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(Path(kName)));
    LoadOptions options;
    options.max_batch_tokens = 1;
    const size_t now = longer ? good.size() + 1 : 1 << 12;
    options.progress = [&](double) { std::filesystem::resize_file(Path(kName), now); };
    const absl::Status status = Model::Load(*checkpoint, *backend, options).status();
    ExpectRefused(
        status, Path(kName),
        Str("was changed while it was read: it had ", good.size(), " bytes, now it has ", now));
  }
}

TEST_F(GgufTest, AnEntryTwiceIsRefused) {
  GgufWriter writer;
  writer.AddU32("a", 1);
  writer.AddU32("a", 2);
  Write("bad.gguf", writer.Bytes());
  ExpectRefused(Load(Path("bad.gguf")), Path("bad.gguf"), "metadata 'a' appears twice");
}

TEST_F(GgufTest, AlignmentIsAPowerOfTwo) {
  for (const uint32_t alignment : {0u, 24u, 1u << 31}) {
    GgufWriter writer;
    writer.AddU32("general.alignment", alignment);
    Write("bad.gguf", writer.Bytes());
    ExpectRefused(Load(Path("bad.gguf")), Path("bad.gguf"),
                  Str("general.alignment is ", alignment));
  }
}

TEST_F(GgufTest, ValuesComeBackByType) {
  GgufWriter writer;
  writer.AddString("text", "hi");
  writer.AddU32("integer", 4000000000u);
  writer.AddF32("number", 0.5f);
  writer.AddBool("flag", true);
  writer.AddI32s("list", {-1, 2});
  Write("values.gguf", writer.Bytes());
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("values.gguf")));
  EXPECT_EQ(*file->String("text"), "hi");
  EXPECT_EQ(*file->Integer("integer"), 4000000000);
  EXPECT_EQ(*file->Number("number"), 0.5);
  EXPECT_EQ(*file->Bool("flag", false), true);
  EXPECT_EQ(file->Find("list")->numbers, (std::vector<double>{-1, 2}));
  EXPECT_EQ(*file->Integer("none", 7), 7);
  EXPECT_FALSE(file->Integer("none").ok());
  EXPECT_FALSE(file->Integer("list").ok());
  EXPECT_FALSE(file->Integer("number").ok());
  EXPECT_FALSE(file->String("flag").ok());
  EXPECT_FALSE(file->Bool("integer", false).ok());
}

// A key with its type and value, as a file has them.
std::string Pair(const std::string& key, const std::string& value) {
  return Raw<uint64_t>(key.size()) + key + value;
}

// Leftovers of other writers, none of which changes a model.
TEST_F(GgufTest, FilesAsTheyAreFound) {
  GgufWriter writer;
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddStrings("tokenizer.ggml.tokens", {"a", "b", "<c>"});
  writer.AddStrings("tokenizer.ggml.merges", {});
  writer.AddI32s("tokenizer.ggml.token_type", {0, 1, 3});
  writer.AddU32("tokenizer.ggml.bos_token_id", 2);
  writer.AddRaw(Pair("tokenizer.ggml.add_bos_token", Raw<uint32_t>(0) + Raw<uint8_t>(1)));
  writer.AddRaw(Pair("tokenizer.ggml.add_eos_token", Raw<uint32_t>(0) + Raw<uint8_t>(0)));
  const std::string numbers =
      Raw<uint32_t>(5) + Raw<uint64_t>(2) + Raw<int32_t>(7) + Raw<int32_t>(8);
  const std::string texts = Raw<uint32_t>(8) + Raw<uint64_t>(1) + Raw<uint64_t>(2) + "hi";
  const std::string deep = Raw<uint32_t>(9) + Raw<uint64_t>(1) + numbers;
  writer.AddRaw(Pair("trained.on", Raw<uint32_t>(9) + Raw<uint32_t>(9) + Raw<uint64_t>(3) +
                                       numbers + texts + deep));
  writer.AddU32("behind", 5);
  Write("found.gguf", writer.Bytes());
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("found.gguf")));
  EXPECT_EQ(*file->Integer("behind"), 5);
  EXPECT_FALSE(file->String("trained.on").ok());
  ASSERT_OK_AND_ASSIGN(const auto spec, ReadGgufTokenizer(*file));
  EXPECT_TRUE(spec->add_bos);
  EXPECT_FALSE(spec->add_eos);
  EXPECT_EQ(spec->tokens[0].kind, TokenKind::kNormal);
  EXPECT_EQ(spec->tokens[2].kind, TokenKind::kControl);
}

// Gemma 4's tokenizer: SentencePiece's symbols, with the merges of its tokenizer.json and without a
// space before the text. The ids are those of the tokenizers library, which puts one there.
TEST_F(GgufTest, ListedMergesOfSentencePieceAreRead) {
  FolderFiles files(TREADLE_TESTDATA "/tokenizers/llama");
  ASSERT_OK_AND_ASSIGN(const auto json, ReadTokenizerJson(files));
  GgufWriter writer;
  std::vector<std::string> texts, merges;
  std::vector<int32_t> kinds;
  for (const TokenizerSpec::Token& token : json.tokens) {
    texts.push_back(token.text);
    kinds.push_back(static_cast<int32_t>(token.kind) + 1);
  }
  for (const auto& [left, right] : json.merges) merges.push_back(left + " " + right);
  writer.AddString("tokenizer.ggml.model", "gemma4");
  writer.AddStrings("tokenizer.ggml.tokens", texts);
  writer.AddI32s("tokenizer.ggml.token_type", kinds);
  writer.AddStrings("tokenizer.ggml.merges", merges);
  Write("gemma4.gguf", writer.Bytes());
  ASSERT_OK_AND_ASSIGN(const auto file, GgufFile::Read(Path("gemma4.gguf")));
  ASSERT_OK_AND_ASSIGN(const auto spec, ReadGgufTokenizer(*file));
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, Tokenizer::Create(*spec));
  std::ifstream in(files.PathOf("oracle.json"));
  int64_t compared = 0;
  const nlohmann::json oracle = nlohmann::json::parse(in);
  for (const auto& row : oracle["cases"]) {
    const auto text = row["text"].get<std::string>();
    if (text.empty() || text.find('<') != text.npos) continue;  // added tokens begin anew
    EXPECT_EQ(*tokenizer->Encode(" " + text, {}), row["ids"].get<std::vector<int32_t>>()) << text;
    ++compared;
  }
  EXPECT_GT(compared, 10);
}

// As llama.cpp's converter writes them: a list of which layers are local, and a switch of rotation.
TEST_F(GgufTest, LayersThatNobodyServesAreRefused) {
  struct Row {
    const char* model;
    std::string key;
    size_t offset;
    std::string bytes;
    const char* message;
  };
  const std::string pattern = "olmo2.attention.sliding_window_pattern";
  const Row rows[] = {
      {"olmo3", pattern, 16, Raw<uint8_t>(0), "lists 3 layers, expected 3 with global ones at"},
      {"olmo3", "olmo2.block_count", 4, Raw<uint32_t>(2), "lists 3 layers, expected 2 with global"},
      {"gemma4", "gemma4.feed_forward_length", 16, Raw<uint32_t>(54),
       "says 53 of layer 1, expected 54"},
      {"gemma4-large", "gemma4.attention.head_count_kv", 16, Raw<uint32_t>(6),
       "of layer 1, expected 6"},
      {"gemma4", "gemma4.rope.dimension_count_swa", 4, Raw<uint32_t>(8),
       "dimension_count_swa is 8"},
      {"apertus", "apertus.block_count", 4, Raw<uint32_t>(1), "a number of each of 1 layers"},
      {"lfm2", "lfm2.attention.head_count_kv", 24, Raw<uint32_t>(2),
       "lists 5 layers, expected 5, with as many K/V heads wherever there are some"},
      {"lfm2", "lfm2.shortconv.l_cache", 4, Raw<uint32_t>(0), "convolutions of 0 positions"},
      {"granite4", "granite.rope.scaling.finetuned", 4, Raw<uint8_t>(0), "finetuned is not true"}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.key);
    std::string bytes = ReadWhole(Str(TREADLE_TESTDATA "/models/", row.model, "/model.gguf"));
    const size_t at = bytes.find(row.key) + row.key.size() + row.offset;
    bytes.replace(at, row.bytes.size(), row.bytes);
    Write("other.gguf", bytes);
    ExpectRefused(Checkpoint::Open(Path("other.gguf")).status(), Path("other.gguf"), row.message);
  }
}

TEST_F(GgufTest, ArraysInArraysEnd) {
  std::string deep = Raw<uint32_t>(0) + Raw<uint64_t>(0);
  for (int i = 0; i < 1000; ++i) deep = Raw<uint32_t>(9) + Raw<uint64_t>(1) + deep;
  GgufWriter writer;
  writer.AddRaw(Pair("deep", Raw<uint32_t>(9) + deep));
  Write("bad.gguf", writer.Bytes());
  ExpectRefused(Load(Path("bad.gguf")), Path("bad.gguf"),
                "metadata 'deep' has arrays in arrays, more than 8 deep");
}

TEST_F(GgufTest, AGitLfsPointerIsNamed) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') +
      "\nsize 98362432\n";
  Write("model.gguf", pointer);
  ExpectRefused(Load(Path("model.gguf")), Path("model.gguf"), "is a Git LFS pointer");
  TinyModelOptions options;
  std::filesystem::create_directories(Path("folder"));
  ASSERT_OK_AND_ASSIGN(const auto folder, WriteTinyLlamaFolder(Path("folder"), options));
  ASSERT_TRUE(Load(folder).ok());
  for (const char* name : {"model.safetensors", "tokenizer.json", "config.json"}) {
    const std::string was = Read(Str("folder/", name));
    Write(Str("folder/", name), pointer);
    ExpectRefused(Load(folder), Path(Str("folder/", name)), "is a Git LFS pointer");
    Write(Str("folder/", name), was);
  }
}

// llama.cpp adds the biases that are there.
TEST_F(GgufTest, OneBiasOfThreeIsAdded) {
  WriteTiny("f32", false);
  ASSERT_OK_AND_ASSIGN(const auto tiny, GgufFile::Read(Path(kName)));
  for (const std::string part : {"q", "k", "v"}) {
    GgufWriter writer;
    for (const GgufFile::RawPair& pair : tiny->raw_metadata()) {
      writer.AddRaw({reinterpret_cast<const char*>(pair.bytes.data()), pair.bytes.size()});
    }
    for (const StoredTensor& tensor : tiny->tensors()) {
      writer.AddTensor(tensor.name, tensor.shape, static_cast<uint32_t>(tensor.format->gguf_type),
                       {reinterpret_cast<const char*>(tensor.data), tensor.bytes});
    }
    const int64_t rows = part == "q" ? 32 : 16;
    writer.AddTensor("blk.0.attn_" + part + ".bias", {rows}, 0,
                     *EncodeWeights("f32", std::vector<float>(static_cast<size_t>(rows), 0.5f)));
    Write("bias.gguf", writer.Bytes());
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(Path("bias.gguf")));
    EXPECT_TRUE(checkpoint->config().qkv_bias);
    EXPECT_FALSE(checkpoint->config().output_bias);
    for (const std::string other : {"q", "k", "v"}) {
      const auto* const bias = checkpoint->Find("blk.0.attn_" + other + ".bias");
      ASSERT_NE(bias, nullptr);
      EXPECT_EQ(DecodeVector(*bias),
                std::vector<float>(other == "q" ? 32 : 16, other == part ? 0.5f : 0.0f));
    }
    EXPECT_TRUE(Load(Path("bias.gguf")).ok());
  }
}

// As llama.cpp reads the name (src/llama-vocab.cpp).
TEST_F(GgufTest, APreTokenizersNameSaysWhatTheFileLeavesOut) {
  const auto read = [&](const char* name) -> absl::StatusOr<TokenizerSpec> {
    GgufWriter writer;
    writer.AddString("tokenizer.ggml.model", "gpt2");
    writer.AddString("tokenizer.ggml.pre", name);
    writer.AddStrings("tokenizer.ggml.tokens", {"a", "b", "ab"});
    writer.AddStrings("tokenizer.ggml.merges", {"a b"});
    Write("pre.gguf", writer.Bytes());
    TREADLE_ASSIGN_OR_RETURN(const auto file, GgufFile::Read(Path("pre.gguf")));
    TREADLE_ASSIGN_OR_RETURN(auto spec, ReadGgufTokenizer(*file));
    return *std::move(spec);
  };
  for (const auto& [name, ignore_merges, add_bos] :
       std::vector<std::tuple<const char*, bool, bool>>{{"llama-v3", true, true},
                                                        {"tekken", true, true},
                                                        {"glm4", true, false},
                                                        {"dbrx", false, false},
                                                        {"deepseek-v3", false, false}}) {
    ASSERT_OK_AND_ASSIGN(const auto spec, read(name));
    EXPECT_EQ(spec.ignore_merges, ignore_merges) << name;
    EXPECT_EQ(spec.add_bos, add_bos) << name;
  }
  ExpectRefused(
      read("tekkn").status(), Path("pre.gguf"),
      "tokenizer.ggml.pre: pre-tokenizer 'tekkn' is not one of the 66 known ones; nearest "
      "are 'tekken'");
  ExpectRefused(read("gemma4").status(), Path("pre.gguf"), "merges characters, not bytes");
}

// Whatever the bytes, an answer: loaded, or refused with a line that names the file.
TEST_F(GgufTest, RandomMutationsNeverCrash) {
  std::mt19937 random(20);
  int loaded = 0, refused = 0;
  for (const bool tokenizer : {false, true}) {
    const std::string good = WriteTiny("q8_0", tokenizer);
    const size_t header = good.find("output_norm.weight") + 64;
    for (int i = 0; i < (tokenizer ? 1000 : 2000); ++i) {
      Write("bad.gguf", Mutate(good, header, random));
      const absl::Status status = Load(Path("bad.gguf"));
      ++(status.ok() ? loaded : refused);
      if (!status.ok()) ExpectRefused(status, Path("bad.gguf"), "");
      if (HasFailure()) FAIL() << "mutation " << i;
    }
  }
  EXPECT_GT(loaded, 100);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace treadle
