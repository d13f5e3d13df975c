// Constraints by the library, against languages that are written out, and against what would cost
// too much or is not enforced.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/status.h"
#include "server/constraint/constraint_compiler.h"
#include "server/constraint/refused_constraints.h"
#include "tests/server/byte_tokenizer.h"
#include "tests/server/constraint/constraint_fixture.h"
#include "tests/server/letter_tokenizer.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using Kind = Constraint::Kind;
using testing::HasSubstr;

// Every mask on every way through a language, by what its words allow.
void CheckLanguage(const Compiling& compiling, const ConstraintGrammar& grammar,
                   const std::set<std::string>& words, const std::vector<int32_t>& path,
                   const std::string& text, int& states) {
  ++states;
  const auto state = grammar.Begin();
  for (const int32_t token : path) ASSERT_EQ(state->Accept(token), absl::OkStatus());
  std::vector<int32_t> expected;
  for (int32_t id = 0; id < compiling.tokenizer->size(); ++id) {
    const std::string bytes = compiling.tokenizer->TokenBytes(id, false);
    if (bytes.empty() && !compiling.Ends(id)) continue;  // a control token
    const std::string with = text + bytes;
    const bool allowed = compiling.Ends(id) ? words.contains(text)
                                            : words.lower_bound(with) != words.end() &&
                                                  words.lower_bound(with)->starts_with(with);
    if (allowed) expected.push_back(id);
  }
  ASSERT_EQ(compiling.Allowed(*state), expected) << "after '" << text << "'";
  for (const int32_t id : expected) {
    if (compiling.Ends(id)) continue;
    std::vector<int32_t> further = path;
    further.push_back(id);
    CheckLanguage(compiling, grammar, words, further,
                  text + compiling.tokenizer->TokenBytes(id, false), states);
  }
}

// Counts how often its tokens are asked for.
class CountingTokenizer final : public Tokenizer {
 public:
  explicit CountingTokenizer(std::unique_ptr<Tokenizer> tokenizer)
      : Tokenizer(tokenizer->spec()), tokenizer_(std::move(tokenizer)) {}

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override {
    return tokenizer_->Encode(text, options);
  }
  std::string TokenBytes(int32_t id, bool special) const override {
    ++asked_;
    return tokenizer_->TokenBytes(id, special);
  }
  int asked() const { return asked_; }

 private:
  const std::unique_ptr<Tokenizer> tokenizer_;
  mutable std::atomic<int> asked_ = 0;
};

TEST_F(ConstraintTest, TheVocabularyIsReadOnceAheadOrWithTheFirstConstraint) {
  for (const bool ahead : {true, false}) {
    SCOPED_TRACE(ahead);
    const CountingTokenizer tokenizer(ByteTokenizer::Make());
    const auto compiler =
        ConstraintCompiler::Create(tokenizer, tokenizer.size(), tokenizer.spec().end_ids);
    if (ahead) {
      std::promise<void> done;
      compiler->ReadAhead([&] { done.set_value(); });
      done.get_future().wait();
      EXPECT_EQ(tokenizer.asked(), tokenizer.size());
    }
    for (const char* pattern : {"a+", "b+"}) {
      EXPECT_TRUE(compiler->Compile({.kind = Kind::kRegex, .text = pattern}).ok());
      EXPECT_EQ(tokenizer.asked(), tokenizer.size());
    }
  }
}

// Meanwhile a constraint comes, or the end.
TEST_F(ConstraintTest, ReadingAheadIsWaitedFor) {
  for (const bool compile : {true, false}) {
    const CountingTokenizer tokenizer(ByteTokenizer::Make());
    int told = 0;
    {
      const auto compiler =
          ConstraintCompiler::Create(tokenizer, tokenizer.size(), tokenizer.spec().end_ids);
      compiler->ReadAhead([&told] { ++told; });
      if (compile) {
        EXPECT_TRUE(compiler->Compile({.kind = Kind::kRegex, .text = "a+"}).ok());
      }
    }
    EXPECT_EQ(told, 1);
    EXPECT_EQ(tokenizer.asked(), tokenizer.size());
  }
  // Without a token that ends an answer there are no constraints, and nothing to read.
  const CountingTokenizer endless(ByteTokenizer::Make());
  ConstraintCompiler::Create(endless, endless.size(), {})->ReadAhead([] { ADD_FAILURE(); });
  EXPECT_EQ(endless.asked(), 0);
}

TEST_F(ConstraintTest, MasksAreThoseOfTheLanguage) {
  std::set<std::string> words;  // of (a|bb)(c|cb){1,2}d?
  for (const std::string first : {"a", "bb"}) {
    for (const std::string second : {"c", "cb"}) {
      for (const std::string third : {"", "c", "cb"}) {
        for (const std::string last : {"", "d"}) words.insert(first + second + third + last);
      }
    }
  }
  const Constraint constraints[] = {
      {.kind = Kind::kRegex, .text = "^(a|bb)(c|cb){1,2}d?$"},
      {.kind = Kind::kGrammar,
       .text = "root ::= first second second? \"d\"?\nfirst ::= \"a\" | \"bb\"\n"
               "second ::= \"c\" | \"cb\"  # a comment"},
      {.kind = Kind::kChoice, .choices = {words.begin(), words.end()}},
  };
  for (const Constraint& constraint : constraints) {
    const auto grammar = letters_.compiler->Compile(constraint);
    ASSERT_EQ(grammar.status(), absl::OkStatus());
    int states = 0;
    CheckLanguage(letters_, **grammar, words, {}, "", states);
    EXPECT_GT(states, 50);
  }
}

TEST_F(ConstraintTest, TagsMayBeAllThereIsOrStandInstead) {
  const std::vector<Constraint::Tag> tags = {
      {.begin = "a", .schema = R"({"enum": ["b", "cd"]})", .end = "z"},
      {.begin = "xy", .schema = R"({"const": "e"})", .end = ""}};
  const std::set<std::string> calls = {"a\"b\"z", "a\"cd\"z", "xy\"e\""};
  std::set<std::string> or_else = calls;
  or_else.insert("abc");
  const std::pair<Constraint, std::set<std::string>> rows[] = {
      {{.kind = Kind::kTags, .tags = tags, .one_tag = true}, calls},
      {{.kind = Kind::kRegex, .text = "abc", .tags = tags, .one_tag = true}, or_else},
      {{.kind = Kind::kChoice, .choices = {"abc"}, .tags = tags, .one_tag = true}, or_else}};
  for (const auto& [constraint, words] : rows) {
    const auto grammar = bytes_.compiler->Compile(constraint);
    ASSERT_EQ(grammar.status(), absl::OkStatus());
    int states = 0;
    CheckLanguage(bytes_, **grammar, words, {}, "", states);
  }
  const auto refused = bytes_.compiler->Compile(
      {.kind = Kind::kTags, .tags = {{.begin = "a", .schema = R"({"not": {}})", .field = "f"}}});
  EXPECT_THAT(refused.status().message(), HasSubstr("f: the keyword not"));
}

TEST_F(ConstraintTest, WhatIsNotAllowedIsNotAccepted) {
  const auto grammar = letters_.Compile(Kind::kRegex, "ab");
  ASSERT_TRUE(grammar.ok());
  const auto state = (*grammar)->Begin();
  EXPECT_EQ(state->Accept(0), absl::OkStatus());
  EXPECT_THAT(state->Accept(0).message(), HasSubstr("does not allow token 0"));
  const auto other = (*grammar)->Begin();  // begins anew
  EXPECT_EQ(letters_.Allowed(*other), std::vector<int32_t>({0}));
}

TEST_F(ConstraintTest, ChoicesMayBeAnyText) {
  const std::vector<std::string> choices = {"\"\\n\n\t", "a]b[", "\xc3\xa9", "# \x7f", ""};
  const auto grammar = bytes_.compiler->Compile({.kind = Kind::kChoice, .choices = choices});
  ASSERT_EQ(grammar.status(), absl::OkStatus());
  for (const std::string& choice : choices) {
    const auto state = (*grammar)->Begin();
    for (const char c : choice) {
      EXPECT_EQ(state->Accept(static_cast<unsigned char>(c)), absl::OkStatus()) << choice;
    }
    EXPECT_EQ(state->Accept(bytes_.tokenizer->spec().end_ids[0]), absl::OkStatus()) << choice;
  }
}

TEST_F(ConstraintTest, WhatIsNotEnforcedIsRefusedByName) {
  const struct {
    const char* schema;
    const char* error;
  } rows[] = {
      {R"({"type":"array","uniqueItems":true})", "the keyword uniqueItems at '/' cannot be"},
      {R"({"properties":{"a":{"not":{}}}})", "the keyword not at '/properties/a/' cannot be"},
      {R"({"type":"object","patternProperties":{"a":{}}})", "patternProperties"},
      {R"({"type":"object","propertyNames":{}})", "propertyNames"},
      {R"({"type":"object","dependentRequired":{}})", "dependentRequired"},
      {R"({"type":"array","contains":{}})", "contains"},
      {R"({"if":{}})", "the keyword if"},
      {R"({"minLength":3})", "minLength at '/' cannot be enforced without a type"},
      {R"({"type":"integer","pattern":"a"})", "pattern at '/' cannot be enforced without a type"},
      {R"({"type":"number","multipleOf":2})", "multipleOf"},
      {R"({"type":"integer","multipleOf":2,"minimum":1})", "minimum at '/' cannot be enforced be"},
      {R"({"type":"string","minLength":1,"format":"date"})", "format at '/' cannot be enforced be"},
      {R"({"type":"string","format":"idn-email"})", "format at '/' is \"idn-email\""},
      {R"({"anyOf":[{"type":"null"}],"type":"null"})", "type at '/' cannot be enforced beside any"},
      {R"({"allOf":[{"type":"null"},{}]})", "allOf"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "cannot be enforced"},
      {R"({"$ref":"other.json"})", "$ref"},
      {R"({"$ref":"#/properties/a"})", "$ref at '/' leads to '#/properties/a'"},
      {R"({"enum":[1,"a"],"type":"string"})", "type at '/' does not have 1"},
      {R"({"properties":{},"required":["a"]})", "required at '/' has \"a\""},
      {R"({"type":"object","minProperties":2})", "minProperties"},
      {R"({"type":"string","pattern":"a^"})", "pattern at '/' has ^ at byte 1"},
      {R"({"type":"string","pattern":"\\bx"})", "has \\b at byte 0"},
      {R"({"type":"string","pattern":"a\\t"})", "has a character at byte 1 that is an escape in"},
      {R"({"type":"string","pattern":"[\"]"})", "has a character at byte 0 that is an escape in"},
      {R"({"type":"string","pattern":"\\u001f"})",
       "has a character at byte 0 that is an escape in"},
      {R"-({"type":"string","pattern":"(?=x)"})-", "Lookahead"},
      {R"({"type":"text"})", "type at '/' is \"text\""},
      {R"({"type":"object","$ref":"#"})", "type at '/' cannot be enforced beside $ref"},
      {R"({"a":)", "is not valid JSON"},
      {"[]", "expected a JSON object"},
      {R"({"$ref":"#"})", "allows no"},
  };
  for (const auto& [schema, error] : rows) {
    const absl::Status status = bytes_.Compile(Kind::kJsonSchema, schema).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << schema;
    EXPECT_THAT(status.message(), HasSubstr(error)) << schema;
  }
}

TEST_F(ConstraintTest, WhatWouldCostTooMuchIsRefused) {
  const auto repeated = [](const std::string& text, int times) {
    std::string out;
    for (int i = 0; i < times; ++i) out += text;
    return out;
  };
  const struct {
    Kind kind;
    std::string text;
    const char* error;
  } rows[] = {
      {Kind::kRegex, "(a{0,100}){0,100}", "repetitions that multiply to more than 128"},
      {Kind::kRegex, "((a{9}){9}){9}", "repetitions that multiply"},
      {Kind::kRegex, "a{99999999999999999999}", "repetitions that multiply"},
      {Kind::kRegex, repeated("[^a]{100}", 6), "classes of characters"},
      {Kind::kRegex, repeated("(", 40), "groups in each other"},
      {Kind::kRegex, std::string(kMaxConstraintBytes + 1, 'a'), "65537 bytes, expected at most"},
      {Kind::kRegex, "", "is empty"},
      {Kind::kRegex, "\xff", "not valid UTF-8 at byte 0"},
      {Kind::kGrammar, "root ::= a{0,50}\na ::= b{0,50}\nb ::= [a-z]{0,50}", "together"},
      {Kind::kGrammar, "root ::= Regex(\"(a{0,100}){0,100}\")", "has Regex at byte 9"},
      {Kind::kGrammar, "start ::= \"a\"", "cannot be compiled"},
      {Kind::kJsonSchema, R"({"type":"string","maxLength":10000})", "maxLength at '/' is 10000"},
      {Kind::kJsonSchema, repeated("[", 100), "nested more than 64 levels deep"},
      {Kind::kJsonSchema, R"({"anyOf":[)" + repeated("{},", 4200) + "{}]}", "4096 schemas"},
      {Kind::kChoice, "", "0 choices, expected 1 to"},
  };
  for (const auto& [kind, text, error] : rows) {
    const absl::Status status = bytes_.Compile(kind, text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 40);
    EXPECT_THAT(status.message(), HasSubstr(error)) << text.substr(0, 40);
  }
}

// So many ways to read the same text that none of these bounds sees it: tokens of 40 letters.
TEST_F(ConstraintTest, WhatTurnsOutToCostTooMuchIsRefused) {
  const Compiling long_tokens(LetterTokenizer::Make(26 * 40));
  const absl::Status status = long_tokens.Compile(Kind::kRegex, "((.*)*)*").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("is too expensive"));
  EXPECT_EQ(long_tokens.Compile(Kind::kRegex, "(ab)*").status(), absl::OkStatus());
  // It is known from now on, and what was not tried is not.
  EXPECT_TRUE(long_tokens.compiler->Keeps({.kind = Kind::kRegex, .text = "((.*)*)*"}));
  EXPECT_FALSE(long_tokens.compiler->Keeps({.kind = Kind::kRegex, .text = "((.*)*)*b"}));
  EXPECT_EQ(long_tokens.Compile(Kind::kRegex, "((.*)*)*").status(), status);
}

TEST(RefusedConstraints, AreKnownForAWhile) {
  using Form = PreparedConstraint::Form;
  RefusedConstraints refused;
  const RefusedConstraints::TimePoint now{};
  const auto named = [](size_t i) { return PreparedConstraint{Form::kRegex, Str("a", i)}; };
  const absl::Status why = absl::InvalidArgumentError("is too expensive");
  refused.Add(named(0), why, now);
  EXPECT_EQ(refused.Find(named(0), now), why);
  EXPECT_EQ(refused.Find({Form::kGrammar, "a0"}, now), absl::OkStatus());
  EXPECT_EQ(refused.Find(named(0), now + RefusedConstraints::kFor), absl::OkStatus());
  for (size_t i = 1; i <= RefusedConstraints::kMaxKept; ++i) refused.Add(named(i), why, now);
  EXPECT_EQ(refused.Find(named(0), now), absl::OkStatus());  // the oldest made room
  EXPECT_EQ(refused.Find(named(1), now), why);
}

}  // namespace
}  // namespace treadle
