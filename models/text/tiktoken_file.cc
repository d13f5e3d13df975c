#include "models/text/tiktoken_file.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "models/text/bpe_tokenizer.h"
#include "models/text/pre_tokenizer.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

constexpr const char* kClass = "TikTokenTokenizer";  // Kimi's
constexpr const char* kPreTokenizer = "kimi-k2";
constexpr size_t kMaxTokenBytes = 1024;  // bytes of a token, each of whose splits is looked at

// Tokens by rank.
absl::StatusOr<std::vector<std::string>> ReadTokens(const MappedFile& file) {
  const std::string& path = file.path();
  std::vector<std::string> tokens;
  for (std::string_view text = file.text(); !text.empty();) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    std::string token;
    const bool read = absl::Base64Unescape({line.data(), space}, &token) && !token.empty();
    const auto rank = NumberIn<int64_t>(line.substr(std::min(space + 1, line.size())));
    if (!read || token.size() > kMaxTokenBytes || rank != std::ssize(tokens)) {
      return InvalidArgument(path, ": line ", tokens.size() + 1, " is ", Quoted(Cut(line, 80)),
                             ", expected a token in base64, up to ", kMaxTokenBytes, " bytes, and ",
                             tokens.size());
    }
    tokens.push_back(std::move(token));
  }
  TREADLE_RETURN_IF_ERROR(file.CheckUnchanged());
  return tokens;
}

}  // namespace

absl::StatusOr<Json> TiktokenAsJson(FolderFiles& files) {
  const std::string path = files.PathOf(kTiktokenFile);
  constexpr const char* kConfig = "tokenizer_config.json";
  const std::string config_path = files.PathOf(kConfig);
  TREADLE_ASSIGN_OR_RETURN(const Json config, files.Json(kConfig));
  if (config.value("tokenizer_class", Json()) != kClass) {
    return Unimplemented(config_path, ": tokenizer_class is ",
                         config.value("tokenizer_class", Json()).dump(), ", expected \"", kClass,
                         "\" beside ", kTiktokenFile);
  }
  TREADLE_ASSIGN_OR_RETURN(const auto file, files.Open(kTiktokenFile));
  TREADLE_ASSIGN_OR_RETURN(const std::vector<std::string> tokens, ReadTokens(*file));
  std::unordered_map<std::string_view, size_t> ranks;
  Json vocabulary = Json::object(), merges = Json::array(), added = Json::array();
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!ranks.emplace(tokens[i], i).second) {
      return InvalidArgument(path, ": line ", i + 1, " repeats the token of line ",
                             ranks[tokens[i]] + 1);
    }
    vocabulary[SpelledBytes(tokens[i])] = i;
  }
  for (const std::string& token : tokens) {
    for (size_t at = 1; at < token.size(); ++at) {
      const std::string_view left = std::string_view(token).substr(0, at);
      const std::string_view right = std::string_view(token).substr(at);
      if (!ranks.contains(left) || !ranks.contains(right)) continue;
      merges.push_back({SpelledBytes(left), SpelledBytes(right)});
    }
  }
  const Json listed = config.value("added_tokens_decoder", Json::object());
  for (const auto& [id, token] : listed.items()) {
    const auto number = NumberIn<int64_t>(id);
    if (!token.is_object() || !number) {
      return InvalidArgument(config_path, ": added_tokens_decoder has ", Quoted(Cut(id, 80)),
                             ", expected ids of tokens");
    }
    added.push_back(token);
    added.back()["id"] = *number;
  }
  TREADLE_ASSIGN_OR_RETURN(const PreTokenizerRow* row, FindPreTokenizer(kPreTokenizer));
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", SplitPatterns(*row)[0]}}},
                      {"behavior", "Isolated"}};
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return Json{{"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}}},
              {"added_tokens", added},
              {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}}},
              {"decoder", {{"type", "ByteLevel"}}}};
}

}  // namespace treadle
