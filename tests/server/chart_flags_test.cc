// What the Helm chart knows of serve's flags is what the table of flags says: the properties of
// `server` in its schema, their names in values.yaml, the flags that extraArgs may not have, and a
// set of values with every word. TREADLE_WRITE_CHART=1 (make chart-flags) writes them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

#include "base/status.h"
#include "server/configuration.h"

namespace treadle {
namespace {

const std::string kChart = TREADLE_SOURCE "/deploy/helm/treadle/";

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The part of a file between the first `begin` and the next `end` is `part`, or is written.
void ExpectPart(const std::string& path, const std::string& begin, const std::string& end,
                const std::string& part) {
  std::string text = TextOf(path);
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
      << path << " is not what server/configuration.cc says; `make chart-flags` mends it";
}

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
       {"500ms", "1.5G", "/tmp/ledger.jsonl", "https://app.example", "/var/cache/treadle:20G"}) {
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
    templates += TextOf(kChart + "templates/" + file);
  }
  for (const ServeFlag& flag : FlagsIn(InChart::kOwn)) {
    list += Str(" \"", flag.name, "\"");
    EXPECT_THAT(templates, testing::HasSubstr(Str(flag.name, "="))) << "the chart does not set it";
  }
  ExpectPart(kChart + "templates/_checks.tpl", "{{- $owned := list", " \"--config\"", list);
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
