// docs/api.md says of every field of a body what becomes of it, in a table of two columns: names,
// and "no effect", "refused", "only `VALUE`", or what is taken.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "server/openai/openai_request.h"

namespace treadle {

using FieldRow = std::tuple<std::string, OpenAiField::Standing, std::string>;  // and its only value

inline std::set<FieldRow> FieldRows(const std::vector<OpenAiField>& fields) {
  std::set<FieldRow> rows;
  for (const OpenAiField& field : fields) rows.emplace(field.name, field.standing, field.only);
  return rows;
}

// The rows of the section of this heading.
inline std::set<FieldRow> DocumentedFields(const std::string& heading) {
  using Standing = OpenAiField::Standing;
  std::ifstream file(TREADLE_SOURCE "/docs/api.md");
  std::string line;
  while (std::getline(file, line) && line != heading) continue;
  std::set<FieldRow> rows;
  while (std::getline(file, line) && !line.starts_with("## ")) {
    const std::vector<std::string> cells = absl::StrSplit(line, " | ");
    if (!line.starts_with("| `") || cells.size() != 2) continue;
    const bool only = absl::StartsWith(cells[1], "only `");
    const std::vector<std::string> value = absl::StrSplit(cells[1], '`');
    const Standing standing = only                                      ? Standing::kOnly
                              : absl::StartsWith(cells[1], "no effect") ? Standing::kIgnored
                              : absl::StartsWith(cells[1], "refused")   ? Standing::kRefused
                                                                        : Standing::kTaken;
    const std::vector<std::string> names = absl::StrSplit(cells[0], '`');
    for (size_t i = 1; i < names.size(); i += 2) {
      rows.emplace(names[i], standing, only ? value[1] : "");
    }
  }
  return rows;
}

// The section has `fields`, and they are called `names`, with blanks between them.
inline void ExpectDocumented(const std::string& heading, const std::vector<OpenAiField>& fields,
                             const char* names) {
  EXPECT_EQ(DocumentedFields(heading), FieldRows(fields));
  std::set<std::string> known;
  for (const OpenAiField& field : fields) known.emplace(field.name);
  EXPECT_THAT(known, testing::UnorderedElementsAreArray(
                         std::vector<std::string>(absl::StrSplit(names, ' '))));
}

}  // namespace treadle
