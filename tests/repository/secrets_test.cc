// Secrets are compared in constant time: no test that asks can see it, so this one reads.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

#include "tests/support/whole_file.h"

namespace treadle {
namespace {

// The body of a function of a source, from its name on.
std::string BodyOf(const std::string& file, const std::string& function) {
  const std::string text = ReadWhole(std::string(TREADLE_SOURCE "/") + file);
  const size_t begin = text.find(function);
  EXPECT_NE(begin, text.npos) << file << " has no " << function;
  return begin == text.npos ? "" : text.substr(begin, text.find("\n}\n", begin) - begin);
}

TEST(Secrets, AreComparedInConstantTime) {
  const struct {
    const char* file;
    const char* function;
  } places[] = {{"server/access/api_keys.cc", "ApiKeys::Find("},
                {"engine/remote/control_secret.cc", "SameProof("}};
  for (const auto& [file, function] : places) {
    const std::string body = BodyOf(file, function);
    EXPECT_NE(body.find("CRYPTO_memcmp("), body.npos) << file;
    // Neither stops at the first byte that differs, nor leaves out those that come later.
    for (const char* early : {"[^_]memcmp\\(", "\\.find\\(", "\\bbreak\\b",
                              "digest ==", "== digest", "proof ==", "== proof"}) {
      EXPECT_FALSE(std::regex_search(body, std::regex(early))) << file << ": " << early;
    }
  }
}

}  // namespace
}  // namespace treadle
