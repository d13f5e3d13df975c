// tokenizer.ggml.* of a GGUF file -> TokenizerSpec.
#include <algorithm>
#include <string>

#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/text/pre_tokenizer.h"

namespace treadle {
namespace {

// Null if missing; an error unless it is an array of `count` (any, if negative) such elements.
absl::StatusOr<const GgufValue*> Array(const GgufFile& file, std::string_view key, bool strings,
                                       int64_t count) {
  const GgufValue* value = file.Find(key);
  if (value == nullptr) return nullptr;
  if (!value->array || (value->type == GgufType::kString) != strings) {
    return InvalidArgument(file.path(), ": metadata '", key, "' is not an array of ",
                           strings ? "strings" : "numbers");
  }
  const auto size = static_cast<int64_t>(strings ? value->strings.size() : value->numbers.size());
  if (count >= 0 && size != count) {
    return InvalidArgument(file.path(), ": metadata '", key, "' has ", size,
                           " elements, expected one for each of ", count, " tokens");
  }
  return value;
}

absl::Status ReadTokens(const GgufFile& file, const GgufValue& texts, TokenizerSpec& spec) {
  const auto count = static_cast<int64_t>(texts.strings.size());
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* scores,
                           Array(file, "tokenizer.ggml.scores", false, count));
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* kinds,
                           Array(file, "tokenizer.ggml.token_type", false, count));
  spec.tokens.resize(texts.strings.size());
  for (size_t i = 0; i < spec.tokens.size(); ++i) {
    TokenizerSpec::Token& token = spec.tokens[i];
    token.text = std::string(texts.strings[i]);
    if (scores != nullptr) token.score = static_cast<float>(scores->numbers[i]);
    if (kinds == nullptr) continue;
    const double kind = kinds->numbers[i];
    if (kind == 0) continue;  // "undefined", of which some writers make all tokens
    if (!(kind >= 1 && kind <= 6)) {
      return InvalidArgument(file.path(), ": tokenizer.ggml.token_type of token ", i, " is ", kind,
                             ", expected 0 to 6");
    }
    token.kind = static_cast<TokenKind>(static_cast<int>(kind) - 1);  // the file counts from 1
  }
  return absl::OkStatus();
}

absl::Status ReadMerges(const GgufFile& file, TokenizerSpec& spec) {
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* merges, Array(file, "tokenizer.ggml.merges", true, -1));
  if (merges == nullptr) {
    return InvalidArgument(file.path(), ": metadata 'tokenizer.ggml.merges' is missing");
  }
  spec.merges.reserve(merges->strings.size());
  for (const std::string_view merge : merges->strings) {
    const size_t space = merge.find(' ', 1);
    if (space == std::string_view::npos || space + 1 == merge.size()) {
      return InvalidArgument(file.path(), ": tokenizer.ggml.merges has ", Quoted(merge),
                             ", expected two pieces with a space between");
    }
    spec.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  return absl::OkStatus();
}

absl::Status ReadIds(const GgufFile& file, bool sentencepiece, TokenizerSpec& spec) {
  int32_t eot = -1, eom = -1;
  struct Row {
    const char* key;
    int32_t* id;
    int32_t otherwise;  // SentencePiece files may leave the customary ids out
  };
  const Row rows[] = {{"tokenizer.ggml.bos_token_id", &spec.bos, sentencepiece ? 1 : -1},
                      {"tokenizer.ggml.eos_token_id", &spec.eos, sentencepiece ? 2 : -1},
                      {"tokenizer.ggml.eot_token_id", &eot, -1},
                      {"tokenizer.ggml.eom_token_id", &eom, -1},
                      {"tokenizer.ggml.unknown_token_id", &spec.unknown, sentencepiece ? 0 : -1},
                      {"tokenizer.ggml.padding_token_id", &spec.padding, -1}};
  const auto count = static_cast<int64_t>(spec.tokens.size());
  for (const Row& row : rows) {
    TREADLE_ASSIGN_OR_RETURN(const int64_t id, file.Integer(row.key, row.otherwise));
    // Files write 2^32 - 1 for none.
    if (id == 0xffffffff || id == -1) continue;
    if (id < 0 || id >= count) {
      return InvalidArgument(file.path(), ": ", row.key, " is ", id, ", expected 0 to ", count - 1);
    }
    *row.id = static_cast<int32_t>(id);
  }
  for (const int32_t id : {spec.eos, eot, eom}) {
    if (id >= 0 && std::ranges::find(spec.end_ids, id) == spec.end_ids.end()) {
      spec.end_ids.push_back(id);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<TokenizerSpec>> ReadGgufTokenizer(const GgufFile& file) {
  TREADLE_ASSIGN_OR_RETURN(const std::string named, file.String("tokenizer.ggml.model", "none"));
  const std::string_view model = named;
  if (model == "none") return std::nullopt;
  const bool ranked = model == "gemma4";  // SentencePiece's, whose merges are listed
  if (model != "gpt2" && model != "llama" && !ranked) {
    return Unimplemented(file.path(), ": tokenizer.ggml.model is ", Quoted(model),
                         ", expected gpt2, llama, gemma4 or none");
  }
  const bool sentencepiece = model != "gpt2";
  TREADLE_ASSIGN_OR_RETURN(const GgufValue* texts, Array(file, "tokenizer.ggml.tokens", true, -1));
  if (texts == nullptr) {
    return InvalidArgument(file.path(), ": metadata 'tokenizer.ggml.tokens' is missing");
  }
  TokenizerSpec spec;
  spec.model =
      sentencepiece ? TokenizerSpec::Model::kSentencePiece : TokenizerSpec::Model::kByteLevelBpe;
  TREADLE_RETURN_IF_ERROR(ReadTokens(file, *texts, spec));
  bool add_bos = sentencepiece;
  if (!sentencepiece || ranked) TREADLE_RETURN_IF_ERROR(ReadMerges(file, spec));
  if (!sentencepiece) {
    TREADLE_ASSIGN_OR_RETURN(spec.pre_tokenizer, file.String("tokenizer.ggml.pre", "gpt-2"));
    const auto row = FindPreTokenizer(spec.pre_tokenizer);
    if (!row.ok()) {
      return Unimplemented(file.path(), ": tokenizer.ggml.pre: ", row.status().message());
    }
    spec.ignore_merges = (*row)->ignore_merges;
    add_bos = (*row)->add_bos;
  }
  TREADLE_ASSIGN_OR_RETURN(spec.add_bos, file.Bool("tokenizer.ggml.add_bos_token", add_bos));
  TREADLE_ASSIGN_OR_RETURN(spec.add_eos, file.Bool("tokenizer.ggml.add_eos_token", false));
  TREADLE_ASSIGN_OR_RETURN(spec.add_space_prefix,
                           file.Bool("tokenizer.ggml.add_space_prefix", sentencepiece && !ranked));
  TREADLE_RETURN_IF_ERROR(ReadIds(file, sentencepiece, spec));
  return spec;
}

}  // namespace treadle
