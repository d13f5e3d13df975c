// The SHA-256 of what lies under a path, for tests that compare it with what the product says of a
// file.
#pragma once

#include <span>
#include <string>

#include "base/sha256.h"
#include "tests/support/whole_file.h"

namespace treadle {

inline std::string FileSha256(const std::string& path) {
  const std::string text = ReadWhole(path);
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return sum.Finish();
}

}  // namespace treadle
