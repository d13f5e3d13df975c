// A GGUF file as a Checkpoint.
#include <algorithm>
#include <filesystem>

#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/weight_loader.h"

namespace treadle {
namespace {

class GgufCheckpoint final : public Checkpoint {
 public:
  absl::Status Read(const std::string& path);

 private:
  absl::Status ReadConfig();
  absl::Status ReadWindow(const std::string& prefix, const Architecture& architecture);
  absl::Status ReadRope(const std::string& prefix, const Architecture& architecture);
  absl::Status ReadYarn(const std::string& prefix, const Architecture& architecture);

  std::unique_ptr<GgufFile> file_;
};

absl::Status GgufCheckpoint::Read(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(file_, GgufFile::Read(path));
  kind_ = Kind::kGguf;
  path_ = path;
  file_bytes_ = file_->bytes();
  weight_files_ = {path};
  mapped_.push_back(file_->mapping());
  AddTensors(file_->tensors());
  TREADLE_ASSIGN_OR_RETURN(
      model_name_, file_->String("general.name", std::filesystem::path(path).stem().string()));
  TREADLE_RETURN_IF_ERROR(ReadConfig());
  TREADLE_ASSIGN_OR_RETURN(tokenizer_, ReadGgufTokenizer(*file_));
  TREADLE_ASSIGN_OR_RETURN(chat_template_, file_->String("tokenizer.chat_template", ""));
  TREADLE_RETURN_IF_ERROR(CheckConsistency());
  return ArrangeExperts();
}

absl::Status GgufCheckpoint::ReadConfig() {
  TREADLE_ASSIGN_OR_RETURN(const std::string name, file_->String("general.architecture"));
  const std::string prefix = name + ".";
  TREADLE_ASSIGN_OR_RETURN(config_.experts, file_->Integer(prefix + "expert_count", 0));
  const Architecture* const architecture = FindGgufArchitecture(name, config_.experts > 0);
  if (architecture == nullptr) {
    return Unimplemented(path_, ": general.architecture is ", Quoted(name), ", expected one of ",
                         KnownArchitectures());
  }
  config_.architecture = architecture->name;
  struct Row {
    const char* key;
    int64_t* value;
  };
  const Row rows[] = {{"block_count", &config_.layers},
                      {"embedding_length", &config_.hidden},
                      {"attention.head_count", &config_.heads},
                      {"feed_forward_length", &config_.ffn_hidden},
                      {"context_length", &config_.context}};
  for (const Row& row : rows) {
    TREADLE_ASSIGN_OR_RETURN(*row.value, file_->Integer(prefix + row.key));
    if (*row.value < 1) {
      return InvalidArgument(path_, ": ", prefix, row.key, " is ", *row.value,
                             ", expected at least 1");
    }
  }
  TREADLE_ASSIGN_OR_RETURN(const double norm_epsilon,
                           file_->Number(prefix + GgufEpsilonKey(*architecture)));
  config_.norm_epsilon = static_cast<float>(norm_epsilon);
  TREADLE_ASSIGN_OR_RETURN(config_.kv_heads,
                           file_->Integer(prefix + "attention.head_count_kv", config_.heads));
  TREADLE_ASSIGN_OR_RETURN(config_.head_dim, file_->Integer(prefix + "attention.key_length",
                                                            config_.hidden / config_.heads));
  TREADLE_ASSIGN_OR_RETURN(const int64_t value_length,
                           file_->Integer(prefix + "attention.value_length", config_.head_dim));
  if (value_length != config_.head_dim) {
    return Unimplemented(path_, ": ", prefix, "attention.value_length is ", value_length,
                         ", expected attention.key_length, ", config_.head_dim);
  }
  if (architecture->experts) {
    TREADLE_ASSIGN_OR_RETURN(config_.experts_per_token,
                             file_->Integer(prefix + "expert_used_count"));
    TREADLE_ASSIGN_OR_RETURN(
        config_.ffn_hidden,
        file_->Integer(prefix + "expert_feed_forward_length", config_.ffn_hidden));
    TREADLE_ASSIGN_OR_RETURN(config_.normalized_experts,
                             file_->Bool(prefix + "expert_weights_norm", true));
  } else if (config_.experts > 0) {
    return Unimplemented(path_, ": ", prefix, "expert_count is ", config_.experts,
                         ", expected none");
  }
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* embedding, RequireMatrix("token_embd.weight"));
  TREADLE_ASSIGN_OR_RETURN(config_.vocab,
                           file_->Integer(prefix + "vocab_size", embedding->shape[0]));
  config_.tied_head = Find("output.weight") == nullptr;
  const auto has = [&](Presence bias, std::initializer_list<Part> parts) {
    if (bias != Presence::kAsStored) return bias == Presence::kAlways;
    return std::ranges::any_of(architecture->tensors, [&](const TensorRow& row) {
      return std::ranges::find(parts, row.part) != parts.end() &&
             Find(SpellTensorName(*architecture, kind_, {&row, "0", ".bias"})) != nullptr;
    });
  };
  config_.qkv_bias = has(architecture->qkv_bias, {Part::kQ, Part::kQkv});
  config_.output_bias = has(architecture->output_bias, {Part::kAttentionOutput});
  for (const FlagField& field : architecture->config_json.flags) {
    if (field.gguf == nullptr) continue;
    TREADLE_ASSIGN_OR_RETURN(config_.*field.flag,
                             file_->Bool(prefix + field.gguf, field.otherwise));
  }
  const std::string_view second = architecture->gguf_second_norm;
  if (!second.empty() && Find(Str("blk.0.", second, ".weight")) == nullptr) config_.layer_norms = 1;
  TREADLE_RETURN_IF_ERROR(ReadWindow(prefix, *architecture));
  return architecture->rotary ? ReadRope(prefix, *architecture) : absl::OkStatus();
}

absl::Status GgufCheckpoint::ReadWindow(const std::string& prefix,
                                        const Architecture& architecture) {
  const std::string key = prefix + "attention.sliding_window";
  if (!architecture.local_layers) {  // 0: none, as llama.cpp writes of Phi-4
    TREADLE_ASSIGN_OR_RETURN(config_.window, file_->Integer(key, 0));
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(config_.window, file_->Integer(key));
  TREADLE_ASSIGN_OR_RETURN(config_.global_every,
                           file_->Integer(key + "_pattern", architecture.global_every));
  if (architecture.local_base) {
    TREADLE_ASSIGN_OR_RETURN(config_.local_rope_base,
                             file_->Number(prefix + "rope.freq_base_swa", kLocalRopeBase));
  }
  if (architecture.gguf_query_scalar != nullptr) {
    config_.query_scalar = architecture.gguf_query_scalar(config_);
  }
  return absl::OkStatus();
}

absl::Status GgufCheckpoint::ReadYarn(const std::string& prefix, const Architecture& architecture) {
  const std::string scaling = prefix + "rope.scaling.", yarn = scaling + "yarn_";
  Yarn& out = config_.yarn.emplace();
  TREADLE_ASSIGN_OR_RETURN(out.factor, file_->Number(scaling + "factor"));
  TREADLE_ASSIGN_OR_RETURN(out.original_context,
                           file_->Integer(scaling + "original_context_length", config_.context));
  TREADLE_ASSIGN_OR_RETURN(out.beta_fast, file_->Number(yarn + "beta_fast", out.beta_fast));
  TREADLE_ASSIGN_OR_RETURN(out.beta_slow, file_->Number(yarn + "beta_slow", out.beta_slow));
  TREADLE_ASSIGN_OR_RETURN(out.truncate,
                           file_->Bool(yarn + "truncate", architecture.yarn_truncates));
  TREADLE_ASSIGN_OR_RETURN(const double more, file_->Number(yarn + "attn_factor", 1.0));
  out.attention_factor = Yarn::AttentionFactor(out.factor) * more;
  return absl::OkStatus();
}

absl::Status GgufCheckpoint::ReadRope(const std::string& prefix, const Architecture& architecture) {
  TREADLE_ASSIGN_OR_RETURN(config_.rope_dim,
                           file_->Integer(prefix + "rope.dimension_count", config_.head_dim));
  TREADLE_ASSIGN_OR_RETURN(config_.rope_base, file_->Number(prefix + "rope.freq_base", 10000.0));
  TREADLE_ASSIGN_OR_RETURN(const std::string scaling,
                           file_->String(prefix + "rope.scaling.type", "none"));
  if (scaling == "longrope" || Find("rope_factors_long.weight") != nullptr ||
      Find("rope_factors_short.weight") != nullptr) {
    LongRope& rope = config_.long_rope.emplace();
    const std::pair<const char*, std::vector<double>*> tensors[] = {
        {"rope_factors_short.weight", &rope.short_factors},
        {"rope_factors_long.weight", &rope.long_factors}};
    for (const auto& [name, factors] : tensors) {
      TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, Require(name, {config_.rope_dim / 2}));
      const std::vector<float> values = DecodeVector(*tensor);
      factors->assign(values.begin(), values.end());
    }
    TREADLE_ASSIGN_OR_RETURN(rope.original_context,
                             file_->Integer(prefix + "rope.scaling.original_context_length"));
    TREADLE_ASSIGN_OR_RETURN(rope.attention_factor,
                             file_->Number(prefix + "rope.scaling.attn_factor", 1.0));
  } else if (scaling == "linear") {
    TREADLE_ASSIGN_OR_RETURN(config_.rope_linear_factor,
                             file_->Number(prefix + "rope.scaling.factor"));
  } else if (scaling == "yarn") {
    return ReadYarn(prefix, architecture);
  } else if (scaling != "none") {
    return Unimplemented(path_, ": ", prefix, "rope.scaling.type is ", Quoted(scaling),
                         ", expected none, linear, longrope or yarn");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(const std::string& path) {
  auto checkpoint = std::make_unique<GgufCheckpoint>();
  TREADLE_RETURN_IF_ERROR(checkpoint->Read(path));
  return checkpoint;
}

}  // namespace treadle
