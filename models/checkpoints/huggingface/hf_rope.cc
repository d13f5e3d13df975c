#include "models/checkpoints/huggingface/hf_rope.h"

#include <cmath>

#include "base/status.h"
#include "models/architectures/config_fields.h"

namespace treadle {
namespace {

// The share of a head that rotates, as transformers rounds it.
absl::Status ReadRotaryShare(const JsonFields& fields, const char* name, double& share,
                             ModelConfig& config) {
  TREADLE_ASSIGN_OR_RETURN(share, fields.Number(name, share));
  if (!(share > 0 && share <= 1)) return fields.Wrong(name, "more than 0, at most 1");
  config.rope_dim = static_cast<int64_t>(static_cast<double>(config.head_dim) * share);
  return absl::OkStatus();
}

// "longrope": as transformers works out what the file leaves out.
absl::Status ReadLongRope(const JsonFields& fields, const JsonFields& rope, ModelConfig& config) {
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
absl::Status ReadYarn(const JsonFields& fields, const JsonFields& rope, ModelConfig& config) {
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
absl::Status ReadProportional(const JsonFields& rope, ModelConfig& config) {
  constexpr const char* kName = "partial_rotary_factor";
  TREADLE_RETURN_IF_ERROR(rope.Only("factor", 1.0));
  TREADLE_ASSIGN_OR_RETURN(const double share, rope.Number(kName, 1.0));
  const auto head_dim = static_cast<double>(config.head_dim);
  config.rotated_pairs = static_cast<int64_t>(std::floor(share * head_dim / 2));
  if (share <= 1 && config.rotated_pairs > 0) return absl::OkStatus();
  return rope.Wrong(kName, Str("at most 1, and a pair of ", config.head_dim, " elements"));
}

}  // namespace

absl::Status ReadHfRope(const JsonFields& fields, const ConfigJson& json, ModelConfig& config) {
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
  const JsonFields both(fields.At(name), fields.path() + ": " + name);
  const bool apart = both.At("full_attention").is_object();
  if (const JsonFields local(both.At("sliding_attention"), both.path() + ": sliding_attention");
      apart) {
    TREADLE_RETURN_IF_ERROR(local.Only("rope_type", "default"));
    TREADLE_RETURN_IF_ERROR(local.Only("partial_rotary_factor", 1.0));
    TREADLE_ASSIGN_OR_RETURN(config.local_rope_base,
                             local.Number("rope_theta", config.local_rope_base));
  }
  const JsonFields rope(apart ? both.At("full_attention") : fields.At(name), both.path());
  TREADLE_ASSIGN_OR_RETURN(config.rope_base, rope.Number("rope_theta", config.rope_base));
  if (rope.At("rope_type") == "proportional") return ReadProportional(rope, config);
  TREADLE_RETURN_IF_ERROR(json.rotary_share == nullptr
                              ? rope.Only("partial_rotary_factor", 1.0)
                              : ReadRotaryShare(rope, "partial_rotary_factor", share, config));
  const char* type_name = rope.Has("rope_type") ? "rope_type" : "type";
  const nlohmann::json& type = rope.At(type_name);
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

}  // namespace treadle
