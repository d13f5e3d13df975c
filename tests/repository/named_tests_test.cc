// Tests that the documentation names are there.

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>
#include <set>
#include <string>

#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// All that `pattern` finds in the text: its groups, joined by a dot.
std::set<std::string> FindNames(const std::string& text, const std::string& pattern) {
  const std::regex names(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator name(text.begin(), text.end(), names), end; name != end; ++name) {
    found.insert((*name)[1].str() + "." + (*name)[2].str());
  }
  return found;
}

TEST(Repository, TestsThatAreNamedAreThere) {
  const fs::path tests = fs::canonical(TREADLE_SOURCE) / "tests";
  std::set<std::string> there;
  for (const auto& entry : fs::recursive_directory_iterator(tests)) {
    if (!entry.path().string().ends_with("_test.cc")) continue;
    there.merge(FindNames(ReadWhole(entry.path()), R"(TEST(?:_F|_P)?\((\w+),\s*(\w+)\))"));
  }
  const std::set<std::string> named =
      FindNames(ReadWhole(tests / "README.md"), R"(`([A-Z]\w+)\.([A-Z]\w+)`)");
  EXPECT_GT(named.size(), 40u);
  for (const std::string& name : named) EXPECT_TRUE(there.contains(name)) << name;
}

}  // namespace
}  // namespace treadle
