#include "server/session/generation.h"

#include <gtest/gtest.h>

#include "tests/server/byte_tokenizer.h"

namespace treadle {
namespace {

StreamToken Token(int32_t id, uint32_t candidate = 0) {
  StreamToken token;
  token.candidate = candidate;
  token.token = id;
  return token;
}

std::vector<StreamToken> Tokens(const std::string& text, uint32_t candidate = 0) {
  std::vector<StreamToken> tokens;
  for (unsigned char c : text) tokens.push_back(Token(c, candidate));
  return tokens;
}

class GenerationTest : public testing::Test {
 protected:
  Generation Make(const std::vector<std::string>& stops, int32_t candidates = 1,
                  int32_t min_tokens = 0) {
    RequestSpec request;
    request.candidates = candidates;
    request.min_new_tokens = min_tokens;
    request.top_logprobs = 0;
    return Generation(tokenizer_.get(), request, stops);
  }
  const std::unique_ptr<Tokenizer> tokenizer_ = ByteTokenizer::Make();
};

TEST_F(GenerationTest, NeverGivesPartOfACharacter) {
  Generation generation = Make({});
  const std::string text = "a\xF0\x9F\x98\x80z";  // one emoji of four bytes
  std::string all;
  for (const StreamToken& token : Tokens(text)) {
    const auto parts = generation.Absorb({token});
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].token_ids.size(), 1u);  // ids come at once, text when complete
    const std::string& piece = parts[0].text;
    EXPECT_TRUE(piece.empty() || piece.size() == 1 || piece.size() == 4);
    all += piece;
  }
  EXPECT_EQ(all, text);
}

TEST_F(GenerationTest, ControlTokensAreTextWhereTheyAreWanted) {
  for (const bool special : {false, true}) {
    RequestSpec request;
    request.candidates = 1;
    Generation generation(tokenizer_.get(), request, {}, {.special_tokens = special});
    const auto parts = generation.Absorb({Token('a'), Token(ByteTokenizer::kBegin), Token('b')});
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].text, special ? "a<s>b" : "ab");
  }
}

TEST_F(GenerationTest, AnEmbeddingHasLengthOne) {
  for (const float scale : {1.0f, 1e-20f, 1e20f}) {
    StreamToken pooled;
    pooled.finish = FinishReason::kPooled;
    pooled.embedding = {3 * scale, 0, -4 * scale};
    Generation generation = Make({});
    const auto parts = generation.Absorb({pooled});
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_TRUE(parts[0].token_ids.empty() && parts[0].text.empty());
    EXPECT_EQ(parts[0].finish, FinishReason::kPooled);
    EXPECT_EQ(generation.completion_tokens(), 0);
    EXPECT_FLOAT_EQ(parts[0].embedding[0], scale == 1e-20f ? 3e-8f : 0.6f);
    EXPECT_FLOAT_EQ(parts[0].embedding[2], scale == 1e-20f ? -4e-8f : -0.8f);
  }
}

TEST_F(GenerationTest, StopStringAcrossTokensEndsTheCandidate) {
  Generation generation = Make({"\n\nQ:", "zzz"});
  std::string all;
  for (const StreamToken& token : Tokens("yes.\n\nQ")) {
    for (const OutputPart& part : generation.Absorb({token})) all += part.text;
  }
  EXPECT_EQ(all, "yes.");
  const auto parts = generation.Absorb(Tokens(": more"));
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].text, "");
  EXPECT_EQ(parts[0].finish, FinishReason::kStopString);
  EXPECT_EQ(parts[0].stop_string, "\n\nQ:");
  EXPECT_EQ(parts[0].token_ids, std::vector<int32_t>{':'});
  EXPECT_EQ(generation.completion_tokens(), 8);
  // Plans in flight are dropped.
  EXPECT_TRUE(generation.Absorb(Tokens("x")).empty());
}

TEST_F(GenerationTest, AStopStringOutranksTheLoopsReason) {
  Generation generation = Make({"ab"});
  auto tokens = Tokens("ab");
  tokens.back().finish = FinishReason::kLength;
  const auto parts = generation.Absorb(tokens);
  EXPECT_EQ(parts[0].finish, FinishReason::kStopString);
}

TEST_F(GenerationTest, HeldBackTextComesWithTheEnd) {
  Generation generation = Make({"abc"});
  auto tokens = Tokens("xab");
  tokens.back().finish = FinishReason::kLength;
  const auto parts = generation.Absorb(tokens);
  EXPECT_EQ(parts[0].text, "xab");
  EXPECT_EQ(parts[0].finish, FinishReason::kLength);
}

TEST_F(GenerationTest, AnEndTokenIsAnIdWithoutText) {
  Generation generation = Make({});
  auto tokens = Tokens("ok!");
  tokens.back().finish = FinishReason::kEndToken;  // '!' is a stop token here
  const auto parts = generation.Absorb(tokens);
  EXPECT_EQ(parts[0].text, "ok");
  EXPECT_EQ(parts[0].token_ids.size(), 3u);
  EXPECT_EQ(parts[0].stop_token, '!');
}

TEST_F(GenerationTest, StopStringsWaitForMinNewTokens) {
  Generation generation = Make({"a"}, 1, /*min_tokens=*/3);
  EXPECT_EQ(generation.Absorb(Tokens("aa"))[0].text, "aa");
  const auto parts = generation.Absorb(Tokens("a"));
  EXPECT_EQ(parts[0].finish, FinishReason::kStopString);
}

TEST_F(GenerationTest, CandidatesDoNotMix) {
  Generation generation = Make({"xy"}, 2);
  std::vector<StreamToken> tokens;
  for (int i = 0; i < 2; ++i) {
    for (uint32_t candidate : {0u, 1u}) {
      tokens.push_back(Token(candidate == 0 ? "xy"[i] : "yx"[i], candidate));
    }
  }
  const auto parts = generation.Absorb(tokens);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].text, "");
  EXPECT_EQ(parts[1].text, "y");  // x could begin "xy"
  EXPECT_EQ(parts[0].finish, FinishReason::kStopString);
  EXPECT_EQ(parts[1].finish, FinishReason::kNone);
}

TEST(Generation, WithoutATokenizerIdsAndLogprobsStillCome) {
  RequestSpec request;
  request.top_logprobs = 0;
  Generation generation(nullptr, request, {});
  StreamToken token = Token(9);
  token.detail.logprob = -0.5f;
  token.finish = FinishReason::kLength;
  const auto parts = generation.Absorb({token});
  EXPECT_EQ(parts[0].text, "");
  EXPECT_EQ(parts[0].token_ids, std::vector<int32_t>{9});
  EXPECT_EQ(parts[0].details[0].logprob, -0.5f);
}

}  // namespace
}  // namespace treadle
