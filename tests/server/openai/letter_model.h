// A model of letters, for tests of OpenAI's JSON.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "server/openai/openai_request.h"
#include "tests/server/letter_tokenizer.h"

namespace treadle {

inline const ServedModel& Model() {
  static const ServedModel* const model = [] {
    auto* made = new ServedModel;
    made->name = "m";
    made->fingerprint = "fp_1";
    made->vocab = 50;
    made->max_context = 64;
    made->kv_pages = 8;
    made->paging.page_size = 16;
    made->tokenizer = LetterTokenizer::Make(50);
    made->end_ids = {49};
    made->constraints = ConstraintCompiler::Create(*made->tokenizer, 50, made->end_ids);
    return made;
  }();
  return *model;
}

inline OpenAiRequest ReadGood(bool chat, const std::string& body) {
  const auto read = ReadOpenAiRequest(body, chat, Model());
  EXPECT_TRUE(read.ok()) << read.status() << " " << body;
  return read.value_or(OpenAiRequest{.prompts = {std::string()}});
}

}  // namespace treadle
