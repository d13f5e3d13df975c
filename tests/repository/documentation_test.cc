// Pages of docs/ hold what the sources hold: flags, error texts, families of models.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "models/architectures/architecture.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = TREADLE_SOURCE;

std::string ReadText(const fs::path& file) {
  std::ifstream in(file);
  EXPECT_TRUE(in.is_open()) << file;
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> Found(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (std::sregex_iterator next(text.begin(), text.end(), regex), end; next != end; ++next) {
    found.push_back((*next)[1]);
  }
  return found;
}

// The cells of a page's tables, row by row, without the rows of dashes; under `heading`, if one is
// given, up to the next.
std::vector<std::vector<std::string>> RowsOf(const std::string& page,
                                             const std::string& heading = "") {
  std::string text = ReadText(kRoot / "docs" / page);
  if (!heading.empty()) {
    const size_t begin = text.find("\n## " + heading + "\n");
    EXPECT_NE(begin, std::string::npos) << page << " has no " << heading;
    text = text.substr(begin + 1, text.find("\n## ", begin + 1) - begin - 1);
  }
  std::vector<std::vector<std::string>> rows;
  for (const std::string& line : Found(text, "(?:^|\n)\\|([^\n]*)(?=\\|(?:\n|$))")) {
    if (line.find_first_not_of("|-") == std::string::npos) continue;
    rows.push_back(Found(line + "|", "([^|]*)\\|"));
  }
  EXPECT_GT(rows.size(), 5u) << page << " " << heading;
  return rows;
}

std::string Literals(const fs::path& file) {
  // Literals beside each other are one.
  return std::regex_replace(ReadText(file), std::regex("\"\\s*\\n\\s*\""), "");
}

TEST(Documentation, MigrationNamesFlagsThatAreThere) {
  const std::string table = ReadText(kRoot / "server/configuration.cc");
  const std::string page = ReadText(kRoot / "docs/migration.md");
  size_t found = 0;
  for (const auto& row : RowsOf("migration.md")) {
    for (const std::string& flag :
         row.size() < 3 ? std::vector<std::string>() : Found(row[1], "`(--[a-z-]+)`")) {
      EXPECT_NE(table.find("\"" + flag + "\""), std::string::npos) << flag;
      ++found;
    }
  }
  EXPECT_GT(found, 50u);
}

TEST(Documentation, TroubleshootingHasErrorsThatAreThere) {
  std::string sources;
  for (const char* room : {"base", "net", "kernels", "models", "engine", "scheduler", "server"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      const fs::path extension = entry.path().extension();
      if (extension == ".cc" || extension == ".h") sources += Literals(entry.path());
    }
  }
  size_t found = 0;
  for (const auto& row : RowsOf("troubleshooting.md")) {
    if (row[0].find("own)") != std::string::npos || row[0].find("parser") != std::string::npos) {
      continue;  // of a library or another program
    }
    for (const std::string& text : Found(row[0], "`([^`]*)`")) {
      if (text.find(' ') == std::string::npos) continue;  // the name of a status
      ++found;
      for (const std::string& piece : Found(text + "…", "(\\S.*?) *…")) {
        EXPECT_NE(sources.find(piece), std::string::npos) << "'" << piece << "' in " << row[0];
      }
    }
  }
  EXPECT_GT(found, 20u);
}

TEST(Documentation, ModelsHasTheFamiliesThatAreThere) {
  std::set<std::string> classes, names, documented_classes, documented_names;
  for (const Architecture& architecture : Architectures()) {
    names.emplace(architecture.GgufName());
    classes.insert(architecture.config_json.classes.begin(),
                   architecture.config_json.classes.end());
  }
  for (const auto& row : RowsOf("models.md", "Families")) {
    if (row.size() < 4 || row[1].find('`') == std::string::npos) continue;
    for (const std::string& name : Found(row[1], "`(\\w+)`")) {
      if (name != "config") documented_classes.insert(name);
    }
    for (const std::string& name : Found(row[2], "`([^`]+)`")) {
      if (name != ".gguf") documented_names.insert(name);
    }
  }
  EXPECT_EQ(documented_classes, classes);
  EXPECT_EQ(documented_names, names);
}

TEST(Documentation, ModelsAndApiHaveTheSyntaxesThatAreThere) {
  const std::string models = ReadText(kRoot / "docs/models.md");
  const std::string api = ReadText(kRoot / "docs/api.md");
  const auto formats =
      Found(ReadText(kRoot / "server/openai/tools/tool_calls.cc"), "\\{\\.name = \"([^\"]+)\"");
  EXPECT_GT(formats.size(), 5u);
  for (const std::string& name : formats) EXPECT_NE(api.find(name), std::string::npos) << name;
  const auto marks =
      Found(ReadText(kRoot / "server/openai/tools/reasoning.cc"), "\\.open = \"([^\"]+)\"");
  EXPECT_GT(marks.size(), 3u);
  for (const std::string& mark : marks) {
    const std::string shown = std::regex_replace(mark, std::regex("\\|"), "\\|");
    EXPECT_NE(models.find(shown), std::string::npos) << mark;
  }
}

}  // namespace
}  // namespace treadle
