// An answer that is read in pieces, in tests: where it is cut makes no difference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/tools/reasoning.h"

namespace treadle {

// "reasoning|content|name(arguments)|...", without the first where nothing looks for reasoning.
inline std::string Shown(const ToolText& read) {
  std::string text = read.content;
  for (const ToolCall& call : read.calls) text += "|" + call.name + "(" + call.arguments + ")";
  return text;
}
inline std::string Shown(const AnswerText& read) {
  return read.reasoning + "|" + Shown(ToolText{read.content, read.calls});
}
inline void Add(ToolText more, ToolText& to) {
  to.content += more.content;
  to.calls.insert(to.calls.end(), more.calls.begin(), more.calls.end());
}
inline void Add(AnswerText more, AnswerText& to) {
  to.reasoning += more.reasoning;
  to.content += more.content;
  to.calls.insert(to.calls.end(), more.calls.begin(), more.calls.end());
}

// The text that `read` makes of all pieces: of the whole answer, of single bytes, of two pieces
// wherever they meet, and of random ones.
template <typename Read>
std::string ReadHoweverCut(std::string_view answer, const Read& read) {
  const auto cut = [&](const auto& next_cut) {
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < answer.size(); at += pieces.back().size()) {
      pieces.push_back(answer.substr(at, std::max<size_t>(1, next_cut(at) - at)));
    }
    return read(pieces);
  };
  const std::string whole = cut([&](size_t) { return answer.size(); });
  EXPECT_EQ(cut([](size_t at) { return at + 1; }), whole);
  for (size_t first = 1; first < answer.size(); ++first) {
    EXPECT_EQ(cut([&](size_t at) { return at < first ? first : answer.size(); }), whole) << first;
  }
  std::minstd_rand random(1);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(cut([&](size_t at) { return at + random() % 9; }), whole);
  }
  return whole;
}

}  // namespace treadle
