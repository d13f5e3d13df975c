#include "models/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/status.h"
#include "models/text/bpe_tokenizer.h"
#include "models/text/pre_tokenizer.h"
#include "models/text/tokenizer_json.h"
#include "models/text/unicode.h"
#include "tests/models/text/tokenizer_oracle.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<Tokenizer> FromFolder(const std::string& name) {
  FolderFiles files(TREADLE_TESTDATA "/tokenizers/" + name);
  auto spec = ReadTokenizerJson(files);
  EXPECT_TRUE(spec.ok()) << spec.status();
  auto tokenizer = Tokenizer::Create(*std::move(spec));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

// As a GGUF file gives it: scores and kinds, no merges.
TokenizerSpec ScoredSpec() {
  constexpr TokenKind kKinds[] = {TokenKind::kNormal, TokenKind::kUnknown, TokenKind::kControl,
                                  TokenKind::kByte};
  TokenizerSpec spec;
  spec.model = TokenizerSpec::Model::kSentencePiece;
  spec.add_space_prefix = true;
  const auto oracle = ReadOracle("sentencepiece-scores.json");
  for (const auto& piece : oracle["pieces"]) {
    spec.tokens.push_back(
        {piece[0].get<std::string>(), piece[1].get<float>(), kKinds[piece[2].get<size_t>()]});
  }
  spec.unknown = 0;
  spec.bos = 1;
  spec.eos = 2;
  spec.add_bos = true;
  return spec;
}

std::unique_ptr<Tokenizer> Scored() {
  auto tokenizer = Tokenizer::Create(ScoredSpec());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

class OracleTest : public ::testing::TestWithParam<const char*> {};

TEST_P(OracleTest, EncodesAndDecodesAsTheAuthors) {
  const std::string name = GetParam();
  CheckCases(*FromFolder(name), ReadOracle(name + "/oracle.json"));
}

INSTANTIATE_TEST_SUITE_P(TokenizerJson, OracleTest,
                         ::testing::Values("gpt-2", "smollm", "olmo", "bloom", "falcon",
                                           "llama-bpe", "qwen2", "gpt-4o", "llama", "mistral",
                                           "gemma", "kimi-k2", "added-bytes", "added-nfc",
                                           "added-prepend", "added-metaspace"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

// tests/oracles/make_pre_tokenizer_oracles.py; Falcon's cuts characters, and is compared by ids.
TEST(PreTokenizerTest, EveryNameCutsAsTheTokenizersLibrary) {
  const auto oracle = ReadOracle("../pre_tokenizers.json");
  for (const PreTokenizerRow& row : PreTokenizerRows()) {
    if (row.splits == "falcon") continue;
    const auto& expected = oracle["words"].at(std::string(row.splits));
    ASSERT_OK_AND_ASSIGN(const auto made, PreTokenizer::Create(row.name));
    EXPECT_EQ(made.normalizes_nfc(), row.nfc);
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto text = oracle["texts"][i].get<std::string>();
      std::vector<std::string_view> words;
      ASSERT_TRUE(made.Split(text, &words).ok());
      std::vector<size_t> lengths;
      for (const std::string_view word : words) {
        if (!word.empty()) lengths.push_back(word.size());
      }
      EXPECT_EQ(lengths, expected[i].get<std::vector<size_t>>()) << row.name << ": " << text;
    }
  }
}

// A folder that is written for a name is read as one with the same words, normalization and flags.
TEST(PreTokenizerTest, EveryNameIsFoundByItsPatterns) {
  for (const PreTokenizerRow& row : PreTokenizerRows()) {
    const auto* const found = PreTokenizerOf(SplitPatterns(row), row.nfc, row.ignore_merges);
    ASSERT_NE(found, nullptr) << row.name;
    EXPECT_EQ(found->splits, row.splits);
    EXPECT_EQ(found->nfc, row.nfc);
    EXPECT_EQ(found->ignore_merges, row.ignore_merges);
  }
  EXPECT_EQ(PreTokenizerOf({"x+"}, false, false), nullptr);
}

TEST(PreTokenizerTest, AnotherAlgorithmIsRefusedByName) {
  const auto message = [](std::string_view name) {
    return std::string(FindPreTokenizer(name).status().message());
  };
  EXPECT_THAT(message("gemma4"), HasSubstr("'gemma4' merges characters, not bytes"));
  EXPECT_THAT(message("superbpe"), HasSubstr("'superbpe' counts digits from the right"));
  EXPECT_THAT(message("deepseek-v9"), HasSubstr("nearest are 'deepseek-v3'"));
}

TEST(SentencePieceTest, ScoresGiveWhatTheLibraryGives) {
  CheckCases(*Scored(), ReadOracle("sentencepiece-scores.json"));
}

TEST(SentencePieceTest, ScoresAndMergesAgree) {
  const auto scored = Scored();
  const auto merged = FromFolder("llama");
  const auto oracle = ReadOracle("llama/oracle.json");
  for (const auto& row : oracle["cases"]) {
    const auto text = row["text"].get<std::string>();
    EXPECT_EQ(*scored->Encode(text, {}), *merged->Encode(text, {})) << text;
  }
}

TEST(SentencePieceTest, WithoutByteTokensARunOfStrangersIsOneUnknown) {
  TokenizerSpec spec;
  spec.model = TokenizerSpec::Model::kSentencePiece;
  spec.tokens = {{"<unk>", 0, TokenKind::kUnknown}, {"a"}, {"b"}, {"ab"}};
  spec.unknown = 0;
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, Tokenizer::Create(spec));
  EXPECT_THAT(*tokenizer->Encode("xyabz", {}), ElementsAre(0, 3, 0));
}

TEST(TokenizerTest, SpecialTextIsTextUnlessAsked) {
  const auto tokenizer = FromFolder("smollm");
  const auto special = tokenizer->Encode("<|im_end|>", {});
  ASSERT_EQ(*special, std::vector<int32_t>{tokenizer->spec().eos});
  const auto text = tokenizer->Encode("<|im_end|>", {.parse_special = false});
  EXPECT_GT(text->size(), 1u);
  EXPECT_THAT(*text, ::testing::Not(::testing::Contains(tokenizer->spec().eos)));
  EXPECT_EQ(tokenizer->Decode(*text, false), "<|im_end|>");
  EXPECT_EQ(tokenizer->Decode(*special, false), "");
  EXPECT_EQ(tokenizer->Decode(*special, true), "<|im_end|>");
}

TEST(TokenizerTest, UserDefinedTokensAreAlwaysFound) {
  const auto tokenizer = FromFolder("qwen2");
  const auto with = tokenizer->Encode("a<tool>b", {});
  EXPECT_EQ(*with, *tokenizer->Encode("a<tool>b", {.parse_special = false}));
  EXPECT_EQ(with->size(), 3u);
}

TEST(TokenizerTest, RoundTripsEveryText) {
  std::mt19937 random(11);
  for (const char* name : {"gpt-2", "smollm", "llama-bpe", "llama"}) {
    const auto tokenizer = FromFolder(name);
    for (int i = 0; i < 200; ++i) {
      std::string text;
      const int length = static_cast<int>(random() % 40);
      for (int c = 0; c < length; ++c) {
        constexpr char32_t kRanges[] = {0x80, 0x100, 0x800, 0x3000, 0xD800, 0x1F700, 0x20};
        AppendUtf8(random() % kRanges[random() % 7], &text);
      }
      if (FindInvalidUtf8(text) != text.npos || text.find('<') != text.npos) continue;
      ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer->Encode(text, {.parse_special = false}));
      EXPECT_EQ(tokenizer->Decode(ids, false), text) << name;
      CheckStream(*tokenizer, ids, false, text);
    }
  }
}

TEST(TokenizerTest, RefusesInvalidUtf8WithItsOffset) {
  const auto byte_level = FromFolder("gpt-2");
  const auto scored = Scored();
  for (const Tokenizer* tokenizer : {byte_level.get(), scored.get()}) {
    for (const char* bad : {"abc\xFF", "abc\xC3", "abc\xC0\x80", "abc\xED\xA0\x80",
                            "abc\xF4\x90\x80\x80", "abc\x80", "abc\xE2\x82"}) {
      const auto ids = tokenizer->Encode(bad, {});
      EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(ids.status().message()), HasSubstr("UTF-8 at byte 3"));
    }
  }
}

// The best pair of all, the leftmost of equals, again and again; in words of every length. Few
// symbols and priorities, so that pairs come back to priorities that have been begun.
TEST(MergerTest, MergesTheBestPairFirst) {
  std::mt19937 random(5);
  const auto draw = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  for (const size_t length : {1u, 2u, 40u, 1024u, 1025u, 1600u}) {
    MergeTable table;
    for (int32_t result = 3; result < 40; ++result) {
      table.Add(draw(result - 1), draw(result - 1), {draw(12), result});
    }
    std::vector<int32_t> symbols(length);
    for (int32_t& symbol : symbols) symbol = draw(30) == 0 ? -7 : draw(2);
    std::vector<int32_t> expected = symbols;
    while (true) {
      const MergeTable::Merge* best = nullptr;
      size_t at = 0;
      for (size_t i = 0; i + 1 < expected.size(); ++i) {
        const MergeTable::Merge* merge = table.Find(expected[i], expected[i + 1]);
        if (merge == nullptr || (best != nullptr && merge->priority >= best->priority)) continue;
        best = merge;
        at = i;
      }
      if (best == nullptr) break;
      expected[at] = best->result;
      expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    Merger(table).Run(&symbols);
    EXPECT_EQ(symbols, expected) << length;
  }
}

// A megabyte without a place to cut would take hours if any step were quadratic.
TEST(TokenizerTest, OneLongWordIsNoTrap) {
  const auto byte_level = FromFolder("llama-bpe");
  const auto scored = Scored();
  const std::string letters(1 << 20, 'a');
  const std::string spaces(1 << 20, ' ');
  std::string lines;
  std::string marks = "e";
  std::string brackets;
  for (int i = 0; i < 1 << 18; ++i) {
    lines += " \n x";
    marks += "\xCC\x81\xCC\xA7";
    brackets += "<|im";
  }
  for (const std::string& text : {letters, spaces, spaces + "x", lines, marks, brackets}) {
    for (const Tokenizer* tokenizer : {byte_level.get(), scored.get()}) {
      ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer->Encode(text, {.add_special = false}));
      EXPECT_EQ(tokenizer->Decode(ids, false), text);
    }
  }
  EXPECT_TRUE(FromFolder("qwen2")->Encode(marks, {}).ok());
  for (const PreTokenizerRow& row : PreTokenizerRows()) {
    if (row.name != row.splits) continue;
    for (const std::string& text : {letters, spaces, spaces + "\u4e2d", lines, marks, brackets}) {
      std::vector<std::string_view> words;
      EXPECT_TRUE(PreTokenizer::Create(row.name)->Split(text, &words).ok()) << row.name;
    }
  }
}

TEST(StreamDecoderTest, HoldsBackAnUnfinishedCharacter) {
  const auto tokenizer = FromFolder("gpt-2");
  const auto byte = [&](uint8_t value) {
    for (int32_t id = 0; id < tokenizer->size(); ++id) {
      if (tokenizer->TokenBytes(id, false) == std::string(1, static_cast<char>(value))) return id;
    }
    return -1;
  };
  StreamDecoder decoder(*tokenizer, false);
  EXPECT_EQ(decoder.Push(byte(0xF0)), "");
  EXPECT_EQ(decoder.Push(byte(0x9F)), "");
  EXPECT_EQ(decoder.Push(byte(0x98)), "");
  EXPECT_EQ(decoder.Push(byte(0x80)), "\xF0\x9F\x98\x80");
  EXPECT_EQ(decoder.Push(byte(0xE2)), "");
  EXPECT_EQ(decoder.Push(byte('a')),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(decoder.Push(byte(0xE2)), "");
  EXPECT_EQ(decoder.Push(byte(0x82)), "");
  EXPECT_EQ(decoder.Finish(), "\xEF\xBF\xBD");
}

TEST(StreamDecoderTest, LeadingSpaceGoesOnlyWhereNothingCameBefore) {
  const auto tokenizer = Scored();
  const auto ids = tokenizer->Encode("the engine", {.add_special = false});
  const auto all = [&](bool continues) {
    StreamDecoder decoder(*tokenizer, false, continues);
    std::string text;
    for (int32_t id : *ids) text += decoder.Push(id);
    return text + decoder.Finish();
  };
  EXPECT_EQ(all(false), "the engine");
  EXPECT_EQ(all(true), " the engine");
  EXPECT_EQ(tokenizer->Decode(*ids, false), "the engine");
}

TEST(TokenizerTest, IdsOutsideTheVocabularyGiveNothing) {
  const auto tokenizer = FromFolder("gpt-2");
  for (int32_t id : {-1, INT32_MIN, tokenizer->size(), INT32_MAX}) {
    EXPECT_EQ(tokenizer->TokenBytes(id, true), "");
  }
}

TEST(TokenizerTest, RefusesSpecsThatContradictThemselves) {
  const auto message = [](const TokenizerSpec& spec) {
    const auto tokenizer = Tokenizer::Create(spec);
    return tokenizer.ok() ? "" : std::string(tokenizer.status().message());
  };
  TokenizerSpec spec;
  EXPECT_THAT(message(spec), HasSubstr("empty"));
  spec.tokens = {{"a"}, {"b"}};
  spec.pre_tokenizer = "gpt-7";
  EXPECT_THAT(message(spec),
              HasSubstr("'gpt-7' is not one of the 66 known ones; nearest are 'gpt-2'"));
  spec.pre_tokenizer = "gpt-2";
  spec.merges = {{"a", "b"}};
  EXPECT_THAT(message(spec), HasSubstr("merge 0 ('a' and 'b') needs the token 'ab'"));
  spec.model = TokenizerSpec::Model::kSentencePiece;
  EXPECT_THAT(message(spec), HasSubstr("neither 256 byte tokens nor an unknown token"));
  spec.unknown = 1;
  EXPECT_THAT(message(spec), HasSubstr("needs the token 'ab'"));
  spec.eos = 2;
  EXPECT_THAT(message(spec), HasSubstr("EOS id 2 is outside the vocabulary of 2"));
  spec.eos = -1;
  spec.add_bos = true;
  EXPECT_THAT(message(spec), HasSubstr("adds a BOS token, but none is named"));
}

TEST(TokenizerTest, ATokenThatIsTooLongIsRefused) {
  TokenizerSpec spec = ScoredSpec();
  const size_t id = spec.tokens.size();
  spec.tokens.push_back({std::string(400'000, 'a'), -1, TokenKind::kNormal});
  const auto tokenizer = Tokenizer::Create(spec);
  EXPECT_THAT(std::string(tokenizer.status().message()),
              HasSubstr(Str("token ", id, " has 400000 bytes, expected at most 4096")));
}

// Each of them is allowed; all of them together would take minutes.
TEST(TokenizerTest, LongTokensOfAVocabularyAreBounded) {
  TokenizerSpec spec = ScoredSpec();
  for (int i = 0; i < 4000; ++i) {
    spec.tokens.push_back({std::string(4000, 'a') + std::to_string(i), -1, TokenKind::kNormal});
  }
  const auto tokenizer = Tokenizer::Create(spec);
  EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr("tokens are too long together"));
}

TEST(TokenizerTest, AnIdFarOutsideTheVocabularyIsRefused) {
  const TestFolder folder;
  for (const bool added : {false, true}) {
    auto json =
        nlohmann::json::parse(std::ifstream(TREADLE_TESTDATA "/tokenizers/llama/tokenizer.json"));
    const size_t named = json["model"]["vocab"].size() + json["added_tokens"].size() + 1;
    if (added) {
      json["added_tokens"].push_back({{"id", 16'777'215}, {"content", "far"}});
    } else {
      json["model"]["vocab"]["far"] = 16'777'215;
    }
    folder.Write("tokenizer.json", json.dump());
    FolderFiles files(folder.path());
    const auto spec = ReadTokenizerJson(files);
    EXPECT_THAT(std::string(spec.status().message()),
                HasSubstr(Str("token 'far' has id 16777215, expected 0 to ", 2 * named + 1023)));
  }
}

TEST(UnicodeTest, NormalizesToFormC) {
  EXPECT_EQ(NormalizeNfc("e\u0301 \u212B A\u030A"), "\u00E9 \u00C5 \u00C5");
  EXPECT_EQ(NormalizeNfc("\u1112\u1161\u11AB"), "\uD55C");
  EXPECT_EQ(NormalizeNfc("a\u0315\u0300\u05AE\u0300b"), "\u00E0\u05AE\u0300\u0315b");
  EXPECT_EQ(NormalizeNfc("\u0958 \u2ADC"), "\u0915\u093C \u2ADD\u0338");  // excluded pairs
}

}  // namespace
}  // namespace treadle
