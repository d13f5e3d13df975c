#include "models/text/tokenizer_json.h"

#include <algorithm>
#include <initializer_list>
#include <unordered_map>

#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/text/pre_tokenizer.h"
#include "models/text/tiktoken_file.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
constexpr const char* kSpace = "\xE2\x96\x81";  // U+2581
// Ids that no token has cost memory too: as many of them as tokens, and some more where a small
// vocabulary leaves room for others.
constexpr size_t kSpareIds = 1024;

// "" where the value is not an object with a string "type".
std::string TypeOf(const Json& value) {
  if (!value.is_object() || !value.contains("type") || !value["type"].is_string()) return "";
  return value["type"].get<std::string>();
}

// Null where the value is not an object or has no such member.
const Json& Member(const Json& value, const char* name) {
  static const Json null;
  if (!value.is_object()) return null;
  const auto found = value.find(name);
  return found == value.end() ? null : *found;
}

bool IsTrue(const Json& value) { return value.is_boolean() && value.get<bool>(); }

std::string Excerpt(const Json& value) {
  constexpr size_t kMax = 200;
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMax) text = text.substr(0, kMax) + "...";
  return text;
}

// The members of a normalizer, pre-tokenizer, post-processor or decoder: a Sequence's, or itself.
std::vector<Json> Steps(const Json& value, const char* members) {
  if (value.is_null()) return {};
  if (TypeOf(value) != "Sequence") return {value};
  std::vector<Json> steps;
  for (const Json& step : Member(value, members)) steps.push_back(step);
  return steps;
}

std::vector<std::string> TypesOf(const std::vector<Json>& steps) {
  std::vector<std::string> types;
  for (const Json& step : steps) types.push_back(TypeOf(step));
  return types;
}

// eos_token_id of a file: one id, a list, or nothing; nothing too if there is no such file.
absl::StatusOr<std::vector<int32_t>> EndIdsIn(FolderFiles& files, const char* name, int64_t vocab) {
  std::vector<int32_t> ids;
  if (!files.Has(name)) return ids;
  TREADLE_ASSIGN_OR_RETURN(const Json config, files.Json(name));
  const Json& entry = Member(config, "eos_token_id");
  const Json list = entry.is_array() ? entry : entry.is_null() ? Json::array() : Json{entry};
  for (const Json& id : list) {
    if (!IntegerIn(id, 0, vocab - 1)) {
      return InvalidArgument(files.PathOf(name), ": eos_token_id is ", Excerpt(entry),
                             ", expected ids below ", vocab);
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

class Reader {
 public:
  explicit Reader(FolderFiles& files)
      : files_(files),
        tiktoken_(!files.Has("tokenizer.json") && files.Has(kTiktokenFile)),
        file_(files.PathOf(tiktoken_ ? kTiktokenFile : "tokenizer.json")) {}

  absl::StatusOr<TokenizerSpec> Read() {
    TREADLE_ASSIGN_OR_RETURN(root_,
                             tiktoken_ ? TiktokenAsJson(files_) : files_.Json("tokenizer.json"));
    TREADLE_RETURN_IF_ERROR(ReadModel());
    TREADLE_RETURN_IF_ERROR(ReadAddedTokens());
    const bool sentencepiece = spec_.model == TokenizerSpec::Model::kSentencePiece;
    TREADLE_RETURN_IF_ERROR(sentencepiece ? ReadSpaces() : ReadPattern());
    TREADLE_RETURN_IF_ERROR(ReadDecoder());
    TREADLE_RETURN_IF_ERROR(ReadPostProcessor());
    TREADLE_RETURN_IF_ERROR(ReadConfig());
    TREADLE_RETURN_IF_ERROR(ReadGenerationConfig());
    return std::move(spec_);
  }

 private:
  absl::Status Unknown(const char* field, const Json& found, std::string_view expected) const {
    return Unimplemented(file_, ": ", field, " is ", Excerpt(found), ", expected ", expected);
  }

  absl::Status SetToken(const Json& id, const std::string& text, TokenKind kind) {
    const auto most = static_cast<int64_t>(2 * named_ + kSpareIds) - 1;
    if (!IntegerIn(id, 0, most)) {
      return InvalidArgument(file_, ": token ", Quoted(text), " has id ", Excerpt(id),
                             ", expected 0 to ", most, " for ", named_, " tokens");
    }
    const auto at = id.get<size_t>();
    if (at >= spec_.tokens.size()) spec_.tokens.resize(at + 1, {"", 0, TokenKind::kUnused});
    TokenizerSpec::Token& token = spec_.tokens[at];
    if (token.kind != TokenKind::kUnused && token.text != text) {
      return InvalidArgument(file_, ": id ", at, " is both ", Quoted(token.text), " and ",
                             Quoted(text));
    }
    token.text = text;
    token.kind = kind;
    ids_[text] = static_cast<int32_t>(at);
    return absl::OkStatus();
  }

  absl::Status ReadModel();
  absl::Status ReadMerges(const Json& merges);
  absl::Status ReadAddedTokens();
  absl::Status ReadPattern();
  absl::Status ReadSpaces();
  absl::Status ReadDecoder();
  absl::Status ReadPostProcessor();
  absl::Status ReadTemplate(const Json& step);
  absl::Status ReadConfig();
  absl::Status ReadGenerationConfig();
  absl::StatusOr<int32_t> NamedToken(const Json& config, const char* name) const;

  FolderFiles& files_;
  const bool tiktoken_;
  const std::string file_;
  Json root_;
  TokenizerSpec spec_;
  size_t named_ = 0;  // tokens that the file lists
  std::unordered_map<std::string, int32_t> ids_;
};

absl::Status Reader::ReadModel() {
  const Json& model = Member(root_, "model");
  const std::string type = TypeOf(model);
  if (type != "BPE" && !(type.empty() && Member(model, "merges").is_array())) {
    return Unimplemented(file_, ": model.type is '", type, "', expected 'BPE'");
  }
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Member(model, name);
    if (!value.is_null() && value != "") return Unknown(name, value, "none");
  }
  const bool byte_fallback = IsTrue(Member(model, "byte_fallback"));
  spec_.model =
      byte_fallback ? TokenizerSpec::Model::kSentencePiece : TokenizerSpec::Model::kByteLevelBpe;
  spec_.ignore_merges = IsTrue(Member(model, "ignore_merges"));
  if (byte_fallback && spec_.ignore_merges) {
    return Unknown("model.ignore_merges", true, "false with byte_fallback");
  }
  const Json& vocabulary = Member(model, "vocab");
  if (!vocabulary.is_object()) return InvalidArgument(file_, ": model.vocab is not an object");
  named_ = vocabulary.size() + Member(root_, "added_tokens").size();
  for (const auto& [text, id] : vocabulary.items()) {
    const bool byte = byte_fallback && text.size() == 6 && text.starts_with("<0x");
    TREADLE_RETURN_IF_ERROR(SetToken(id, text, byte ? TokenKind::kByte : TokenKind::kNormal));
  }
  const Json& unknown = Member(model, "unk_token");
  if (unknown.is_string() && ids_.contains(unknown.get<std::string>())) {
    spec_.unknown = ids_[unknown.get<std::string>()];
    spec_.tokens[static_cast<size_t>(spec_.unknown)].kind = TokenKind::kUnknown;
  }
  return ReadMerges(Member(model, "merges"));
}

// "a b" in older files, ["a", "b"] in newer ones.
absl::Status Reader::ReadMerges(const Json& merges) {
  if (!merges.is_array()) return InvalidArgument(file_, ": model.merges is not a list");
  spec_.merges.reserve(merges.size());
  for (const Json& merge : merges) {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      spec_.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    const std::string text = merge.is_string() ? merge.get<std::string>() : "";
    const size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      return InvalidArgument(file_, ": model.merges[", spec_.merges.size(), "] is ", Excerpt(merge),
                             ", expected \"a b\" or [\"a\", \"b\"]");
    }
    spec_.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadAddedTokens() {
  for (const Json& added : Member(root_, "added_tokens")) {
    const Json& content = Member(added, "content");
    if (!content.is_string()) {
      return InvalidArgument(file_, ": added_tokens holds ", Excerpt(added),
                             ", expected an object with \"content\"");
    }
    const auto text = content.get<std::string>();
    TokenKind kind =
        IsTrue(Member(added, "special")) ? TokenKind::kControl : TokenKind::kUserDefined;
    if (spec_.unknown >= 0 && text == spec_.tokens[static_cast<size_t>(spec_.unknown)].text) {
      kind = TokenKind::kUnknown;
    }
    const bool outside_model = !ids_.contains(text);
    TREADLE_RETURN_IF_ERROR(SetToken(Member(added, "id"), text, kind));
    TokenizerSpec::Token& token = spec_.tokens[static_cast<size_t>(ids_[text])];
    token.trim_left = IsTrue(Member(added, "lstrip"));
    token.trim_right = IsTrue(Member(added, "rstrip"));
    token.single_word = IsTrue(Member(added, "single_word"));
    token.normalized = IsTrue(Member(added, "normalized"));
    token.outside_model = outside_model;
  }
  return absl::OkStatus();
}

// Byte-level: the pre-tokenizer that cuts by the same patterns.
absl::Status Reader::ReadPattern() {
  const Json& found = Member(root_, "pre_tokenizer");
  std::vector<std::string> patterns;
  bool known = true, byte_level = false;
  for (const Json& step : Steps(found, "pretokenizers")) {
    const std::string type = TypeOf(step);
    const Json& regex = Member(Member(step, "pattern"), "Regex");
    known = known && !byte_level;  // which comes last
    if (type == "ByteLevel" && !IsTrue(Member(step, "add_prefix_space"))) {
      byte_level = true;
      const Json& use_regex = Member(step, "use_regex");
      if (use_regex.is_null() || IsTrue(use_regex)) patterns.emplace_back(kGpt2Pattern);
    } else if (type == "Digits" && IsTrue(Member(step, "individual_digits"))) {
      patterns.emplace_back(R"(\p{N})");
    } else if (type == "Split" && regex.is_string() && Member(step, "behavior") == "Isolated" &&
               !IsTrue(Member(step, "invert"))) {
      patterns.push_back(regex.get<std::string>());
    } else {
      known = false;
    }
  }
  const Json& normalizer = Member(root_, "normalizer");
  const std::vector<std::string> normalizers = TypesOf(Steps(normalizer, "normalizers"));
  const bool nfc = normalizers == std::vector<std::string>{"NFC"};
  const PreTokenizerRow* row = nullptr;
  if (found == Json::parse(kFalconPreTokenizer)) {
    TREADLE_ASSIGN_OR_RETURN(row, FindPreTokenizer("falcon"));
  } else if (known && byte_level) {
    row = PreTokenizerOf(patterns, nfc, spec_.ignore_merges);
  }
  if (row == nullptr) {
    return Unknown("pre_tokenizer", found,
                   "Digits or Splits by the patterns of a known model, then ByteLevel without a "
                   "prefix space; or Falcon's four steps");
  }
  if (nfc != row->nfc || (!nfc && !normalizers.empty())) {
    return Unknown("normalizer", normalizer, row->nfc ? "NFC" : "none");
  }
  spec_.pre_tokenizer = row->name;
  return absl::OkStatus();
}

// SentencePiece: where the dummy space goes.
absl::Status Reader::ReadSpaces() {
  const Json& normalizer = Member(root_, "normalizer");
  const Json& pre_tokenizer = Member(root_, "pre_tokenizer");
  const auto replaces = [](const Json& step) {
    return TypeOf(step) == "Replace" && Member(Member(step, "pattern"), "String") == " " &&
           Member(step, "content") == kSpace;
  };
  const std::vector<Json> steps = Steps(normalizer, "normalizers");
  // Gemma's cuts text at spaces, of which its normalizer leaves none.
  const bool cuts_nothing =
      pre_tokenizer.is_null() || (TypeOf(pre_tokenizer) == "Split" &&
                                  Member(Member(pre_tokenizer, "pattern"), "String") == " ");
  if (!steps.empty() && cuts_nothing && replaces(steps.back())) {
    const bool prepends =
        steps.size() == 2 && TypeOf(steps[0]) == "Prepend" && Member(steps[0], "prepend") == kSpace;
    if (steps.size() == 1 || prepends) {
      spec_.add_space_prefix = prepends;
      return absl::OkStatus();
    }
  }
  const Json& scheme = Member(pre_tokenizer, "prepend_scheme");
  const bool known = scheme == "always" || scheme == "first" || scheme == "never";
  if (steps.empty() && TypeOf(pre_tokenizer) == "Metaspace" && known &&
      Member(pre_tokenizer, "replacement") == kSpace && Member(pre_tokenizer, "split") == false) {
    spec_.add_space_prefix = scheme != "never";
    spec_.space_prefix_at_start_only = scheme == "first";
    spec_.space_prefix_if_missing = true;
    return absl::OkStatus();
  }
  return Unknown("normalizer and pre_tokenizer", Json{normalizer, pre_tokenizer},
                 "[Prepend U+2581,] Replace ' ' by U+2581 and no pre_tokenizer, or no normalizer "
                 "and Metaspace with prepend_scheme and \"split\": false");
}

absl::Status Reader::ReadDecoder() {
  const Json& decoder = Member(root_, "decoder");
  const std::vector<std::string> types = TypesOf(Steps(decoder, "decoders"));
  std::vector<std::string> expected = {"ByteLevel"};
  if (spec_.model == TokenizerSpec::Model::kSentencePiece) {
    expected = {"Replace", "ByteFallback", "Fuse"};
    if (spec_.add_space_prefix) expected.push_back("Strip");
  }
  if (types == expected) return absl::OkStatus();
  std::string names;
  for (const std::string& name : expected) names += (names.empty() ? "" : ", ") + name;
  return Unknown("decoder", decoder, names);
}

absl::Status Reader::ReadPostProcessor() {
  const Json& found = Member(root_, "post_processor");
  for (const Json& step : Steps(found, "processors")) {
    if (TypeOf(step) == "ByteLevel") continue;  // only moves offsets, which nobody asks for here
    if (TypeOf(step) != "TemplateProcessing") {
      return Unknown("post_processor", found, "TemplateProcessing, ByteLevel or none");
    }
    TREADLE_RETURN_IF_ERROR(ReadTemplate(step));
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadTemplate(const Json& step) {
  const Json& single = Member(step, "single");
  bool before = true;
  for (const Json& item : single) {
    if (item.is_object() && item.contains("Sequence")) {
      before = false;
      continue;
    }
    const Json& name = Member(Member(item, "SpecialToken"), "id");
    const auto id = name.is_string() ? ids_.find(name.get<std::string>()) : ids_.end();
    bool& adds = before ? spec_.add_bos : spec_.add_eos;
    if (id == ids_.end() || adds) {
      return Unknown("post_processor.single", single,
                     "at most one known special token before the sequence and one after it");
    }
    adds = true;
    (before ? spec_.bos : spec_.eos) = id->second;
  }
  return absl::OkStatus();
}

// A special token's entry is its text, or an object that holds it; -1 if there is none.
absl::StatusOr<int32_t> Reader::NamedToken(const Json& config, const char* name) const {
  const Json& entry = Member(config, name);
  const Json& text = entry.is_object() ? Member(entry, "content") : entry;
  if (!text.is_string()) return -1;
  const auto id = ids_.find(text.get<std::string>());
  if (id != ids_.end()) return id->second;
  return InvalidArgument(files_.path(), ": ", name, " is '", text.get<std::string>(),
                         "', which is not in the vocabulary");
}

absl::Status Reader::ReadConfig() {
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"}) {
    if (!files_.Has(file)) continue;
    TREADLE_ASSIGN_OR_RETURN(const Json config, files_.Json(file));
    const std::pair<const char*, int32_t*> names[] = {
        {"bos_token", &spec_.bos}, {"eos_token", &spec_.eos}, {"pad_token", &spec_.padding}};
    for (const auto& [name, id] : names) {
      if (*id >= 0) continue;
      TREADLE_ASSIGN_OR_RETURN(*id, NamedToken(config, name));
    }
    // An explicit wish outranks the template, as in the authors' Llama tokenizer.
    const Json& add_bos = Member(config, "add_bos_token");
    const Json& add_eos = Member(config, "add_eos_token");
    if (add_bos.is_boolean()) spec_.add_bos = add_bos.get<bool>() && spec_.bos >= 0;
    if (add_eos.is_boolean()) spec_.add_eos = add_eos.get<bool>() && spec_.eos >= 0;
  }
  if (spec_.eos >= 0) spec_.end_ids = {spec_.eos};
  return absl::OkStatus();
}

absl::Status Reader::ReadGenerationConfig() {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                           ReadEndIds(files_, static_cast<int64_t>(spec_.tokens.size())));
  for (const int32_t id : ids) {
    if (spec_.eos < 0) spec_.eos = id;
    if (!std::ranges::count(spec_.end_ids, id)) spec_.end_ids.push_back(id);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ReadEndIds(FolderFiles& files, int64_t vocab) {
  for (const char* file : {"generation_config.json", "config.json"}) {
    TREADLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, EndIdsIn(files, file, vocab));
    if (!ids.empty()) return ids;
  }
  return std::vector<int32_t>();
}

absl::StatusOr<TokenizerSpec> ReadTokenizerJson(FolderFiles& files) { return Reader(files).Read(); }

}  // namespace treadle
