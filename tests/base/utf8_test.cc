#include "base/utf8.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

TEST(Utf8, PrintableKeepsTextAndShowsTheRest) {
  EXPECT_EQ(Printable("caf\u00e9 \u4e16\u754c \U0001f600 a\\b"),
            "caf\u00e9 \u4e16\u754c \U0001f600 a\\b");
  EXPECT_EQ(Printable(std::string("a\x1b[31m\n\0", 8)), "a\\x1b[31m\\x0a\\x00");
  EXPECT_EQ(Printable("\x7f\u0085\u202e\ufeff"), "\\x7f\\xc2\\x85\\xe2\\x80\\xae\\xef\\xbb\\xbf");
  EXPECT_EQ(Printable("\xff\xc3(\xe4\xb8"), "\\xff\\xc3(\\xe4\\xb8");
}

TEST(Utf8, CutEndsBeforeACharacter) {
  EXPECT_EQ(Cut("abcdef", 6), "abcdef");
  EXPECT_EQ(Cut("abcdefg", 6), "abc...");
  EXPECT_EQ(Cut("a\u4e16\u754c\u4e16", 7), "a\u4e16...");
  EXPECT_EQ(Cut("a\u4e16\u754c\u4e16", 6), "a...");
  EXPECT_EQ(Cut("abcdefg", 2), "...");
}

}  // namespace
}  // namespace treadle
