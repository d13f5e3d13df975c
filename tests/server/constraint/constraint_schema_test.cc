// JSON schemas as constraints: every answer that the masks allow satisfies its schema.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>

#include "base/status.h"
#include "server/constraint/constraint_compiler.h"
#include "tests/server/constraint/constraint_fixture.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using Kind = Constraint::Kind;

// An answer by a model that knows nothing: any allowed token, of a few that get to the end.
std::optional<std::string> RandomAnswer(const Compiling& compiling,
                                        const ConstraintGrammar& grammar, std::mt19937& random) {
  const auto state = grammar.Begin();
  std::string text;
  for (int i = 0; i < 300; ++i) {
    const std::vector<int32_t> all = compiling.Allowed(*state);
    std::vector<int32_t> allowed;
    // Half of the time what comes nearer to the end. No exponents, which not every reader has room
    // for.
    for (const char* wanted : {"}],:\"", "{}[]\":,0123456789-.abfnrstux\\\n", ""}) {
      if (*wanted == '}' && random() % 2 == 0) continue;
      std::ranges::copy_if(all, std::back_inserter(allowed), [&](int32_t id) {
        return id >= 256 || *wanted == 0 ||
               std::string_view(wanted).find(static_cast<char>(id)) != std::string_view::npos;
      });
      if (!allowed.empty()) break;
    }
    if (allowed.empty()) return std::nullopt;
    const int32_t token = allowed[random() % allowed.size()];
    if (compiling.Ends(token)) return text;
    EXPECT_EQ(state->Accept(token), absl::OkStatus());
    text += compiling.tokenizer->TokenBytes(token, false);
  }
  return std::nullopt;
}

TEST_F(ConstraintTest, AnswersSatisfyTheirSchema) {
  const struct {
    const char* schema;
    bool (*valid)(const Json& answer);
  } rows[] = {
      {R"({"type":"integer","minimum":-3,"exclusiveMaximum":12})",
       [](const Json& a) { return a.is_number_integer() && a >= -3 && a < 12; }},
      {R"({"type":"number","minimum":-0.5,"maximum":2.25})",
       [](const Json& a) { return a.is_number() && a >= -0.5 && a <= 2.25; }},
      {R"({"type":"integer","multipleOf":7})",
       [](const Json& a) {
         return a.is_number_float() ||
                (a.is_number_unsigned() ? a.get<uint64_t>() % 7 == 0 : a.get<int64_t>() % 7 == 0);
       }},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       [](const Json& a) {
         size_t characters = 0;
         for (const char c : a.get<std::string>()) characters += (c & 0xc0) != 0x80;
         return characters >= 2 && characters <= 3;
       }},
      {R"({"type":"string","pattern":"^.e{2}[\"\\\\]?$"})",
       [](const Json& a) {
         const auto text = a.get<std::string>();
         return text.find("ee") != text.npos && text.find_first_of("\n\r") == text.npos;
       }},
      {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2})",
       [](const Json& a) { return a.is_array() && (a.size() == 1 || a.size() == 2); }},
      {R"({"type":"array","minItems":1})",
       [](const Json& a) { return a.is_array() && !a.empty(); }},
      {R"({"type":["null","boolean"]})",
       [](const Json& a) { return a.is_null() || a.is_boolean(); }},
      {R"({"enum":[1,"a\"",{"b":[null]}]})",
       [](const Json& a) { return a == 1 || a == "a\"" || a == Json::parse(R"({"b":[null]})"); }},
      {R"({"properties":{"z":{"type":"null"},"a":{"$ref":"#/$defs/d"}},"required":["a"],
           "$defs":{"d":{"anyOf":[{"const":true},{"type":"integer"}]}}})",
       [](const Json& a) {
         return a.contains("a") && (a["a"] == true || a["a"].is_number()) &&
                (a.size() == 1 || a["z"].is_null());
       }},
      {R"({"type":"object","properties":{"a":{"type":"null"}},
           "additionalProperties":{"type":"boolean"}})",
       [](const Json& a) {
         for (const auto& [name, value] : a.items()) {
           if (name == "a" ? !value.is_null() : !value.is_boolean()) return false;
         }
         return true;
       }},
  };
  std::mt19937 random(1);
  for (const auto& [schema, valid] : rows) {
    const auto grammar = bytes_.Compile(Kind::kJsonSchema, schema);
    ASSERT_EQ(grammar.status(), absl::OkStatus()) << schema;
    int ended = 0;
    for (int i = 0; i < 100; ++i) {
      const auto answer = RandomAnswer(bytes_, **grammar, random);
      if (!answer) continue;
      ++ended;
      const Json parsed = Json::parse(*answer, nullptr, false);
      EXPECT_TRUE(!parsed.is_discarded() && valid(parsed)) << schema << ": " << *answer;
    }
    EXPECT_GT(ended, 20) << schema;
  }
}

// A model that writes a line end wherever it may, and else what comes nearest to the end.
TEST_F(ConstraintTest, WhiteSpaceDoesNotRunAway) {
  const std::string schema = R"({"type":"object","properties":{"a":{"type":"array","minItems":2,
      "items":{"type":"integer"}},"b":{"type":"object"}},"required":["a","b"]})";
  const std::vector<Constraint::Tag> tags = {{.begin = "<", .schema = schema, .end = ">"}};
  const Constraint constraints[] = {
      {.kind = Kind::kJsonSchema, .text = schema},
      {.kind = Kind::kJsonObject},
      {.kind = Kind::kTags, .tags = tags, .one_tag = true},
      {.kind = Kind::kChoice, .choices = {"\n\n"}, .tags = tags, .one_tag = true}};
  for (Constraint constraint : constraints) {
    for (const bool any : {false, true}) {
      constraint.any_whitespace = any;
      const auto grammar = bytes_.compiler->Compile(constraint);
      ASSERT_EQ(grammar.status(), absl::OkStatus());
      const auto state = (*grammar)->Begin();
      std::string text;
      bool ended = false;
      while (!ended && text.size() < 200) {
        const std::vector<int32_t> allowed = bytes_.Allowed(*state);
        ASSERT_FALSE(allowed.empty());
        int32_t token = allowed[0];
        for (const char wanted : std::string_view(":\",]}>\n")) {
          if (std::ranges::find(allowed, wanted) != allowed.end()) token = wanted;
        }
        for (const int32_t id : allowed) ended |= bytes_.Ends(id);
        if (ended) break;
        ASSERT_EQ(state->Accept(token), absl::OkStatus());
        text += static_cast<char>(token);
      }
      const bool choice = constraint.kind == Kind::kChoice;
      EXPECT_EQ(ended, !any || choice) << text;
      if (!any && !choice) EXPECT_EQ(text.find("\n\n"), text.npos) << text;
    }
  }
}

// Spaces as models write them most of the time, and json.dumps of Python writes in both ways.
TEST_F(ConstraintTest, CompactJsonMayHaveASpaceBetweenItsParts) {
  const auto grammar = bytes_.Compile(
      Kind::kJsonSchema, R"({"properties":{"a":{"type":"array","items":{"type":"integer"}},)"
                         R"("b":{"type":"null"}},"required":["a","b"]})");
  ASSERT_EQ(grammar.status(), absl::OkStatus());
  for (const char* text : {R"({"a":[1,2],"b":null})", R"({"a": [1, 2], "b": null})",
                           "{\n\"a\": [\n1,\n2\n],\n\"b\": null\n}"}) {
    const auto state = (*grammar)->Begin();
    for (const char c : std::string_view(text)) {
      EXPECT_EQ(state->Accept(static_cast<unsigned char>(c)), absl::OkStatus()) << text;
    }
    EXPECT_EQ(state->Accept(bytes_.tokenizer->spec().end_ids[0]), absl::OkStatus()) << text;
  }
}

// Keys and punctuation, with the white space that the answer has put there before; and the state is
// what it was.
TEST_F(ConstraintTest, WhatIsForcedIsForeseen) {
  const auto grammar = bytes_.Compile(
      Kind::kJsonSchema,
      R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
          "at": {"enum": ["here", "there"]}}, "required": ["name", "age", "at"],
          "additionalProperties": false})");
  ASSERT_EQ(grammar.status(), absl::OkStatus());
  const auto state = (*grammar)->Begin();
  const auto foreseen_after = [&](const std::string& text) {
    for (const unsigned char byte : text) EXPECT_EQ(state->Accept(byte), absl::OkStatus());
    const std::vector<int32_t> allowed = bytes_.Allowed(*state);
    std::string foreseen;
    for (const int32_t id : state->Foresee()) foreseen += static_cast<char>(id);
    EXPECT_EQ(bytes_.Allowed(*state), allowed);
    return foreseen;
  };
  EXPECT_EQ(foreseen_after(""), R"({"name": ")");
  EXPECT_EQ(foreseen_after("{"), R"("name": ")");
  EXPECT_EQ(foreseen_after(R"("name":"Jo)"), "");
  EXPECT_EQ(foreseen_after(R"(n",)"), R"( "age":)");  // no space after a colon, in this answer
  EXPECT_EQ(foreseen_after(R"("age":12,)"), R"("at":)");
  EXPECT_EQ(foreseen_after(R"("at":"t)"), R"(here")");
}

TEST_F(ConstraintTest, PropertiesComeInTheOrderOfTheSchema) {
  const auto grammar = bytes_.Compile(Kind::kJsonSchema,
                                      R"({"properties":{"z":true,"a":true},"required":["a","z"]})");
  ASSERT_TRUE(grammar.ok());
  const auto state = (*grammar)->Begin();
  for (const char c : std::string_view("{\"")) EXPECT_TRUE(state->Accept(c).ok());
  EXPECT_EQ(bytes_.Allowed(*state), std::vector<int32_t>({'z'}));
}

// A schema of what there is, now and then of what is not.
Json RandomSchema(std::mt19937& random, int depth) {
  const auto dice = [&](uint32_t sides) { return random() % sides; };
  const auto one_of = [&](std::initializer_list<const char*> words) {
    return words.begin()[dice(static_cast<uint32_t>(words.size()))];
  };
  Json schema = Json::object();
  const uint32_t kind = dice(depth > 0 ? 10 : 6);
  const int a = static_cast<int>(dice(20)) - 5, b = a + static_cast<int>(dice(12)) - 2;
  if (kind == 0) {
    schema = {{"type", one_of({"integer", "number"})}, {"minimum", a}, {"maximum", b}};
  } else if (kind == 1) {
    schema = {{"type", "string"}, {"minLength", a}, {"maxLength", b}};
  } else if (kind == 2) {
    const char* pattern =
        one_of({"^a*$", "[0-9]{2}|x", "(a|b){0,3}\\d", "(", "a{3", ".", "[^\"]+"});
    schema = {{"type", "string"}, {"pattern", pattern}};
  } else if (kind == 3) {
    schema = {{"enum", {a, "x", nullptr}}};
  } else if (kind == 4) {
    schema = {{"type", Json::array({"null", one_of({"string", "boolean", "array", "object"})})}};
  } else if (kind == 5) {
    schema = {{"$ref", one_of({"#", "#/$defs/d", "#/properties/a", "#/nowhere"})}};
  } else if (kind == 6) {
    schema = {{"type", "array"}, {"items", RandomSchema(random, depth - 1)}};
    if (dice(2) == 0) schema["maxItems"] = b;
    if (dice(2) == 0) schema["minItems"] = a;
    if (dice(4) == 0) schema["prefixItems"] = Json::array({RandomSchema(random, depth - 1)});
  } else if (kind == 7) {
    schema = {{one_of({"anyOf", "oneOf", "allOf"}),
               {RandomSchema(random, depth - 1), RandomSchema(random, depth - 1)}}};
  } else {
    schema = {{"type", "object"}};
    for (const char* name : {"a", "b\"", "\u00e9"}) {
      if (dice(2) == 0) schema["properties"][name] = RandomSchema(random, depth - 1);
    }
    if (dice(2) == 0) schema["required"] = Json::array({"a"});
    if (dice(3) == 0) schema["additionalProperties"] = RandomSchema(random, depth - 1);
    if (dice(4) == 0) schema["maxProperties"] = b;
  }
  if (dice(20) == 0) schema[one_of({"not", "format", "title", "uniqueItems", "$id"})] = "x";
  return schema;
}

TEST_F(ConstraintTest, RandomSchemasAreCompiledOrRefused) {
  std::mt19937 random(20);
  int compiled = 0, ended = 0;
  // Each is tried in a process of its own.
  const char* const asked = std::getenv("TREADLE_RANDOM_SCHEMAS");
  const int count = asked == nullptr ? 1000 : std::atoi(asked);
  for (int i = 0; i < count; ++i) {
    Json schema = RandomSchema(random, 3);
    if (random() % 2 == 0) schema["$defs"]["d"] = RandomSchema(random, 1);
    const auto grammar = bytes_.Compile(Kind::kJsonSchema, schema.dump());
    if (!grammar.ok()) {
      EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << schema;
      continue;
    }
    ++compiled;
    const auto answer = RandomAnswer(bytes_, **grammar, random);
    if (!answer) continue;
    ++ended;
    EXPECT_FALSE(Json::parse(*answer, nullptr, false).is_discarded()) << schema << ": " << *answer;
  }
  EXPECT_GT(compiled, count / 10);
  EXPECT_GT(ended, count / 20);
}

}  // namespace
}  // namespace treadle
