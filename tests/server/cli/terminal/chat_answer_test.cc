// A model's answer on a terminal: what is thought is dim, and the text drives nothing. SGR 2 is
// "faint" and SGR 0 ends it (ECMA-48, 8.3.117).
#include "server/cli/chat/chat_answer.h"

#include <gtest/gtest.h>

#include <string>

namespace treadle {
namespace {

const std::string kDimmed = "\x1b[2m", kNormal = "\x1b[0m";

// The text that is written if the answer comes in pieces of so many bytes; without the ends and
// beginnings of dim text that follow each other.
std::string Written(ChatAnswer& answer, const std::string& text, size_t bytes) {
  std::string all;
  for (size_t at = 0; at < text.size(); at += bytes) all += answer.Push(text.substr(at, bytes));
  all += answer.Finish();
  const std::string seam = kNormal + kDimmed;
  for (size_t at; (at = all.find(seam)) != all.npos;) all.erase(at, seam.size());
  return all;
}

TEST(ChatAnswer, DimsWhatIsThoughtHoweverItComes) {
  const struct {
    const char *text, *thought, *said;
  } answers[] = {{"<think>\nTwo.\n</think>\n\nIt is 2.", "Two.", "It is 2."},
                 {"\n<think>a < b</think>c", "a < b", "c"},
                 {"[THINK]x[/THINK]y", "x", "y"},
                 {"<think>never closed", "never closed", ""}};
  for (const auto& [text, thought, said] : answers) {
    const std::string expected =
        kDimmed + thought + kNormal + (*said != '\0' ? std::string("\n\n") + said : "");
    for (size_t bytes = 1; bytes < 12; ++bytes) {
      ChatAnswer answer(/*terminal=*/true, /*colours=*/true);
      EXPECT_EQ(Written(answer, text, bytes), expected) << bytes;
      EXPECT_EQ(answer.content(), said);
      // Without colours the marks say it.
      ChatAnswer plain(/*terminal=*/true, /*colours=*/false);
      EXPECT_EQ(Written(plain, text, bytes), text);
      EXPECT_EQ(plain.content(), said);
    }
  }
}

// Qwen 3's thinking models and DeepSeek R1: the prompt ends with the first mark. Some write it
// again.
TEST(ChatAnswer, DimsWhatIsThoughtWhereThePromptHasOpenedIt) {
  for (const std::string text : {"\nTwo.\n</think>\n\nIt is 2.", "<think>Two.</think>It is 2."}) {
    for (size_t bytes = 1; bytes < 12; ++bytes) {
      ChatAnswer answer(/*terminal=*/true, /*colours=*/true, "<think>");
      EXPECT_EQ(Written(answer, text, bytes), kDimmed + "Two." + kNormal + "\n\nIt is 2.") << bytes;
      EXPECT_EQ(answer.content(), "It is 2.");
      ChatAnswer piped(/*terminal=*/false, /*colours=*/false, "<think>");
      EXPECT_EQ(Written(piped, text, bytes), text);
      EXPECT_EQ(piped.content(), "It is 2.");
    }
  }
}

TEST(ChatAnswer, IsWholeWhereNothingIsThought) {
  for (const std::string text : {"<thin", "", "a <think>b</think>", "Hi\n\tthere\n", "<"}) {
    for (const bool colours : {false, true}) {
      for (size_t bytes = 1; bytes < 9; ++bytes) {
        ChatAnswer answer(/*terminal=*/true, colours);
        EXPECT_EQ(Written(answer, text, bytes), text);
        EXPECT_EQ(answer.content(), text);
      }
    }
  }
}

TEST(ChatAnswer, DoesNotDriveTheTerminalAndIsExactInAPipe) {
  const std::string text =
      "a\x1b[2Jb\r\x07\xc2\x9b"
      "c\n";
  ChatAnswer shown(/*terminal=*/true, /*colours=*/true);
  EXPECT_EQ(Written(shown, text, text.size()), "a\\x1b[2Jb\\x0d\\x07\\xc2\\x9bc\n");
  EXPECT_EQ(shown.content(), text);
  ChatAnswer piped(/*terminal=*/false, /*colours=*/false);
  EXPECT_EQ(Written(piped, text, 3), text);
}

}  // namespace
}  // namespace treadle
