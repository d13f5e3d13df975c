// The byte-level BPE tokenizer and the chat template of tiny models, in both kinds of file.
#pragma once

#include <cstdint>
#include <string>

#include "tests/support/gguf_writer.h"

namespace treadle {

// Tokens: 256 bytes, some merges, then <|endoftext|> (bos, unknown), <|im_start|>, <|im_end|>
// (eos).
int32_t TinyVocabulary();
int32_t TinyEndOfTurn();  // id of <|im_end|>

void AddTinyTokenizer(bool chat_template, GgufWriter& writer);
std::string TinyTokenizerJson();
std::string TinyTokenizerConfigJson(bool chat_template);

}  // namespace treadle
