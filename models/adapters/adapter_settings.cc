#include "models/adapters/adapter_settings.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {

using Json = nlohmann::json;

namespace {

// A setting of adapter_config.json that changes what factors mean, where it is not null, false,
// zero or empty.
constexpr const char* kForeign[] = {
    "use_dora",          "lora_bias",     "modules_to_save",         "megatron_config",
    "layer_replication", "use_qalora",    "target_parameters",       "trainable_token_indices",
    "use_bdlora",        "arrow_config",  "alora_invocation_tokens", "ensure_weight_tying",
    "lora_ga_config",    "velora_config", "monteclora_config",       "corda_config",
    "kasa_config"};

bool SaysNothing(const Json& value) {
  return value.is_null() || value == false || value == 0 ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty());
}

absl::Status CheckFactorSettings(const Json& json, const std::string& path) {
  if (const Json bias = json.value("bias", Json("none")); bias != "none") {
    return InvalidArgument(path, ": bias is ", bias.dump(), ", expected \"none\"");
  }
  const Json start = json.value("init_lora_weights", Json(true));
  constexpr std::string_view kPlain[] = {"gaussian", "eva", "orthogonal", "loftq"};
  const bool plain = start.is_boolean() || start.is_null() ||
                     (start.is_string() &&
                      std::ranges::find(kPlain, start.get<std::string>()) != std::end(kPlain));
  if (!plain) {
    return InvalidArgument(path, ": init_lora_weights is ", start.dump(), ", which changes the ",
                           "model's own weights; expected an adapter converted to plain LoRA");
  }
  return absl::OkStatus();
}

absl::Status ReadFactorSettings(const Json& json, const std::string& path,
                                AdapterSettings& settings) {
  TREADLE_RETURN_IF_ERROR(CheckFactorSettings(json, path));
  const Json alpha = json.value("lora_alpha", Json());
  if (!alpha.is_number() || !std::isfinite(alpha.get<double>())) {
    return InvalidArgument(path, ": lora_alpha is ", alpha.dump(), ", expected a number");
  }
  settings.alpha = alpha.get<double>();
  settings.by_root = json.value("use_rslora", Json(false)) == true;
  const Json pattern = json.value("alpha_pattern", Json());
  if (SaysNothing(pattern)) return absl::OkStatus();
  if (!pattern.is_object()) {
    return InvalidArgument(path, ": alpha_pattern is not an object");
  }
  for (const auto& [key, value] : pattern.items()) {
    if (!value.is_number() || key.find_first_of("*+?()[]{}|\\$", 0) != key.npos) {
      return InvalidArgument(path, ": alpha_pattern has ", Quoted(key), ": ", value.dump(),
                             ", expected a module's name and a number");
    }
    settings.alphas.emplace_back(key, value.get<double>());
  }
  return absl::OkStatus();
}

// A soft prompt's (Lester et al. 2021).
absl::Status ReadSoftPromptSettings(const Json& json, const std::string& path,
                                    const ModelConfig& config, AdapterSettings& settings) {
  const auto number = [&](const char* key, int64_t unsaid, int64_t least,
                          int64_t most) -> absl::StatusOr<int64_t> {
    const Json value = json.value(key, Json());
    if (value.is_null() && unsaid > 0) return unsaid;
    if (value.is_number_integer() && value >= least && value <= most) return value.get<int64_t>();
    return InvalidArgument(path, ": ", key, " is ", value.dump(), ", expected ", least,
                           least == most ? "" : Str(" to ", most));
  };
  TREADLE_ASSIGN_OR_RETURN(settings.virtual_tokens,
                           number("num_virtual_tokens", 0, 1, config.context - 1));
  TREADLE_RETURN_IF_ERROR(number("token_dim", 0, config.hidden, config.hidden).status());
  return number("num_transformer_submodules", 1, 1, 1).status();
}

}  // namespace

// Patterns are PEFT's: a name that begins with ^ is a module's whole name, others its last parts.
double AdapterSettings::AlphaOf(std::string_view module) const {
  for (const auto& [key, of_module] : alphas) {
    const bool whole = key.starts_with('^');
    const std::string_view name = std::string_view(key).substr(whole ? 1 : 0);
    if (module == name || (!whole && module.ends_with(Str(".", name)))) return of_module;
  }
  return alpha;
}

absl::StatusOr<AdapterSettings> ReadAdapterSettings(const MappedFile& config_json,
                                                    const ModelConfig& config) {
  const std::string& path = config_json.path();
  TREADLE_ASSIGN_OR_RETURN(const Json json, ParseJsonFile(config_json));
  const Json type = json.value("peft_type", Json()),
             base = json.value("base_model_name_or_path", Json());
  if (type != "LORA" && type != "PROMPT_TUNING") {
    return InvalidArgument(path, ": peft_type is ", type.dump(),
                           ", expected \"LORA\" or \"PROMPT_TUNING\"");
  }
  for (const char* const key : kForeign) {
    if (const Json value = json.value(key, Json()); !SaysNothing(value)) {
      return InvalidArgument(path, ": ", key, " is ", value.dump(), ", expected none: an adapter ",
                             "is factors of matrices or a soft prompt alone");
    }
  }
  AdapterSettings settings;
  if (base.is_string()) settings.base = base.get<std::string>();
  TREADLE_RETURN_IF_ERROR(type == "LORA" ? ReadFactorSettings(json, path, settings)
                                         : ReadSoftPromptSettings(json, path, config, settings));
  return settings;
}

}  // namespace treadle
