// Ledgers whose iterations took what a formula says, and what is drawn from them.
#include "bench/simulate/recorded_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;

std::string Record(const std::string& members, double seconds, const std::string& ends = "") {
  return Str("{\"members\":[", members, "],\"ends\":[", ends, "],\"stages\":1,\"receive\":0,",
             "\"compute\":", seconds, ",\"sample\":0,\"bubble\":0}\n");
}

std::string Member(int request, int tokens, const char* phase) {
  return Str("{\"request\":", request, ",\"tokens\":", tokens, ",\"phase\":\"", phase, "\"}");
}

std::string End(int request, int prompt, int cached, int drafts = 0) {
  return Str("{\"request\":", request, ",\"prompt_tokens\":", prompt, ",\"cached_tokens\":", cached,
             ",\"draft_tokens\":", drafts, "}");
}

absl::StatusOr<RecordedCost> Read(const std::string& text) {
  const TestFolder folder;
  return RecordedCost::Read(folder.Write("ledger", text), 1);
}

// Requests of a prompt of 256 tokens and 80 that follow: a prompt takes 300 ms, a row alone 6 ms,
// and two together 6 ms, too: no line goes through that.
std::string Answers(double slower) {
  std::string text;
  for (int request = 0; request < 12; request += 2) {
    for (const int one : {request, request + 1}) {
      text += Record(Member(one, 256, "initiation"), 0.3 * slower);
    }
    const std::string first = Member(request, 1, "increment");
    const std::string both = first + "," + Member(request + 1, 1, "increment");
    for (int i = 0; i < 80; ++i) text += Record(i < 40 ? both : first, 0.006 * slower);
    text += Record("", 0, End(request, 256, 0) + "," + End(request + 1, 256, 0));
  }
  return text;
}

TEST(RecordedCost, SaysWhatLikeIterationsTook) {
  absl::StatusOr<RecordedCost> cost = Read(Answers(1));
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_EQ(cost->iterations(), 12u + 6 * 80);
  EXPECT_NEAR(cost->Next({1, 300, 1}), 0.006, 0.0003);
  EXPECT_NEAR(cost->Next({2, 600, 2}), 0.006, 0.0003);
  EXPECT_NEAR(cost->Next({256, 256 * 257 / 2, 1}), 0.3, 0.01);
}

// A machine that is twice as slow in the second half is so for as long here, too.
TEST(RecordedCost, IsAsSlowAsTheMachineWas) {
  absl::StatusOr<RecordedCost> cost = Read(Answers(1) + Answers(2));
  ASSERT_TRUE(cost.ok()) << cost.status();
  double slow = 0, all = 0;
  for (int i = 0; i < 20'000; ++i) {
    const double seconds = cost->Next({1, 300, 1});
    all += seconds;
    if (seconds > 0.009) slow += seconds;
  }
  EXPECT_NEAR(slow / all, 2.0 / 3, 0.1);
}

// Rows that begin after a cached part read it, too: 1 ms and 1 us a position.
TEST(RecordedCost, CountsWhatWasCached) {
  std::string text;
  for (int request = 0; request < 40; ++request) {
    const int cached = 100 * (request % 8);
    const double positions = 10 * (cached + 5.5);
    text += Record(Member(request, 10, "initiation"), 1e-3 + 1e-6 * positions);
    text += Record("", 0, End(request, cached + 10, cached));
  }
  absl::StatusOr<RecordedCost> cost = Read(text);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_NEAR(cost->fit().per_position(), 1e-6, 1e-7);
}

TEST(RecordedCost, NamesWhatIsWrong) {
  std::string few = Record(Member(1, 1, "increment"), 0.001);
  EXPECT_THAT(std::string(Read(few).status().message()),
              HasSubstr("has 1 iterations with rows, expected 32 or more"));
  EXPECT_THAT(std::string(Read(few + "{\"a\": 1}\n").status().message()), HasSubstr("line 2: "));
  EXPECT_THAT(std::string(Read(few + "text\n").status().message()), HasSubstr("line 2: "));
  EXPECT_THAT(std::string(Read(Record("", 0, End(1, 1, 0, 9))).status().message()),
              HasSubstr("has 9 guessed tokens"));
  std::string staged = few;
  staged.replace(staged.find("\"stages\":1"), 10, "\"stages\":2");
  EXPECT_THAT(std::string(Read(staged).status().message()), HasSubstr("is of 2 stages"));
}

}  // namespace
}  // namespace treadle
