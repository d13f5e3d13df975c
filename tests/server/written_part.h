// A part of a file that a test holds to what the code says, and writes where it is asked to.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/whole_file.h"

namespace treadle {

// The part of a file between the first `begin` and the next `end` is `part`, or is written: with
// TREADLE_WRITE_CHART=1, which `make chart-flags` sets.
inline void ExpectPart(const std::string& path, const std::string& begin, const std::string& end,
                       const std::string& part) {
  std::string text = ReadWhole(path);
  const size_t first = text.find(begin);
  ASSERT_NE(first, std::string::npos) << path << " has no " << begin;
  const size_t from = first + begin.size();
  const size_t to = end.empty() ? text.size() : text.find(end, from);
  ASSERT_NE(to, std::string::npos) << path << " has no " << end << " after " << begin;
  if (std::getenv("TREADLE_WRITE_CHART") != nullptr) {
    std::ofstream(path) << text.replace(from, to - from, part);
    return;
  }
  EXPECT_EQ(text.substr(from, to - from), part)
      << path << " is not what the code says; `make chart-flags` mends it";
}

}  // namespace treadle
