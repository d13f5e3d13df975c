// Shared by tests of constraints: tokenizers with their compilers. Not thread-safe.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "engine/plan/iteration_plan.h"
#include "server/constraint/constraint_compiler.h"
#include "tests/server/byte_tokenizer.h"
#include "tests/server/letter_tokenizer.h"
#include "tests/server/without_xgrammar.h"

namespace treadle {

// A tokenizer and its compiler.
struct Compiling {
  explicit Compiling(std::unique_ptr<Tokenizer> made)
      : tokenizer(std::move(made)),
        compiler(
            ConstraintCompiler::Create(*tokenizer, tokenizer->size(), tokenizer->spec().end_ids)) {}

  absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(Constraint::Kind kind,
                                                                   const std::string& text) const {
    return compiler->Compile({.kind = kind, .text = text});
  }
  std::vector<int32_t> Allowed(TokenConstraint& state) const {
    std::vector<uint32_t> mask(MaskWords(tokenizer->size()));
    EXPECT_EQ(state.FillMask(mask), absl::OkStatus());
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < tokenizer->size(); ++id) {
      if ((mask[id / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
    }
    return allowed;
  }
  bool Ends(int32_t id) const {
    const auto& ends = tokenizer->spec().end_ids;
    return std::ranges::find(ends, id) != ends.end();
  }

  const std::unique_ptr<Tokenizer> tokenizer;
  const std::unique_ptr<ConstraintCompiler> compiler;
};

class ConstraintTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto compiled = bytes_.Compile(Constraint::Kind::kJsonObject, "");
    if (IsWithoutXGrammar(compiled.status().ToString())) GTEST_SKIP() << kWithoutXGrammar;
    ASSERT_EQ(compiled.status(), absl::OkStatus());
  }

  const Compiling bytes_{ByteTokenizer::Make()};
  const Compiling letters_{LetterTokenizer::Make(64)};
};

}  // namespace treadle
