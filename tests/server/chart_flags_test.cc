// The Helm chart knows of serve's flags what the table of flags says: the properties of
// `server` in its schema, their names in values.yaml, the flags that extraArgs may not have, and a
// set of values with every word. The README beside the chart has every value of the schema.
// TREADLE_WRITE_CHART=1 (make chart-flags) writes all of it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "server/configuration.h"
#include "tests/server/written_part.h"

namespace treadle {
namespace {

const std::string kChart = TREADLE_SOURCE "/deploy/helm/treadle/";

// "--max-queue" is maxQueue in the chart.
std::string WordOf(const ServeFlag& flag) {
  std::string word;
  for (const char* c = flag.name + 2; *c != '\0'; ++c) {
    word += *c == '-' ? static_cast<char>(std::toupper(*++c)) : *c;
  }
  return word;
}

std::vector<ServeFlag> FlagsIn(InChart chart) {
  std::vector<ServeFlag> flags;
  for (const ServeFlag& flag : ServeFlags()) {
    if (flag.chart == chart) flags.push_back(flag);
  }
  return flags;
}

// A value that the schema takes: an extreme one.
std::string SampleOf(const nlohmann::json& schema) {
  if (schema.contains("anyOf")) return SampleOf(schema["anyOf"].back());
  if (schema.contains("enum")) return schema["enum"].back().dump();
  if (schema.value("type", "") == "number") return "5.5";
  if (schema.contains("maximum")) return schema["maximum"].dump();
  const std::regex pattern(schema.value("pattern", ""));
  for (const char* sample :
       {"500ms", "1.5G", "/tmp/ledger.jsonl", "https://app.example", "draft:/models/draft.gguf",
        "/var/cache/treadle:20G", "json=/adapters/json"}) {
    if (schema.contains("pattern") && std::regex_match(sample, pattern)) {
      return Str('"', sample, '"');
    }
  }
  return schema.contains("pattern") ? "no sample has the pattern" : "nf4,lm_head=int8";
}

TEST(ChartFlags, TheSchemaHasTheTablesValues) {
  std::string properties;
  for (const ServeFlag& flag : FlagsIn(InChart::kServer)) {
    properties +=
        Str(properties.empty() ? "" : ",\n", "        \"", WordOf(flag), "\": ", flag.value.schema);
  }
  ExpectPart(kChart + "values.schema.json",
             "    \"server\": {\n      \"type\": \"object\",\n"
             "      \"additionalProperties\": false,\n      \"properties\": {\n",
             "\n      }", properties);
}

TEST(ChartFlags, TheValuesNameThem) {
  std::string words, line = "# Known:";
  for (const ServeFlag& flag : FlagsIn(InChart::kServer)) {
    const std::string word = WordOf(flag);
    if (line.size() + 1 + word.size() > 100) {
      words += line + "\n";
      line = "#";
    }
    line += " " + word;
  }
  ExpectPart(kChart + "values.yaml", "(`treadle serve --help`).\n", "\nserver:", words + line);
}

TEST(ChartFlags, OneSetOfValuesHasThemAll) {
  std::string values = "server:\n";
  for (const ServeFlag& flag : FlagsIn(InChart::kServer)) {
    values +=
        Str("  ", WordOf(flag), ": ", SampleOf(nlohmann::json::parse(flag.value.schema)), "\n");
  }
  ExpectPart(TREADLE_SOURCE "/deploy/tests/good/all_flags.yaml", "", "", values);
}

TEST(ChartFlags, ExtraArgumentsMayNotHaveWhatTheChartSets) {
  std::string list;
  std::string templates;
  for (const char* file : {"_server.tpl", "_pod.tpl"}) {
    templates += ReadWhole(kChart + "templates/" + file);
  }
  for (const ServeFlag& flag : FlagsIn(InChart::kOwn)) {
    list += Str(" \"", flag.name, "\"");
    EXPECT_THAT(templates, testing::HasSubstr(Str(flag.name, "="))) << "the chart does not set it";
  }
  ExpectPart(kChart + "templates/_checks.tpl", "{{- $owned := list", " \"--config\"", list);
}

// A value in values.yaml: what it is, and the comment behind or above it.
struct ChartValue {
  std::string value;  // empty: other values are below it
  std::string comment;
};

// By their paths, such as "image.tag".
std::map<std::string, ChartValue> ChartValues() {
  const std::regex key("( *)([A-Za-z0-9]+):(?: ([^#]*[^ #]))?(?: +# (.*))?"), above(" *# ?(.*)");
  std::map<std::string, ChartValue> values;
  std::vector<std::string> path;
  std::string comment, line;
  for (std::istringstream lines(ReadWhole(kChart + "values.yaml")); std::getline(lines, line);) {
    std::smatch found;
    if (std::regex_match(line, found, key)) {
      path.resize(static_cast<size_t>(found[1].length()) / 2);
      path.push_back(found[2]);
      values[absl::StrJoin(path, ".")] = {found[3], found[4].matched ? found[4].str() : comment};
      comment.clear();
    } else if (std::regex_match(line, found, above)) {
      comment +=
          (comment.empty() ? "" : " ") + std::string(absl::StripAsciiWhitespace(found[1].str()));
    } else {
      EXPECT_EQ(line, "") << "values.yaml has a line that is neither a value nor a comment";
      comment.clear();
    }
  }
  return values;
}

std::string TypeOf(const nlohmann::ordered_json& schema) {
  if (schema.contains("anyOf")) {
    return TypeOf(schema["anyOf"].front()) + " or " + TypeOf(schema["anyOf"].back());
  }
  if (schema.contains("enum")) {
    std::vector<std::string> words;
    for (const auto& word : schema["enum"]) {
      words.push_back(Str("`", word.is_string() ? word.get<std::string>() : word.dump(), "`"));
    }
    return absl::StrJoin(words, ", ");
  }
  const nlohmann::ordered_json type = schema.value("type", nlohmann::ordered_json("any"));
  if (schema.contains("maximum"))
    return Str(schema["minimum"].dump(), " to ", schema["maximum"].dump());
  if (type == "boolean") return "`true`, `false`";
  if (type == "array") return "list";
  return type == "object" ? "map" : "text";
}

void AddRows(const nlohmann::ordered_json& schema, const std::string& path,
             const std::map<std::string, ChartValue>& values, std::string& rows) {
  for (const auto& [name, below] : schema["properties"].items()) {
    if (name == "global") continue;  // Helm's own
    const std::string full = path.empty() ? name : Str(path, ".", name);
    const auto known = values.find(full);
    ChartValue told = known == values.end() ? ChartValue() : known->second;
    if (path == "server") {
      const auto flag = std::ranges::find(ServeFlags(), name, WordOf);
      ASSERT_NE(flag, ServeFlags().end()) << full;
      if (told.value.empty()) told.value = flag->value.show(ServeOptions());
      told.comment = Str("`", flag->name, "`: ", flag->help);
    } else {
      EXPECT_TRUE(known != values.end()) << full << " is not in values.yaml";
    }
    told.comment = told.comment.substr(0, told.comment.find(" Known:"));       // they have rows
    told.comment = std::regex_replace(told.comment, std::regex("  +"), ": ");  // columns
    const bool inner = below.contains("properties");
    if (!inner && told.value.empty()) {
      for (const auto& [leaf, value] : values) {
        if (!leaf.starts_with(full + ".") || value.value.empty()) continue;
        told.value +=
            Str(told.value.empty() ? "" : ", ", leaf.substr(full.size() + 1), " ", value.value);
      }
    }
    if (!inner || !told.comment.empty()) {
      const std::string shown = inner || told.value.empty() ? "" : Str("`", told.value, "`");
      rows += Str("| `", full, "` | ", inner ? "" : TypeOf(below), " | ", shown, " | ",
                  absl::StrReplaceAll(told.comment, {{"|", "\\|"}, {"<", "&lt;"}}), " |\n");
    }
    if (inner) AddRows(below, full, values, rows);
  }
}

TEST(ChartFlags, TheReadmeHasEveryValue) {
  std::string rows;
  AddRows(nlohmann::ordered_json::parse(ReadWhole(kChart + "values.schema.json")), "",
          ChartValues(), rows);
  EXPECT_GT(std::ranges::count(rows, '\n'), 100);
  ExpectPart(kChart + "README.md", "|---|---|---|---|\n", "\n## ", rows);
}

// Every flag reads what it takes, and changes nothing but what it shows.
TEST(ChartFlags, EveryFlagReachesAFieldOfItsOwn) {
  for (const ServeFlag& flag : FlagsIn(InChart::kServer)) {
    const nlohmann::json schema = nlohmann::json::parse(flag.value.schema);
    std::string sample = SampleOf(schema);
    std::erase(sample, '"');
    ServeOptions options;
    ASSERT_TRUE(flag.value.read(options, sample).ok()) << flag.name << " " << sample;
    for (const ServeFlag& other : ServeFlags()) {
      if (other.name == flag.name) continue;
      EXPECT_EQ(other.value.show(options), other.value.show(ServeOptions()))
          << flag.name << " changes " << other.name;
    }
  }
}

}  // namespace
}  // namespace treadle
