#include "base/json_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <utility>

#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

TEST(MemberText, IsWhatStandsThere) {
  const std::string object =
      "\xEF\xBB\xBF {\"a\" : [1, {\"b\": \"]}\"}] ,\n\"b\":\"x\\\"}\\\\\",\"\\u0063\": -1.50e3\t,"
      "\"d\":{\"c\": 2, \"b\": 1},\"\": true}  ";
  ASSERT_OK_AND_ASSIGN(const auto parsed, ParseJsonObject(object, ""));
  EXPECT_EQ(MemberText(object, "a"), "[1, {\"b\": \"]}\"}]");
  EXPECT_EQ(MemberText(object, "b"), "\"x\\\"}\\\\\"");
  EXPECT_EQ(MemberText(object, "c"), "-1.50e3");
  EXPECT_EQ(MemberText(object, "d"), "{\"c\": 2, \"b\": 1}");
  EXPECT_EQ(MemberText(object, ""), "true");
  for (const auto& [name, value] : parsed.items()) {
    EXPECT_EQ(nlohmann::json::parse(MemberText(object, name)), value) << name;
  }
  for (const char* none : {"x", "{", "1"}) EXPECT_EQ(MemberText(object, none), "");
  EXPECT_EQ(MemberText("{}", ""), "");
  EXPECT_EQ(MemberText("{\"a\":{}}", "a"), "{}");
}

TEST(ParseJsonObject, CountsValuesWithMemoryOfTheirOwn) {
  // An object, two keys, an array, three empty objects, a string.
  const std::string text = R"({"a":[{},{},{},1,2,3],"b":"x"})";
  EXPECT_TRUE(ParseJsonObject(text, "p", 8).ok());
  EXPECT_EQ(ParseJsonObject(text, "p", 7).status().message(),
            "p: has too many strings, keys, arrays and objects, expected at most 7");
}

TEST(ReadJsonFile, PythonsInfinityIsAnObject) {
  const std::string path = testing::TempDir() + "infinity.json";
  for (const auto& [text, member] :
       {std::pair(R"({"a": [0.0, Infinity]})", R"([0.0, {"__float__": "Infinity"}])"),
        std::pair(R"({"a": "Infinity \" Infinity"})", R"("Infinity \" Infinity")"),
        std::pair(R"({"a": -Infinity})", "")}) {
    std::ofstream(path) << text;
    const auto json = ReadJsonFile(path);
    ASSERT_EQ(json.ok(), member[0] != '\0') << text;
    if (json.ok()) EXPECT_EQ((*json)["a"], nlohmann::json::parse(member));
  }
}

// The parser's library takes a zero byte for the end, whatever follows.
TEST(ParseJsonObject, HasNoZeroByte) {
  for (const std::string after : {"", "x", "{}"}) {
    const std::string text = "{}" + std::string(1, '\0') + after;
    EXPECT_EQ(ParseJsonObject(text, "p").status().message(), "p: is not valid JSON at byte 3");
    EXPECT_FALSE(WithKeysOnce(text).ok());
  }
}

TEST(WithKeysOnce, TheLastValueCounts) {
  const std::string once = "{\"b\" : 1.50, \"a\": [ ]}";
  EXPECT_EQ(*WithKeysOnce(once), once);
  EXPECT_EQ(*WithKeysOnce(R"({"b": 1, "a": {"c": [1, 2], "c": 3}, "b": "\u00e9"})"),
            "{\"b\":\"\u00e9\",\"a\":{\"c\":3}}");
  const std::string deep(80, '[');
  for (const std::string& bad : {std::string(""), std::string("[1]"), std::string("{\"a\": 1,}"),
                                 "{\"a\": " + deep + std::string(80, ']') + "}"}) {
    EXPECT_FALSE(WithKeysOnce(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace treadle
