// config.json of a Hugging Face folder -> ModelConfig.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/json_file.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/huggingface/hf_quantization.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// A value as an error message shows it: on one line, and only so much of it.
std::string Text(const Json& value) {
  constexpr size_t kLongest = 100;
  const std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  return text.size() > kLongest ? text.substr(0, kLongest) + "..." : text;
}

bool IsFinite(const Json& value) { return value.is_number() && std::isfinite(value.get<double>()); }

// Typed access to one JSON object, with errors that name file and field.
class Fields {
 public:
  Fields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {}

  const Json& At(const std::string& name) const {
    static const Json null;
    const auto found = json_.find(name);
    return found == json_.end() ? null : *found;
  }
  bool Has(const std::string& name) const { return !At(name).is_null(); }

  template <typename Value>
  absl::Status Wrong(const std::string& name, const Value& expected) const {
    const Json& found = At(name);
    return InvalidArgument(path_, ": ", name, " is ", found.is_null() ? "missing" : Text(found),
                           ", expected ", expected);
  }

  absl::StatusOr<int64_t> Integer(const std::string& name, std::optional<int64_t> otherwise = {},
                                  int64_t least = 1) const {
    const Json& value = At(name);
    if (value.is_null() && otherwise) return *otherwise;
    if (IntegerIn(value, least, int64_t{1} << 40)) return value.get<int64_t>();
    return Wrong(name, least > 0 ? "a positive integer" : "a positive integer or 0");
  }
  absl::StatusOr<double> Number(const std::string& name,
                                std::optional<double> otherwise = {}) const {
    const Json& value = At(name);
    if (value.is_null() && otherwise) return *otherwise;
    if (IsFinite(value)) return value.get<double>();
    return Wrong(name, "a number");
  }
  absl::StatusOr<std::vector<double>> Numbers(const std::string& name, int64_t count) const {
    const Json& value = At(name);
    if (value.is_array() && std::ssize(value) == count && std::ranges::all_of(value, IsFinite)) {
      return value.get<std::vector<double>>();
    }
    return Wrong(name, Str("a list of ", count, " numbers"));
  }
  absl::StatusOr<bool> Bool(const std::string& name, bool otherwise) const {
    const Json& value = At(name);
    if (value.is_null()) return otherwise;
    if (value.is_boolean()) return value.get<bool>();
    return Wrong(name, "true or false");
  }
  // The field must be missing, null or `expected`.
  absl::Status Only(const std::string& name, const Json& expected) const {
    if (!Has(name) || At(name) == expected) return absl::OkStatus();
    return Wrong(name, expected.dump());
  }

  const std::string& path() const { return path_; }

 private:
  const Json& json_;
  const std::string path_;
};

// "layer_types", where it is there, says which layers are local: all but the first ones, or, if
// `periodic`, but for one at regular distances.
absl::Status ReadLayerTypes(const Fields& fields, bool periodic, ModelConfig& config) {
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
absl::Status ReadWindow(const Fields& fields, const Architecture& architecture,
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

// The share of a head that rotates, as transformers rounds it.
absl::Status ReadRotaryShare(const Fields& fields, const char* name, double& share,
                             ModelConfig& config) {
  TREADLE_ASSIGN_OR_RETURN(share, fields.Number(name, share));
  if (!(share > 0 && share <= 1)) return fields.Wrong(name, "more than 0, at most 1");
  config.rope_dim = static_cast<int64_t>(static_cast<double>(config.head_dim) * share);
  return absl::OkStatus();
}

// "longrope": as transformers works out what the file leaves out.
absl::Status ReadLongRope(const Fields& fields, const Fields& rope, ModelConfig& config) {
  LongRope& out = config.long_rope.emplace();
  TREADLE_ASSIGN_OR_RETURN(out.short_factors, rope.Numbers("short_factor", config.rope_dim / 2));
  TREADLE_ASSIGN_OR_RETURN(out.long_factors, rope.Numbers("long_factor", config.rope_dim / 2));
  const char* const original = "original_max_position_embeddings";
  TREADLE_ASSIGN_OR_RETURN(out.original_context,
                           (rope.Has(original) ? rope : fields).Integer(original));
  const auto before = static_cast<double>(out.original_context);
  double factor = static_cast<double>(config.context) / before;
  TREADLE_ASSIGN_OR_RETURN(factor, rope.Number("factor", factor));
  if (factor > 1) out.attention_factor = std::sqrt(1 + std::log(factor) / std::log(before));
  TREADLE_ASSIGN_OR_RETURN(out.attention_factor,
                           rope.Number("attention_factor", out.attention_factor));
  return absl::OkStatus();
}

// "yarn": likewise.
absl::Status ReadYarn(const Fields& fields, const Fields& rope, ModelConfig& config) {
  Yarn& out = config.yarn.emplace();
  const char* const original = "original_max_position_embeddings";
  TREADLE_ASSIGN_OR_RETURN(out.original_context,
                           (rope.Has(original) ? rope : fields).Integer(original, config.context));
  const double longer =
      static_cast<double>(config.context) / static_cast<double>(out.original_context);
  TREADLE_ASSIGN_OR_RETURN(out.factor, rope.Number("factor", longer));
  TREADLE_ASSIGN_OR_RETURN(out.beta_fast, rope.Number("beta_fast", out.beta_fast));
  TREADLE_ASSIGN_OR_RETURN(out.beta_slow, rope.Number("beta_slow", out.beta_slow));
  TREADLE_ASSIGN_OR_RETURN(out.truncate, rope.Bool("truncate", true));
  TREADLE_ASSIGN_OR_RETURN(const double scale, rope.Number("mscale", 0.0));
  TREADLE_ASSIGN_OR_RETURN(const double scale_all, rope.Number("mscale_all_dim", 0.0));
  double attention_factor = Yarn::AttentionFactor(out.factor);
  if (scale != 0 && scale_all != 0) {
    attention_factor =
        Yarn::AttentionFactor(out.factor, scale) / Yarn::AttentionFactor(out.factor, scale_all);
  }
  TREADLE_ASSIGN_OR_RETURN(out.attention_factor, rope.Number("attention_factor", attention_factor));
  TREADLE_ASSIGN_OR_RETURN(out.query_beta, rope.Number("llama_4_scaling_beta", 0.0));
  if (config.latent_dim > 0) out.score_scale = scale_all;
  return absl::OkStatus();
}

// "proportional": a share of the pairs rotates, the first ones, by the frequencies of all.
absl::Status ReadProportional(const Fields& rope, ModelConfig& config) {
  constexpr const char* kName = "partial_rotary_factor";
  TREADLE_RETURN_IF_ERROR(rope.Only("factor", 1.0));
  TREADLE_ASSIGN_OR_RETURN(const double share, rope.Number(kName, 1.0));
  const auto head_dim = static_cast<double>(config.head_dim);
  config.rotated_pairs = static_cast<int64_t>(std::floor(share * head_dim / 2));
  if (share <= 1 && config.rotated_pairs > 0) return absl::OkStatus();
  return rope.Wrong(kName, Str("at most 1, and a pair of ", config.head_dim, " elements"));
}

// rope_theta and rope_scaling, or both in one object `rope_parameters` (newer files), which may
// hold one for global and one for local layers.
absl::Status ReadRope(const Fields& fields, const ConfigJson& json, ModelConfig& config) {
  TREADLE_ASSIGN_OR_RETURN(config.rope_base, fields.Number(json.rope_base, json.default_rope_base));
  if (config.latent_dim == 0) config.rope_dim = config.head_dim;
  double share = json.default_rotary_share;
  TREADLE_ASSIGN_OR_RETURN(const int64_t rotated, fields.Integer("rotary_dim", 0, 0));
  if (rotated > 0) share = static_cast<double>(rotated) / static_cast<double>(config.head_dim);
  if (json.rotary_share != nullptr) {
    TREADLE_RETURN_IF_ERROR(ReadRotaryShare(fields, json.rotary_share, share, config));
  }
  const char* name = fields.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!fields.Has(name)) return absl::OkStatus();
  if (!fields.At(name).is_object()) return fields.Wrong(name, "an object");
  const Fields both(fields.At(name), fields.path() + ": " + name);
  const bool apart = both.At("full_attention").is_object();
  if (const Fields local(both.At("sliding_attention"), both.path() + ": sliding_attention");
      apart) {
    TREADLE_RETURN_IF_ERROR(local.Only("rope_type", "default"));
    TREADLE_RETURN_IF_ERROR(local.Only("partial_rotary_factor", 1.0));
    TREADLE_ASSIGN_OR_RETURN(config.local_rope_base,
                             local.Number("rope_theta", config.local_rope_base));
  }
  const Fields rope(apart ? both.At("full_attention") : fields.At(name), both.path());
  TREADLE_ASSIGN_OR_RETURN(config.rope_base, rope.Number("rope_theta", config.rope_base));
  if (rope.At("rope_type") == "proportional") return ReadProportional(rope, config);
  TREADLE_RETURN_IF_ERROR(json.rotary_share == nullptr
                              ? rope.Only("partial_rotary_factor", 1.0)
                              : ReadRotaryShare(rope, "partial_rotary_factor", share, config));
  const char* type_name = rope.Has("rope_type") ? "rope_type" : "type";
  const Json& type = rope.At(type_name);
  if (type.is_null() || type == "default") return absl::OkStatus();
  if (type == "linear") {
    TREADLE_ASSIGN_OR_RETURN(config.rope_linear_factor, rope.Number("factor"));
    return absl::OkStatus();
  }
  // Hunyuan's: a fixed factor of the base, by which context grows as much.
  if (type == "dynamic" && rope.Has("alpha")) {
    TREADLE_ASSIGN_OR_RETURN(const double alpha, rope.Number("alpha"));
    const auto dim = static_cast<double>(config.rope_dim);
    config.rope_base *= std::pow(alpha, dim / (dim - 2));
    return absl::OkStatus();
  }
  if (type == "longrope" || type == "su") return ReadLongRope(fields, rope, config);
  if (type == "yarn") return ReadYarn(fields, rope, config);
  if (type != "llama3") return rope.Wrong(type_name, "default, linear, llama3, longrope or yarn");
  RopeScaling scaling = {0, 0, 0, 0};  // the file says all of it
  for (const auto& field : FieldsOf<RopeScaling>()) {
    TREADLE_RETURN_IF_ERROR(ReadField(field, rope, field.json, scaling));
  }
  config.rope_scaling = scaling;
  return absl::OkStatus();
}

// "no_rope_layers", where it is there: 1 for each layer that rotates, 0 for one that does not.
absl::Status ReadRotatingLayers(const Fields& fields, ModelConfig& config) {
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
absl::Status ReadStateLayers(const Fields& fields, const Architecture& architecture,
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
absl::Status CheckSteps(const Fields& fields) {
  constexpr const char* kName = "time_step_limit";
  const Json& limits = fields.At(kName);
  const bool none = limits.is_array() && limits.size() == 2 && limits[0] == 0 &&
                    limits[1].is_object() && limits[1].value("__float__", Json()) == "Infinity";
  return limits.is_null() || none ? absl::OkStatus() : fields.Wrong(kName, "no limit");
}

// The feed-forward size of LFM2, which follows from what the file says.
absl::Status AdjustFeedForward(const Fields& fields, ModelConfig& config) {
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
absl::Status ReadLlama4(const Fields& fields, ModelConfig& config) {
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
absl::Status ReadRotation(const Fields& fields, ModelConfig& config) {
  constexpr const char* kName = "position_embedding_type";
  const Json& type = fields.At(kName);
  if (type == "rope") return absl::OkStatus();
  config.unrotated_every = 1;
  return type.is_null() || type == "nope" ? absl::OkStatus()
                                          : fields.Wrong(kName, "\"rope\" or \"nope\"");
}

// "mlp_layer_types", where it is there: which layers have experts, all but the first ones.
// DeepSeek V2's "greedy" looks at all groups of them.
absl::Status ReadExpertLayers(const Fields& fields, ModelConfig& config) {
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

absl::Status ReadFields(const Fields& fields, const Architecture& architecture, HfConfig& out) {
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
  TREADLE_RETURN_IF_ERROR(ReadRope(fields, json, config));
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
bool Describes(const Architecture& architecture, const Fields& fields) {
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

absl::StatusOr<HfConfig> ReadHfConfig(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "config.json").string();
  TREADLE_ASSIGN_OR_RETURN(Json json, ReadJsonFile(path));
  LiftTextConfig(json);
  LiftLayerTypes(json);
  const Fields fields(json, path);
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
    return Unimplemented(path, ": architectures is ", Text(names), ", expected one of ", known);
  }
  TREADLE_RETURN_IF_ERROR(ReadFields(fields, *found, out));
  TREADLE_ASSIGN_OR_RETURN(out.quantization, ReadHfQuantization(json, path));
  return out;
}

}  // namespace treadle
