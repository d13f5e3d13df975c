#include <nlohmann/json.hpp>
#include <utility>

#include "models/text/pre_tokenizer.h"
#include "models/text/tokenizer_json.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

Json ByteLevel(bool splits) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", splits}};
}

Json PreTokenizerJson(const PreTokenizerRow& row) {
  if (row.splits == "falcon") return Json::parse(kFalconPreTokenizer);
  Json steps = Json::array();
  std::vector<std::string> patterns = SplitPatterns(row);
  const bool splits = patterns.back() == kGpt2Pattern;  // which ByteLevel does by itself
  if (splits) patterns.pop_back();
  for (const std::string& pattern : patterns) {
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", pattern}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back(ByteLevel(splits));
  if (steps.size() == 1) return steps[0];
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Special tokens around the text, as the model wants them.
Json PostProcessorJson(const TokenizerSpec& spec) {
  const bool bos = spec.add_bos && spec.bos >= 0;
  const bool eos = spec.add_eos && spec.eos >= 0;
  if (!bos && !eos) return nullptr;
  Json single = Json::array(), pair = Json::array(), special = Json::object();
  const auto add_special = [&](int32_t id) {
    const std::string& text = spec.tokens[static_cast<size_t>(id)].text;
    for (Json* list : {&single, &pair}) {
      list->push_back({{"SpecialToken", {{"id", text}, {"type_id", 0}}}});
    }
    special[text] = {{"id", text}, {"ids", Json::array({id})}, {"tokens", Json::array({text})}};
  };
  if (bos) add_special(spec.bos);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  pair.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 0}}}});
  if (eos) add_special(spec.eos);
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", pair},
          {"special_tokens", special}};
}

Json TokenizerJson(const TokenizerSpec& spec, const PreTokenizerRow& row) {
  Json vocabulary = Json::object(), added = Json::array(), merges = Json::array();
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    const TokenizerSpec::Token& token = spec.tokens[id];
    vocabulary[token.text] = id;
    const bool special = token.kind == TokenKind::kControl || token.kind == TokenKind::kUnknown;
    if (!special && token.kind != TokenKind::kUserDefined) continue;
    added.push_back({{"id", id},
                     {"content", token.text},
                     {"single_word", token.single_word},
                     {"lstrip", token.trim_left},
                     {"rstrip", token.trim_right},
                     {"normalized", token.normalized},
                     {"special", special}});
  }
  for (const auto& [left, right] : spec.merges) merges.push_back(Json::array({left, right}));
  Json normalizer = nullptr;
  if (row.nfc) normalizer = {{"type", "NFC"}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", normalizer},
          {"pre_tokenizer", PreTokenizerJson(row)},
          {"post_processor", PostProcessorJson(spec)},
          {"decoder", ByteLevel(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", spec.ignore_merges},
            {"vocab", vocabulary},
            {"merges", merges}}}};
}

Json ConfigJson(const TokenizerSpec& spec, const std::string& chat_template, int64_t context) {
  Json json = {{"tokenizer_class", "PreTrainedTokenizerFast"},
               {"clean_up_tokenization_spaces", false},
               {"model_max_length", context},
               {"add_bos_token", spec.add_bos},
               {"add_eos_token", spec.add_eos}};
  const std::pair<const char*, int32_t> names[] = {{"bos_token", spec.bos},
                                                   {"eos_token", spec.eos},
                                                   {"unk_token", spec.unknown},
                                                   {"pad_token", spec.padding}};
  for (const auto& [name, id] : names) {
    if (id >= 0) json[name] = spec.tokens[static_cast<size_t>(id)].text;
  }
  if (!chat_template.empty()) json["chat_template"] = chat_template;
  return json;
}

Json GenerationJson(const TokenizerSpec& spec) {
  Json json = Json::object();
  if (spec.bos >= 0) json["bos_token_id"] = spec.bos;
  if (!spec.end_ids.empty()) json["eos_token_id"] = spec.end_ids;
  if (spec.padding >= 0) json["pad_token_id"] = spec.padding;
  return json;
}

std::string Text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::map<std::string, std::string> TokenizerJsonFiles(const TokenizerSpec& spec,
                                                      const std::string& chat_template,
                                                      int64_t context) {
  if (spec.model != TokenizerSpec::Model::kByteLevelBpe) return {};
  const auto row = FindPreTokenizer(spec.pre_tokenizer);
  if (!row.ok()) return {};  // no tokenizer was made of it either
  return {{"tokenizer.json", Text(TokenizerJson(spec, **row))},
          {"tokenizer_config.json", Text(ConfigJson(spec, chat_template, context))},
          {"generation_config.json", Text(GenerationJson(spec))}};
}

}  // namespace treadle
