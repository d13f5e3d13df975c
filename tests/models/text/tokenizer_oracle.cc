#include "tests/models/text/tokenizer_oracle.h"

#include <gtest/gtest.h>

#include <fstream>

#include "models/text/unicode.h"
#include "tests/support/assert_ok.h"

namespace treadle {

nlohmann::json ReadOracle(const std::string& file) {
  std::ifstream in(TREADLE_TESTDATA "/tokenizers/" + file);
  EXPECT_TRUE(in.is_open()) << file;
  return nlohmann::json::parse(in, nullptr, false);
}

void CheckStream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool special,
                 const std::string& whole) {
  StreamDecoder decoder(tokenizer, special, /*continues_text=*/false);
  std::string text;
  for (int32_t id : ids) {
    const std::string piece = decoder.Push(id);
    EXPECT_EQ(FindInvalidUtf8(piece), std::string::npos);
    text += piece;
  }
  text += decoder.Finish();
  EXPECT_EQ(text, whole);
  EXPECT_EQ(decoder.Finish(), "");
}

void CheckCases(const Tokenizer& tokenizer, const nlohmann::json& oracle) {
  ASSERT_FALSE(oracle["cases"].empty());
  for (const auto& row : oracle["cases"]) {
    const auto text = row["text"].get<std::string>();
    SCOPED_TRACE(row["text"].dump());
    const bool one_list = !row.contains("ids") || !row.contains("bare");
    const auto& bare = row.contains("bare") ? row["bare"] : row["ids"];
    const auto& full = row.contains("ids") ? row["ids"] : bare;
    for (bool add_special : {false, true}) {
      if (add_special && !row.contains("ids")) continue;
      ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer.Encode(text, {.add_special = add_special}));
      EXPECT_EQ(ids, (add_special ? full : bare).get<std::vector<int32_t>>()) << one_list;
    }
    if (!row.contains("decoded")) continue;
    const auto ids = full.get<std::vector<int32_t>>();
    const auto decoded = row["decoded"].get<std::string>();
    EXPECT_EQ(tokenizer.Decode(ids, /*special=*/false), decoded);
    CheckStream(tokenizer, ids, /*special=*/false, decoded);
  }
  if (!oracle.contains("random")) return;
  for (const auto& row : oracle["random"]) {
    SCOPED_TRACE(row.dump());
    const auto ids = row["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.Decode(ids, /*special=*/true), row["decoded"].get<std::string>());
    CheckStream(tokenizer, ids, /*special=*/true, row["decoded"].get<std::string>());
  }
}

}  // namespace treadle
