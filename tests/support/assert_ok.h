// A test's own name for a value that must be there.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "base/status.h"

// Declares `declaration` with the value of the StatusOr that follows, or ends the test with its
// status: ASSERT_OK_AND_ASSIGN(const auto file, File::Open(path));
#define ASSERT_OK_AND_ASSIGN(declaration, ...) \
  TREADLE_ASSERT_OK_AND_ASSIGN(TREADLE_CONCAT(status_or_, __LINE__), declaration, (__VA_ARGS__))
#define TREADLE_ASSERT_OK_AND_ASSIGN(status_or, declaration, expression) \
  auto status_or = expression;                                           \
  ASSERT_TRUE(status_or.ok()) << status_or.status();                     \
  declaration = *std::move(status_or)
