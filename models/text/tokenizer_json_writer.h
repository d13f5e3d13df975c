// A tokenizer as the files of a Hugging Face folder: the inverse of tokenizer_json.h.
//
// Thread safety: pure functions.
#pragma once

#include <map>
#include <string>

#include "models/text/tokenizer_spec.h"

namespace treadle {

// Byte-level BPE has one; SentencePiece models of GGUF files (scores without merges) do not.
bool HasTokenizerJson(const TokenizerSpec& spec);

// tokenizer.json, tokenizer_config.json and generation_config.json, by name.
std::map<std::string, std::string> TokenizerJsonFiles(const TokenizerSpec& spec,
                                                      const std::string& chat_template,
                                                      int64_t context);

}  // namespace treadle
