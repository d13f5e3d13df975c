// Examples from JSON lines: which tokens there are, and which of them count.
#include "training/examples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "models/text/tokenizer.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

class ExamplesTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaGguf(OwnFolder().path(), {}));
    checkpoint_ = *Checkpoint::Open(path);
    tokenizer_ = *Tokenizer::Create(*checkpoint_->tokenizer());
  }
  absl::StatusOr<Examples> Read(const std::string& lines, const ExampleOptions& options = {}) {
    file_ = OwnFolder().Write("data.jsonl", lines);
    return ReadExamples(file_, *checkpoint_, options);
  }
  // The text of the tokens that count, and of all.
  std::string Counted(const Example& example, bool all = false) const {
    std::string text;
    for (size_t i = 0; i < example.tokens.size(); ++i) {
      if (all || example.counts[i]) text += tokenizer_->TokenBytes(example.tokens[i], true);
    }
    return text;
  }

  std::string file_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(ExamplesTest, CountsWhatIsToBeLearnt) {
  ASSERT_OK_AND_ASSIGN(const auto read, Read(R"({"prompt": "one and ", "completion": "two"})"
                                             "\n\n"
                                             R"({"text": "all of it"})"
                                             "\n"));
  ASSERT_EQ(read.examples.size(), 2u);
  EXPECT_EQ(Counted(read.examples[0]), "two<|im_end|>");
  EXPECT_THAT(Counted(read.examples[0], true), HasSubstr("one and two<|im_end|>"));
  EXPECT_THAT(Counted(read.examples[1]), HasSubstr("all of it<|im_end|>"));
  EXPECT_EQ(read.cut, 0);
}

TEST_F(ExamplesTest, CountsAnswersOfTheAssistant) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},)"
      R"( {"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "Hu"}]})";
  ASSERT_OK_AND_ASSIGN(const auto read, Read(line));
  EXPECT_EQ(Counted(read.examples[0]), "Ho<|im_end|>\nHu<|im_end|>\n");
  const auto all = Read(line, {.train_on_prompt = true});
  EXPECT_EQ(Counted(all->examples[0]), Counted(all->examples[0], true));
  EXPECT_THAT(Counted(all->examples[0]), HasSubstr("<|im_start|>user\nHi<|im_end|>"));
}

TEST_F(ExamplesTest, CutsLongOnes) {
  ASSERT_OK_AND_ASSIGN(const auto read, Read(R"({"text": "0123456789"})", {.max_length = 6}));
  EXPECT_EQ(read.examples[0].tokens.size(), 6u);
  EXPECT_EQ(read.cut, 1);
}

TEST_F(ExamplesTest, NamesTheLineThatIsBroken) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"text\": \"a b c\"}\n{\"text\": ", ":2"},
      {R"({"text": 7})", ":1: \"text\" is not there, or no string"},
      {R"({"prompt": "a"})", ":1: \"completion\" is not there, or no string"},
      {R"({"words": "a"})", ":1: has neither \"messages\" nor \"prompt\" nor \"text\""},
      {R"({"messages": []})", ":1: \"messages\" is no list"},
      {R"({"messages": ["a"]})", ":1: a message is no object"},
      {R"({"messages": [{"role": "user", "content": "a"}]})", ":1: no token to learn within"},
      {"\n", ": has no lines"}};
  for (const auto& [lines, error] : cases) {
    const auto read = Read(lines);
    ASSERT_FALSE(read.ok()) << lines;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(file_ + error));
  }
  EXPECT_TRUE(absl::IsNotFound(ReadExamples("/nowhere", *checkpoint_, {}).status()));
}

}  // namespace
}  // namespace treadle
