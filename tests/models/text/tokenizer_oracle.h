// Shared by the tokenizer tests: the authors' results (tests/oracles/make_tokenizer_oracles.py)
// and the checks against them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/text/tokenizer.h"

namespace treadle {

nlohmann::json ReadOracle(const std::string& file);  // below tests/testdata/tokenizers

// Every text gives the oracle's ids, and its ids decode to the oracle's text, whole and in a
// stream.
void CheckCases(const Tokenizer& tokenizer, const nlohmann::json& oracle);

// The pieces of a stream are valid UTF-8, and together they are `whole`.
void CheckStream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool special,
                 const std::string& whole);

}  // namespace treadle
