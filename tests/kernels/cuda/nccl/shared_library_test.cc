// Vendor libraries are opened at run time: that what this build was made against is there and has
// the functions that are called. Needs no GPU.
#include "kernels/cuda/runtime/shared_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/collectives/nccl_lane.h"

namespace treadle::cuda {
namespace {

using ::testing::HasSubstr;

TEST(SharedLibrary, WhatIsMissingIsNamed) {
  const auto none = OpenLibrary("libtreadle-no-such-library.so.1");
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.status().message()),
              HasSubstr("libtreadle-no-such-library.so.1 is neither where the loader looks"));
  const auto standard = OpenLibrary("libc.so.6");
  ASSERT_TRUE(standard.ok()) << standard.status();
  EXPECT_TRUE(FindFunction(*standard, "printf").ok());
  EXPECT_THAT(std::string(FindFunction(*standard, "no_such_function").status().message()),
              HasSubstr("no_such_function"));
}

TEST(SharedLibrary, NcclHasWhatIsCalled) {
  const absl::Status opened = OpenNccl();
  const std::string message(opened.message());
  if (message.find("is neither where") != std::string::npos) GTEST_SKIP() << message;
  EXPECT_EQ(opened, absl::OkStatus());
}

}  // namespace
}  // namespace treadle::cuda
