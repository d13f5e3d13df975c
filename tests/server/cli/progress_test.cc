// The progress of long work: its line, and how often it is told.
#include "server/cli/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace treadle {
namespace {

using testing::ElementsAre;

constexpr uint64_t kBytes = 93'000'000;

TEST(ProgressLine, HasBytesRateAndTimeLeft) {
  EXPECT_EQ(ProgressLine("loading m.gguf", 0.5, kBytes, 2, 200),
            "loading m.gguf [##########..........] 50%, 46.5 MB of 93.0 MB, 23.2 MB/s, 2.0 s left");
  EXPECT_EQ(ProgressLine("loading m.gguf", 0.25, 140'000'000'000, 100, 200),
            "loading m.gguf [#####...............] 25%, 35.00 GB of 140.00 GB, 350.0 MB/s, "
            "5m00s left");
  EXPECT_EQ(ProgressLine("requests", 0.99, 0, 99, 200),
            "requests [###################.] 99%, 1.0 s left");
  EXPECT_EQ(ProgressLine("requests", 0, 0, 1, 200), "requests [....................]  0%");
}

TEST(ProgressLine, EndsWithWhatTheWholeTook) {
  EXPECT_EQ(ProgressLine("loading m.gguf", 1, kBytes, 2, 200),
            "loading m.gguf: 93.0 MB in 2.0 s, 46.5 MB/s");
  EXPECT_EQ(ProgressLine("requests", 1, 0, 7300, 200), "requests: 2h01m");
}

TEST(ProgressLine, LeavesTheBarOutFirst) {
  EXPECT_EQ(ProgressLine("loading m.gguf", 0.5, kBytes, 2, 79),
            "loading m.gguf 50%, 46.5 MB of 93.0 MB, 23.2 MB/s, 2.0 s left");
}

// A line that is longer than the terminal would not be drawn in place.
TEST(ProgressLine, FitsTheTerminal) {
  const std::string path = "loading /srv/models/" + std::string(300, 'm') + "/model.gguf";
  for (int width = 0; width < 120; ++width) {
    const std::string line = ProgressLine(path, 0.5, kBytes, 2, width);
    EXPECT_EQ(line.size(), static_cast<size_t>(width));
    if (width > 80) {
      EXPECT_THAT(line, testing::StartsWith("loading ..."));
      EXPECT_THAT(line, testing::EndsWith("gguf 50%, 46.5 MB of 93.0 MB, 23.2 MB/s, 2.0 s left"));
    }
  }
}

TEST(Progress, IsTwoEventsOfALogHoweverOftenItIsTold) {
  std::vector<std::string> told;
  {
    const auto progress = ShowProgress("loading m", kBytes, [&](const LogEvent& event) {
      told.push_back(std::string(event.name) + ": " + event.message);
    });
    for (int i = 0; i <= 1000; ++i) progress(i / 1000.0);
    progress(1);
  }
  EXPECT_THAT(told, ElementsAre("loading: loading m, 93.0 MB",
                                testing::StartsWith("loaded: loading m: 93.0 MB in ")));
}

TEST(Progress, IsOneLineWhereThereIsNoTerminal) {
  testing::internal::CaptureStderr();
  {
    const auto progress = ShowProgress("quantizing m", kBytes);
    for (int i = 0; i <= 1000; ++i) progress(i / 1000.0);
    const auto given_up = ShowProgress("scoring");
    given_up(0.5);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, testing::StartsWith("quantizing m: 93.0 MB in "));
  EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
}

}  // namespace
}  // namespace treadle
