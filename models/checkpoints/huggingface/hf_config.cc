// config.json of a Hugging Face folder -> ModelConfig.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/json_file.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/huggingface/hf_quantization.h"
#include "models/checkpoints/huggingface/hf_rope.h"
#include "models/checkpoints/huggingface/json_fields.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// "layer_types", where it is there, says which layers are local: all but the first ones, or, if
// `periodic`, but for one at regular distances.
absl::Status ReadLayerTypes(const JsonFields& fields, bool periodic, ModelConfig& config) {
  constexpr const char* kName = "layer_types";
  if (!fields.Has(kName)) return absl::OkStatus();
  const Json& types = fields.At(kName);
  if (types.is_array() && std::ssize(types) == config.layers) {
    const char* const found = periodic ? "full_attention" : "sliding_attention";
    const int64_t first = std::find(types.begin(), types.end(), found) - types.begin();
    (periodic ? config.global_every : config.global_layers) = first + (periodic ? 1 : 0);
    Json expected = Json::array();
    for (int64_t i = 0; i < config.layers; ++i) {
      expected.push_back(config.Local(i) ? "sliding_attention" : "full_attention");
    }
    if (types == expected) return absl::OkStatus();
  }
  return fields.Wrong(
      kName, Str("\"sliding_attention\" of ", config.layers, " layers, but for \"full_attention\" ",
                 periodic ? "at regular distances" : "of the first ones"));
}

// Reads which layers see a window. For Gemma that is among its sizes.
absl::Status ReadWindow(const JsonFields& fields, const Architecture& architecture,
                        ModelConfig& config) {
  if (architecture.local_layers == Presence::kAlways) {
    return ReadLayerTypes(fields, /*periodic=*/true, config);
  }
  const char* const window_switch = architecture.config_json.window_switch;
  bool window = true;
  if (window_switch != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(window, fields.Bool(window_switch, false));
  }
  if (!window || !fields.Has("sliding_window")) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(config.window, fields.Integer("sliding_window"));
  if (architecture.local_layers == Presence::kAsStored) {
    return ReadLayerTypes(fields, /*periodic=*/true, config);
  }
  if (window_switch == nullptr) return absl::OkStatus();
  constexpr int64_t kOtherwise = 28;  // transformers'
  TREADLE_ASSIGN_OR_RETURN(config.global_layers,
                           fields.Integer("max_window_layers", kOtherwise, 0));
  return ReadLayerTypes(fields, /*periodic=*/false, config);
}

// "no_rope_layers", where it is there: 1 for each layer that rotates, 0 for one that does not.
absl::Status ReadRotatingLayers(const JsonFields& fields, ModelConfig& config) {
  constexpr const char* kName = "no_rope_layers";
  if (!fields.Has(kName)) return absl::OkStatus();
  std::vector<bool> unrotated;
  if (fields.At(kName).empty()) return absl::OkStatus();  // as where it is missing
  for (const Json& rotates : fields.At(kName)) unrotated.push_back(rotates == 0);
  const std::optional<int64_t> period = PeriodOf(unrotated);
  if (!period || std::ssize(unrotated) != config.layers) {
    return fields.Wrong(kName, Str("a number for each of ", config.layers,
                                   " layers, 0 at regular distances and 1 elsewhere"));
  }
  config.unrotated_every = *period;
  return absl::OkStatus();
}

// Which layers keep a state: as "layer_types" or "full_attn_idxs" says, or, by the delta rule, all
// but those at regular distances.
absl::Status ReadStateLayers(const JsonFields& fields, const Architecture& architecture,
                             ModelConfig& config) {
  constexpr const char *kTypes = "layer_types", *kAttending = "full_attn_idxs";
  const char* const network = architecture.experts ? ", \"moe\"" : ", \"mlp\"";
  const Json &types = fields.At(kTypes), &attending = fields.At(kAttending);
  bool known = types.is_array() && std::ssize(types) == config.layers;
  if (known) {
    for (int64_t i = 0; i < config.layers; ++i) {
      const Json& type = types[static_cast<size_t>(i)];
      if (type == "attention" || type == "full_attention") continue;
      if (architecture.one_block && type == (architecture.experts ? "moe" : "mlp")) {
        config.ffn_layers.push_back(static_cast<double>(i));
        continue;
      }
      known &= type == "linear_attention" || type == "mamba" || type == "conv";
      config.state_layers.push_back(static_cast<double>(i));
    }
  } else if (const int64_t layers = std::min<int64_t>(config.layers, 1 << 12);
             types.is_null() && attending.is_array()) {
    for (int64_t i = 0; i < layers; ++i) {
      if (std::find(attending.begin(), attending.end(), i) != attending.end()) continue;
      config.state_layers.push_back(static_cast<double>(i));
    }
    known = true;
  } else if (types.is_null() && architecture.states == StateKind::kDeltaRule) {
    TREADLE_ASSIGN_OR_RETURN(const int64_t every,
                             fields.Integer("full_attention_interval", kAttentionEvery));
    for (int64_t i = 0; i < layers; ++i) {
      if ((i + 1) % every != 0) config.state_layers.push_back(static_cast<double>(i));
    }
    known = true;
  }
  if (known) return absl::OkStatus();
  return fields.Wrong(kTypes, Str("\"full_attention\"", architecture.one_block ? network : "",
                                  " or what keeps a state (\"linear_attention\", ",
                                  "\"mamba\", \"conv\") of each of ", config.layers, " layers"));
}

// Steps of Mamba 2 that have other bounds than 0 and infinity, which transformers writes as an
// object.
absl::Status CheckSteps(const JsonFields& fields) {
  constexpr const char* kName = "time_step_limit";
  const Json& limits = fields.At(kName);
  const bool none = limits.is_array() && limits.size() == 2 && limits[0] == 0 &&
                    limits[1].is_object() && limits[1].value("__float__", Json()) == "Infinity";
  return limits.is_null() || none ? absl::OkStatus() : fields.Wrong(kName, "no limit");
}

// The feed-forward size of LFM2, which follows from what the file says.
absl::Status AdjustFeedForward(const JsonFields& fields, ModelConfig& config) {
  TREADLE_ASSIGN_OR_RETURN(const bool adjusts, fields.Bool("block_auto_adjust_ff_dim", true));
  if (!adjusts) return absl::OkStatus();
  constexpr const char* kFactor = "block_ffn_dim_multiplier";
  TREADLE_ASSIGN_OR_RETURN(const double factor, fields.Number(kFactor, 1.0));
  TREADLE_ASSIGN_OR_RETURN(const int64_t unit, fields.Integer("block_multiple_of", 256));
  if (!(factor > 0 && factor <= 1000)) return fields.Wrong(kFactor, "more than 0, at most 1000");
  const auto two_thirds = static_cast<double>(2 * config.ffn_hidden / 3);
  config.ffn_hidden = (static_cast<int64_t>(factor * two_thirds) + unit - 1) / unit * unit;
  return absl::OkStatus();
}

// "moe_layers", where it is there: the last of every so many layers, as the step between them says.
// Queries grow unless "attn_temperature_tuning" says no.
absl::Status ReadLlama4(const JsonFields& fields, ModelConfig& config) {
  constexpr const char *kLayers = "moe_layers", *kTuning = "attn_temperature_tuning";
  const Json& tuning = fields.At(kTuning);
  if (tuning == false || tuning == 0) config.query_beta = 0;
  Json expected = Json::array();
  for (int64_t i = 0; i < std::min<int64_t>(config.layers, 1 << 12); ++i) {
    if (config.Mixes(i)) expected.push_back(i);
  }
  if (!fields.Has(kLayers) || fields.At(kLayers) == expected) return absl::OkStatus();
  return fields.Wrong(kLayers, Str("the last of every ", config.mixed_every, " layers"));
}

// Whether positions rotate Q and K, in a family that may do without.
absl::Status ReadRotation(const JsonFields& fields, ModelConfig& config) {
  constexpr const char* kName = "position_embedding_type";
  const Json& type = fields.At(kName);
  if (type == "rope") return absl::OkStatus();
  config.unrotated_every = 1;
  return type.is_null() || type == "nope" ? absl::OkStatus()
                                          : fields.Wrong(kName, "\"rope\" or \"nope\"");
}

// "mlp_layer_types", where it is there: which layers have experts, all but the first ones.
// DeepSeek V2's "greedy" looks at all groups of them.
absl::Status ReadExpertLayers(const JsonFields& fields, ModelConfig& config) {
  constexpr const char* kName = "mlp_layer_types";
  if (fields.At("topk_method") == "greedy") config.expert_groups = config.used_expert_groups = 1;
  if (!fields.Has(kName)) return absl::OkStatus();
  const Json& types = fields.At(kName);
  if (types.is_array() && std::ssize(types) == config.layers) {
    config.dense_layers = std::find(types.begin(), types.end(), "sparse") - types.begin();
    Json expected = Json::array();
    for (int64_t i = 0; i < config.layers; ++i) {
      expected.push_back(config.Mixes(i) ? "sparse" : "dense");
    }
    if (types == expected) return absl::OkStatus();
  }
  return fields.Wrong(kName,
                      Str("\"dense\" of the first of ", config.layers, " layers, then \"sparse\""));
}

absl::Status ReadFields(const JsonFields& fields, const Architecture& architecture, HfConfig& out) {
  ModelConfig& config = out.config;
  const ConfigJson& json = architecture.config_json;
  config.architecture = architecture.name;
  if (architecture.local_base) config.local_rope_base = kLocalRopeBase;
  if (architecture.chunked) {
    config.attention_chunk = kChunk;
    config.query_floor = kQueryFloor;
    config.query_beta = kOwnQueryBeta;
  }
  for (const ConfigField<ModelConfig>& field : FieldsOf<ModelConfig>()) {
    const JsonField said = JsonFieldOf(architecture, field);
    SetDefault(field, said.otherwise, config);
    if (said.name == nullptr || (said.counts != nullptr && !(config.*said.counts))) continue;
    const bool also = said.also != nullptr && !fields.Has(said.name) && fields.Has(said.also);
    TREADLE_RETURN_IF_ERROR(ReadField(field, fields, also ? said.also : said.name, config));
  }
  for (const JsonField& field : json.repeated) {
    const auto size = std::get<int64_t ModelConfig::*>(field.member);
    TREADLE_RETURN_IF_ERROR(fields.Only(field.name, config.*size));
  }
  double epsilon = json.default_epsilon;
  if (json.epsilon != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(epsilon, fields.Number(json.epsilon, epsilon));
  }
  config.norm_epsilon = static_cast<float>(epsilon);
  TREADLE_ASSIGN_OR_RETURN(config.tied_head, fields.Bool("tie_word_embeddings", json.tied_head));
  bool stored_bias = false;
  if (architecture.qkv_bias == Presence::kAsStored) {
    TREADLE_ASSIGN_OR_RETURN(stored_bias, fields.Bool("attention_bias", false));
  }
  config.qkv_bias = architecture.qkv_bias == Presence::kAlways || stored_bias;
  config.output_bias = architecture.output_bias == Presence::kAlways ||
                       (architecture.output_bias == Presence::kAsStored && stored_bias);
  for (const FixedField& field : json.fixed) {
    if (field.required && !fields.Has(field.name)) return fields.Wrong(field.name, field.json);
    TREADLE_RETURN_IF_ERROR(fields.Only(field.name, Json::parse(field.json)));
  }
  const bool states = architecture.states != StateKind::kNone;
  if (states) TREADLE_RETURN_IF_ERROR(ReadStateLayers(fields, architecture, config));
  if (architecture.states == StateKind::kMamba2) TREADLE_RETURN_IF_ERROR(CheckSteps(fields));
  if (architecture.states == StateKind::kConvolution && !architecture.experts) {
    TREADLE_RETURN_IF_ERROR(AdjustFeedForward(fields, config));
  }
  if (architecture.chunked) TREADLE_RETURN_IF_ERROR(ReadLlama4(fields, config));
  if (architecture.grouped_experts) TREADLE_RETURN_IF_ERROR(ReadExpertLayers(fields, config));
  for (const Json& type : fields.At("layer_types")) {
    if (states) break;
    if (type != "attention" && type != "full_attention" && type != "sliding_attention" &&
        !(architecture.chunked && type == "chunked_attention")) {
      return fields.Wrong("layer_types", "attention in every layer");
    }
  }
  if (!architecture.rotary) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(ReadHfRope(fields, json, config));
  TREADLE_RETURN_IF_ERROR(ReadWindow(fields, architecture, config));
  TREADLE_RETURN_IF_ERROR(ReadRotatingLayers(fields, config));
  if (architecture.may_not_rotate) TREADLE_RETURN_IF_ERROR(ReadRotation(fields, config));
  CompleteConfig(config);
  return absl::OkStatus();
}

// A model of several kinds of input says what is of text in "text_config", which is all that is
// read. transformers from 5.20 on writes sizes of global layers in an object for each layer.
void LiftTextConfig(Json& json) {
  if (const Json text = json.value("text_config", Json()); text.is_object()) {
    const Json names = json.value("architectures", Json());
    for (const char* const name : {"quantization_config", "tie_word_embeddings"}) {
      if (json.contains(name) && !text.contains(name)) json["text_config"][name] = json[name];
    }
    json = Json(json["text_config"]);
    json["architectures"] = names;
  }
  // Tokens of images see each other, those of text what is before them.
  if (json.value("use_bidirectional_attention", Json()) == "vision") {
    json.erase("use_bidirectional_attention");
  }
  const Json types = json.value("layer_types", Json());
  const Json layers = json.value("per_layer_config", Json());
  const auto global = std::find(types.begin(), types.end(), "full_attention");
  if (!types.is_array() || !layers.is_object() || global == types.end()) return;
  const Json own = layers.value(std::to_string(global - types.begin()), Json());
  for (const auto& [name, lifted] :
       {std::pair("head_dim", "global_head_dim"),
        std::pair("num_key_value_heads", "num_global_key_value_heads")}) {
    if (own.is_object() && own.contains(name)) json[lifted] = own[name];
  }
}

// The layers of Nemotron-H, which files say by a letter each or by names of their own, as
// "layer_types"; where these are missing, the number of layers follows.
void LiftLayerTypes(Json& json) {
  constexpr std::pair<char, const char*> kLetters[] = {
      {'M', "mamba"}, {'*', "attention"}, {'-', "mlp"}, {'E', "moe"}};
  const Json letters = json.value("hybrid_override_pattern", Json());
  Json types = json.value("layers_block_type", Json());
  if (letters.is_string()) {
    types = Json::array();
    for (const char letter : letters.get<std::string>()) {
      const auto* const known =
          std::ranges::find(kLetters, letter, [](auto row) { return row.first; });
      types.push_back(known == std::end(kLetters) ? Json(std::string(1, letter)) : known->second);
    }
  }
  if (!types.is_array()) return;
  if (!json.contains("num_hidden_layers")) json["num_hidden_layers"] = types.size();
  json["layer_types"] = std::move(types);
}

// Whether this is the description of the class for such layers: of one class there may be several.
bool Describes(const Architecture& architecture, const JsonFields& fields) {
  const Json& experts = fields.At("num_local_experts");
  bool states = false, moe = false;
  for (const Json& type : fields.At("layer_types")) {
    states |= type == "mamba" || type == "linear_attention";
    moe |= type == "moe";
  }
  const bool mixes =
      moe || (experts.is_number() && experts > 0) || fields.At("enable_moe_block") == true;
  return architecture.experts == mixes &&
         (architecture.one_block || (architecture.states != StateKind::kNone) == states);
}

}  // namespace

absl::StatusOr<HfConfig> ReadHfConfig(const MappedFile& config_json) {
  const std::string& path = config_json.path();
  TREADLE_ASSIGN_OR_RETURN(Json json, ParseJsonFile(config_json));
  LiftTextConfig(json);
  LiftLayerTypes(json);
  const JsonFields fields(json, path);
  const Json& names = fields.At("architectures");
  HfConfig out;
  std::string known;
  const Architecture* found = nullptr;
  for (const Architecture& architecture : Architectures()) {
    for (const std::string_view name : architecture.config_json.classes) {
      if (known.find(name) == known.npos) known += Str(known.empty() ? "" : ", ", name);
      if (!names.is_array() || names.size() != 1 || names[0] != name) continue;
      if (found == nullptr || Describes(architecture, fields)) found = &architecture;
    }
  }
  if (found == nullptr) {
    return Unimplemented(path, ": architectures is ", JsonText(names), ", expected one of ", known);
  }
  TREADLE_RETURN_IF_ERROR(ReadFields(fields, *found, out));
  TREADLE_ASSIGN_OR_RETURN(out.quantization, ReadHfQuantization(json, path));
  return out;
}

}  // namespace treadle
