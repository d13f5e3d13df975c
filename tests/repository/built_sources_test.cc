// Every source of the tree is compiled by somebody, and no folder of them is crowded.

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// Paths that a CMake file may mean by its sources: relative to its folder or, if that is included
// by another, to one above; what follows a variable may be in any folder, and begins with "*".
std::set<std::string> ListedSources(const fs::path& root, const fs::path& cmake_file) {
  static constexpr std::string_view kInNames =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./";
  const std::string text = ReadWhole(cmake_file);
  std::set<std::string> sources;
  for (size_t dot = text.find(".c"); dot != text.npos; dot = text.find(".c", dot + 1)) {
    const size_t begin = text.find_last_not_of(kInNames, dot) + 1;
    const std::string name = text.substr(begin, dot + 3 - begin);
    if (!name.ends_with(".cc") && !name.ends_with(".cu")) continue;
    if (name.starts_with("/")) sources.insert("*" + name);  // ${variable}/name
    fs::path folder = fs::relative(cmake_file.parent_path(), root);
    for (; !folder.empty(); folder = folder.parent_path()) {
      sources.insert((folder / name).lexically_normal().string());
    }
  }
  return sources;
}

bool IsListed(const std::set<std::string>& listed, const std::string& path) {
  if (listed.contains(path) || listed.contains("*/" + path)) return true;
  for (size_t slash = path.find('/'); slash != path.npos; slash = path.find('/', slash + 1)) {
    if (listed.contains("*" + path.substr(slash))) return true;
  }
  return false;
}

// A source that no build file names is compiled by nobody.
TEST(Repository, EverySourceIsBuilt) {
  const fs::path root = fs::canonical(TREADLE_SOURCE);
  std::set<std::string> listed;
  std::vector<std::string> sources;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string path = fs::relative(entry.path(), root).string();
    const std::string extension = entry.path().extension().string();
    if (path.starts_with("build") || path.starts_with(".")) continue;
    if (extension == ".cc" || extension == ".cu") sources.push_back(path);
    if (extension == ".cmake" || entry.path().filename() == "CMakeLists.txt") {
      listed.merge(ListedSources(root, entry.path()));
    }
  }
  EXPECT_GT(sources.size(), 100u);
  for (const std::string& path : sources) {
    EXPECT_TRUE(IsListed(listed, path)) << path << " is in no CMake file";
  }
}

}  // namespace
}  // namespace treadle
