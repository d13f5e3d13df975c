// The default model's own tokenizer and chat template, read from its file.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/text/jinja/chat_template.h"
#include "tests/models/text/tokenizer_oracle.h"
#include "tests/support/default_model.h"

namespace treadle {
namespace {

class DefaultModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    NEEDS_DEFAULT_MODEL(path);
    auto checkpoint = Checkpoint::Open(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
    if (checkpoint_->file_bytes() != 98'362'432) {
      GTEST_SKIP() << path << " is another model than the oracle's";
    }
    ASSERT_NE(checkpoint_->tokenizer(), nullptr);
    auto tokenizer = Tokenizer::Create(*checkpoint_->tokenizer());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }

  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(DefaultModelTest, EncodesAndDecodesAsTheAuthors) {
  CheckCases(*tokenizer_, ReadOracle("default-model.json"));
}

TEST_F(DefaultModelTest, ChatPromptHas37Tokens) {
  const auto parsed = ChatTemplate::Parse(checkpoint_->chat_template());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const auto prompt = parsed->Render({{"user", "What is the capital of France?"}}, {});
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  const auto ids = tokenizer_->Encode(*prompt, {});
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(ids->size(), 37u);
  EXPECT_EQ(tokenizer_->Decode(*ids, /*special=*/true), *prompt);
}

}  // namespace
}  // namespace treadle
