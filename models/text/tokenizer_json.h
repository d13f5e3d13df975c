// Reads the tokenizer of a Hugging Face folder: tokenizer.json, or Kimi's tiktoken.model
// (tiktoken_file.h), with tokenizer_config.json, special_tokens_map.json and generation_config.json
// for what it does not hold (BOS, EOS, stops).
//
// Understood: byte-level BPE that cuts text as a row of pre_tokenizer_table.cc does, and
// SentencePiece-style BPE with byte fallback (Llama 2, TinyLlama, Mistral). Anything else is
// InvalidArgument or Unimplemented, naming the file, the field, what was found and what was
// expected. And writes it: tokenizer_json_writer.cc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/folder_files.h"
#include "models/text/tokenizer.h"

namespace treadle {

// NotFound when the folder has neither file: such a model serves token ids only.
absl::StatusOr<TokenizerSpec> ReadTokenizerJson(FolderFiles& files);

// The ids that end generation, by generation_config.json or, without an entry there, config.json;
// none if neither says. InvalidArgument for ids outside a vocabulary of `vocab`.
absl::StatusOr<std::vector<int32_t>> ReadEndIds(FolderFiles& files, int64_t vocab);

// The inverse: tokenizer.json, tokenizer_config.json and generation_config.json, by name.
// Byte-level BPE has them; SentencePiece models of GGUF files (scores without merges) have none.
std::map<std::string, std::string> TokenizerJsonFiles(const TokenizerSpec& spec,
                                                      const std::string& chat_template,
                                                      int64_t context);

// "pre_tokenizer" as Falcon's files have it.
inline constexpr const char* kFalconPreTokenizer =
    R"({"type": "Sequence", "pretokenizers": [
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    {"type": "Digits", "individual_digits": false},
    {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated",
     "invert": false}]})";

}  // namespace treadle
