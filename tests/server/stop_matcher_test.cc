#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "server/session/generation.h"

namespace treadle {
namespace {

struct Outcome {
  std::string text;
  std::string stop;  // empty: none
  bool operator==(const Outcome&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << "text '" << outcome.text << "', stop '" << outcome.stop << "'";
}

// By definition: the stop string that is complete first, the longest of those.
Outcome ByDefinition(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    const std::string_view head = std::string_view(text).substr(0, end);
    const std::string* best = nullptr;
    for (const std::string& stop : stops) {
      if (head.ends_with(stop) && (best == nullptr || stop.size() > best->size())) best = &stop;
    }
    if (best != nullptr) return {text.substr(0, end - best->size()), *best};
  }
  return {text, ""};
}

Outcome InPieces(const std::vector<std::string>& pieces, const std::vector<std::string>& stops) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) {
    outcome.text += matcher.Push(piece);
    if (matcher.found()) break;
  }
  if (matcher.found()) {
    outcome.stop = *matcher.found();
  } else {
    outcome.text += matcher.Finish();
  }
  return outcome;
}

TEST(StopMatcher, HoldsBackOnlyWhatCouldBeginAStopString) {
  StopMatcher matcher({"END"});
  EXPECT_EQ(matcher.Push("the E"), "the ");
  EXPECT_EQ(matcher.Push("N"), "");
  EXPECT_EQ(matcher.Push("E"), "EN");
  EXPECT_EQ(matcher.Push("ND and more"), "");
  ASSERT_NE(matcher.found(), nullptr);
  EXPECT_EQ(*matcher.found(), "END");
  EXPECT_EQ(matcher.Push("x"), "");
}

TEST(StopMatcher, WithoutStopStringsNothingIsHeldBack) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.Push("abc"), "abc");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcher, AgreesWithItsDefinitionForEveryCut) {
  std::mt19937 random(7);
  const auto word = [&](size_t low, size_t high) {
    std::string text;
    const size_t length = low + random() % (high - low + 1);
    for (size_t i = 0; i < length; ++i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  int found = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::string> stops;
    for (size_t i = 0, n = random() % 4; i < n; ++i) stops.push_back(word(2, 7));
    const std::string text = word(0, 24);
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t length = std::min<size_t>(1 + random() % 5, text.size() - at);
      pieces.push_back(text.substr(at, length));
      at += length;
    }
    const Outcome expected = ByDefinition(text, stops);
    found += expected.stop.empty() ? 0 : 1;
    ASSERT_EQ(InPieces(pieces, stops), expected) << "of '" << text << "', round " << round;
  }
  EXPECT_GT(found, 2000);  // the cases are not trivial
}

}  // namespace
}  // namespace treadle
