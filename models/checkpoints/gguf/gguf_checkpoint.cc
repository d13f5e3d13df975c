// A GGUF file as a Checkpoint.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/rotary_embedding.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/gguf/gguf_layers.h"
#include "models/checkpoints/latent_tensors.h"

namespace treadle {
namespace {

constexpr int64_t kSigmoidGating = 2;  // llama.cpp's number

class GgufCheckpoint final : public Checkpoint {
 public:
  absl::Status Read(const std::string& path);
  absl::StatusOr<RecommendedSampling> Sampling() const override;

 private:
  absl::Status ReadConfig();
  // The rows of `out` that have keys, behind `prefix`.
  template <typename Struct>
  absl::Status ReadFields(const std::string& prefix, const Architecture& architecture,
                          Struct& out) const;
  absl::Status CheckRouters(const std::string& prefix, const Architecture& architecture) const;
  absl::Status CheckRopeKeys(const std::string& prefix) const;
  absl::Status ReadXielu(const Architecture& architecture);
  absl::Status ReadLinear(const std::string& prefix);
  absl::Status ReadRotatedPairs();
  absl::Status ReadRope(const std::string& prefix, const Architecture& architecture);
  absl::Status ReadYarn(const std::string& prefix, const Architecture& architecture);

  bool ReadBias(const Architecture& architecture, Presence bias, std::initializer_list<Part> parts);

  std::unique_ptr<GgufFile> file_;
  // Biases that the file leaves out, and numbers that its metadata have.
  std::vector<std::vector<std::byte>> zeros_;
};

absl::Status GgufCheckpoint::Read(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<GgufFile>> parts, ReadGgufParts(path));
  kind_ = Kind::kGguf;
  path_ = parts[0]->path();
  std::vector<StoredTensor> tensors;
  std::set<std::string_view> names;
  for (const auto& part : parts) {
    file_bytes_ += part->bytes();
    weight_files_.push_back(part->mapping());
    for (const StoredTensor& tensor : part->tensors()) {
      if (!names.insert(tensor.name).second) {
        return InvalidArgument(part->path(), ": tensor ", Quoted(tensor.name),
                               " is in an earlier part, too");
      }
      tensors.push_back(tensor);
    }
  }
  AddTensors(std::move(tensors));
  file_ = std::move(parts[0]);
  TREADLE_ASSIGN_OR_RETURN(
      model_name_, file_->String("general.name", std::filesystem::path(path_).stem().string()));
  TREADLE_RETURN_IF_ERROR(ReadConfig());
  TREADLE_ASSIGN_OR_RETURN(tokenizer_, ReadGgufTokenizer(*file_));
  TREADLE_ASSIGN_OR_RETURN(chat_template_, file_->String("tokenizer.chat_template", ""));
  AddTurnEnds();
  TREADLE_RETURN_IF_ERROR(CheckConsistency());
  return ArrangeExperts();
}

absl::Status GgufCheckpoint::ReadConfig() {
  TREADLE_ASSIGN_OR_RETURN(const std::string name, file_->String("general.architecture"));
  const std::string prefix = name + ".";
  TREADLE_ASSIGN_OR_RETURN(config_.experts, file_->Integer(prefix + "expert_count", 0));
  TREADLE_ASSIGN_OR_RETURN(int64_t gating, file_->Integer(prefix + "expert_gating_func", 0));
  for (const StoredTensor& tensor : tensors_) {  // which only routers of sigmoids have
    if (gating == 0 && tensor.name.ends_with(".exp_probs_b.bias")) gating = kSigmoidGating;
  }
  const Architecture* const architecture =
      FindGgufArchitecture(name, config_.experts > 0, gating == kSigmoidGating);
  if (architecture == nullptr) {
    return Unimplemented(path_, ": general.architecture is ", Quoted(name), ", expected one of ",
                         KnownArchitectures());
  }
  config_.architecture = architecture->name;
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* embedding, RequireMatrix("token_embd.weight"));
  config_.vocab = embedding->shape[0];
  if (architecture->local_base) config_.local_rope_base = kLocalRopeBase;
  if (architecture->chunked) {
    config_.attention_chunk = kChunk;
    config_.query_floor = kQueryFloor;
    config_.query_beta = kOwnQueryBeta;
    config_.head_norms = config_.experts != kExpertsWithoutHeadNorms;
  }
  const std::string expert_inner = prefix + "expert_feed_forward_length";
  if (architecture->experts) {  // where nothing is said of other networks
    TREADLE_ASSIGN_OR_RETURN(config_.ffn_hidden, file_->Integer(expert_inner, 0));
  }
  TREADLE_RETURN_IF_ERROR(ReadFields(prefix, *architecture, config_));
  // The last layers may be of a head that guesses.
  TREADLE_ASSIGN_OR_RETURN(const int64_t guessing,
                           file_->Integer(prefix + "nextn_predict_layers", 0));
  config_.layers -= guessing;
  std::string epsilon = prefix + GgufEpsilonKey(*architecture);
  if (architecture->gguf_layer_epsilon && file_->Find(epsilon) == nullptr) {
    epsilon = prefix + kRmsEpsilonKey;
  }
  TREADLE_ASSIGN_OR_RETURN(const double norm_epsilon, file_->Number(epsilon));
  config_.norm_epsilon = static_cast<float>(norm_epsilon);
  TREADLE_ASSIGN_OR_RETURN(const int64_t value_length,
                           file_->Integer(prefix + "attention.value_length", config_.head_dim));
  if (architecture->latent) {
    TREADLE_RETURN_IF_ERROR(ReadLatentSizes(*file_, prefix, config_));
  } else if (value_length != config_.head_dim) {
    return Unimplemented(path_, ": ", prefix, "attention.value_length is ", value_length,
                         ", expected attention.key_length, ", config_.head_dim);
  }
  if (architecture->experts) {
    TREADLE_RETURN_IF_ERROR(CheckRouters(prefix, *architecture));
    if (architecture->dense_first) config_.dense_hidden = config_.ffn_hidden;
    TREADLE_ASSIGN_OR_RETURN(config_.ffn_hidden, file_->Integer(expert_inner, config_.ffn_hidden));
    if (architecture->shared_expert && config_.shared_hidden == 0) {
      config_.shared_hidden = config_.ffn_hidden;
    }
  } else if (config_.experts > 0) {
    return Unimplemented(path_, ": ", prefix, "expert_count is ", config_.experts,
                         ", expected none");
  }
  config_.tied_head = Find("output.weight") == nullptr;
  config_.qkv_bias =
      ReadBias(*architecture, architecture->qkv_bias, {Part::kQ, Part::kK, Part::kV, Part::kQkv});
  config_.output_bias =
      ReadBias(*architecture, architecture->output_bias, {Part::kAttentionOutput});
  const std::string_view second = architecture->gguf_second_norm;
  if (!second.empty() && Find(Str("blk.0.", second, ".weight")) == nullptr) config_.layer_norms = 1;
  TREADLE_RETURN_IF_ERROR(ReadGgufWindow(*file_, prefix, *architecture, config_));
  if (architecture->states != StateKind::kNone) {
    TREADLE_RETURN_IF_ERROR(ReadGgufStates(*file_, prefix, *architecture, config_));
  }
  if (architecture->local_heads) {
    const auto has_values = [&](int64_t layer) {
      return Find(Str("blk.", layer, ".attn_v.weight")) != nullptr;
    };
    TREADLE_RETURN_IF_ERROR(ReadGgufLayerSizes(*file_, prefix, has_values, config_));
  }
  if (architecture->gguf_query_scalar != nullptr) {
    config_.query_scalar = architecture->gguf_query_scalar(config_);
  }
  // llama.cpp's way to say of Granite that nothing rotates.
  const std::string rotates = prefix + "rope.scaling.finetuned";
  if (architecture->multipliers) {
    TREADLE_ASSIGN_OR_RETURN(const bool rotated, file_->Bool(rotates, true));
    if (!rotated && !architecture->may_not_rotate) {
      return Unimplemented(path_, ": ", rotates, " is not true: layers without rotary embeddings");
    }
    if (!rotated) config_.unrotated_every = 1;
  }
  if (architecture->rotary) TREADLE_RETURN_IF_ERROR(ReadRope(prefix, *architecture));
  if (architecture->xielu) TREADLE_RETURN_IF_ERROR(ReadXielu(*architecture));
  for (const TensorRow& row : architecture->tensors) {
    if (row.part == Part::kQNorm && row.present != nullptr) {
      config_.head_norms = Find("blk.0.attn_q_norm.weight") != nullptr;
    }
  }
  for (StoredTensor& tensor : tensors_) {  // matrices of one row are vectors in files
    const TensorRow* const row = ParseTensorName(*architecture, kind_, tensor.name).row;
    if (row != nullptr && row->part == Part::kSharedRouter && tensor.shape.size() == 1) {
      tensor.shape.insert(tensor.shape.begin(), 1);
    }
  }
  CompleteConfig(config_);
  if (!architecture->latent) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckRanges(config_, *architecture, path_));
  TREADLE_ASSIGN_OR_RETURN(std::vector<StoredTensor> apart,
                           WithLatentsApart(tensors_, config_, kind_));
  AddTensors(std::move(apart));
  return absl::OkStatus();
}

// Numbers of layers' activations, which metadata list, become tensors as a folder has them.
absl::Status GgufCheckpoint::ReadXielu(const Architecture& architecture) {
  std::vector<StoredTensor> all = tensors_;
  for (const TensorRow& row : architecture.tensors) {
    if (!InXielu(row.part)) continue;
    const std::string key = Str(kGgufXielu, row.gguf.substr(row.gguf.find('.') + 1));
    const GgufValue* const value = file_->Find(key);
    if (value == nullptr || value->numbers.empty() ||
        (value->array && std::ssize(value->numbers) != config_.layers)) {
      return InvalidArgument(path_, ": metadata ", Quoted(key),
                             value == nullptr ? " is missing" : " is not",
                             ", expected a number of ", "each of ", config_.layers, " layers");
    }
    for (int64_t i = 0; i < config_.layers; ++i) {
      const double number = value->numbers[value->array ? static_cast<size_t>(i) : 0];
      if (!(std::fabs(number) <= 1e6)) {
        return InvalidArgument(path_, ": metadata ", Quoted(key), " has ", number, " of layer ", i,
                               ", expected -1e6 to 1e6");
      }
      const auto narrow = static_cast<float>(number);
      const auto* const bytes = reinterpret_cast<const std::byte*>(&narrow);
      zeros_.emplace_back(bytes, bytes + sizeof(narrow));
      all.push_back(
          {.name = SpellTensorName(architecture, kind_, {&row, std::to_string(i), ".weight"}),
           .format = FindWeightFormat("f32"),
           .shape = {1},
           .data = zeros_.back().data(),
           .bytes = sizeof(narrow)});
    }
  }
  AddTensors(std::move(all));
  return absl::OkStatus();
}

// How a row's experts are chosen is the family's.
absl::Status GgufCheckpoint::CheckRouters(const std::string& prefix,
                                          const Architecture& architecture) const {
  const std::pair<const char*, int64_t> numbers[] = {
      {"expert_gating_func", architecture.sigmoid_router ? kSigmoidGating : 1},
      {"expert_group_count", 1},
      {"expert_shared_count", 1},
      {"moe_latent_size", 0}};
  for (const auto& [key, expected] : numbers) {
    if (architecture.grouped_experts && key != numbers[0].first) break;
    TREADLE_ASSIGN_OR_RETURN(const int64_t number, file_->Integer(prefix + key, expected));
    if (number == expected || number == 0) continue;
    return Unimplemented(path_, ": ", prefix, key, " is ", number, ", expected ", expected);
  }
  return absl::OkStatus();
}

// Whether the products of `parts` have biases. Where one has a bias, all have: those that the file
// leaves out are zeros.
bool GgufCheckpoint::ReadBias(const Architecture& architecture, Presence bias,
                              std::initializer_list<Part> parts) {
  if (bias != Presence::kAsStored) return bias == Presence::kAlways;
  std::vector<StoredTensor> lacking;
  bool found = false;
  for (const TensorRow& row : architecture.tensors) {
    if (std::ranges::find(parts, row.part) == parts.end()) continue;
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::string number = std::to_string(layer);
      const auto spell = [&](const char* suffix) {
        return SpellTensorName(architecture, kind_, {&row, number, suffix});
      };
      const StoredTensor* const weight = Find(spell(".weight"));
      if (weight == nullptr) break;  // the number of layers may be anything yet
      if (Find(spell(".bias")) != nullptr) {
        found = true;
      } else {
        lacking.push_back({.name = spell(".bias"),
                           .format = FindWeightFormat("f32"),
                           .shape = {weight->shape[0]}});
      }
    }
  }
  if (!found) return false;
  uint64_t longest = 0;
  for (StoredTensor& tensor : lacking) {
    tensor.bytes = static_cast<uint64_t>(tensor.shape[0]) * sizeof(float);
    longest = std::max(longest, tensor.bytes);
  }
  zeros_.emplace_back(longest);
  std::vector<StoredTensor> all = tensors_;
  for (StoredTensor& tensor : lacking) {
    tensor.data = zeros_.back().data();
    all.push_back(std::move(tensor));
  }
  AddTensors(std::move(all));
  return true;
}

template <typename Struct>
absl::Status GgufCheckpoint::ReadFields(const std::string& prefix, const Architecture& architecture,
                                        Struct& out) const {
  for (const ConfigField<Struct>& field : FieldsOf<Struct>()) {
    SetDefault(field, field.otherwise, out);
    if (field.gguf == nullptr || !field.IsOf(architecture)) continue;
    const GgufValue* const value = file_->Find(prefix + field.gguf);
    const bool by_layer =
        architecture.local_heads ||
        (architecture.states != StateKind::kNone && field.gguf == std::string_view(kGgufKvHeads)) ||
        (architecture.one_block && field.gguf == std::string_view(kGgufInner));
    const bool listed = by_layer && value != nullptr && value->numbers.size() > 1;
    if (listed) continue;  // ReadGgufLayerSizes' or ReadGgufStates'
    TREADLE_RETURN_IF_ERROR(ReadField(field, *file_, prefix + field.gguf, out));
  }
  return absl::OkStatus();
}

absl::Status GgufCheckpoint::ReadYarn(const std::string& prefix, const Architecture& architecture) {
  Yarn& out = config_.yarn.emplace();
  out.factor = 0;  // the file says it
  out.original_context = config_.context;
  out.truncate = architecture.yarn_truncates;
  TREADLE_RETURN_IF_ERROR(ReadFields(prefix, architecture, out));
  TREADLE_ASSIGN_OR_RETURN(const double more, file_->Number(prefix + "yarn_attn_factor", 1.0));
  TREADLE_ASSIGN_OR_RETURN(const double less, file_->Number(prefix + kYarnDivisor, 0.0));
  out.attention_factor =
      Yarn::AttentionFactor(out.factor) / Yarn::AttentionFactor(out.factor, less) * more;
  if (architecture.latent) {
    out.score_scale = less / kGgufScoreScale;
    if (less > 0) out.attention_factor = more;  // llama.cpp: the two scales are the same
  }
  return absl::OkStatus();
}

// How positions are rotated has to be understood: a key that nobody reads would give other answers.
absl::Status GgufCheckpoint::CheckRopeKeys(const std::string& prefix) const {
  std::set<std::string> known = {
      prefix + "rope.dimension_sections",  // which are alike where all tokens are text
      prefix + "rope.dimension_count_swa",
      prefix + "rope.scale_linear",
      prefix + "rope.scaling.type",
      prefix + "rope.scaling.finetuned",
      prefix + "rope.scaling.yarn_attn_factor",
      prefix + "rope.scaling." + kYarnDivisor};
  const auto add = [&]<typename Struct>(const std::string& before, const Struct*) {
    for (const ConfigField<Struct>& field : FieldsOf<Struct>()) {
      if (field.gguf != nullptr) known.insert(before + field.gguf);
    }
  };
  add(prefix, &config_);
  add(prefix + "rope.scaling.", static_cast<const Yarn*>(nullptr));
  add(prefix + "rope.scaling.", static_cast<const LongRope*>(nullptr));
  for (const GgufFile::RawPair& pair : file_->raw_metadata()) {
    if (!pair.key.starts_with(prefix + "rope.") || known.contains(std::string(pair.key))) continue;
    return Unimplemented(path_, ": metadata ", Quoted(pair.key),
                         " says how positions are rotated, in a way that is not supported");
  }
  return absl::OkStatus();
}

// A factor without a type means linear, as in llama.cpp; 0 means none.
absl::Status GgufCheckpoint::ReadLinear(const std::string& prefix) {
  TREADLE_ASSIGN_OR_RETURN(const double old, file_->Number(prefix + "rope.scale_linear", 0.0));
  TREADLE_ASSIGN_OR_RETURN(const double factor, file_->Number(prefix + "rope.scaling.factor", old));
  if (factor != 0) config_.rope_linear_factor = factor;
  return absl::OkStatus();
}

// Pairs whose frequencies are divided by kUnrotated do not rotate; they are the last ones.
absl::Status GgufCheckpoint::ReadRotatedPairs() {
  if (Find("rope_freqs.weight") == nullptr) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                           Require("rope_freqs.weight", {config_.rope_dim / 2}));
  const std::vector<float> factors = DecodeVector(*tensor);
  const auto first = std::ranges::find(factors, kUnrotated);
  if (std::all_of(factors.begin(), first, [](float factor) { return factor == 1; }) &&
      std::all_of(first, factors.end(), [](float factor) { return factor == kUnrotated; })) {
    config_.rotated_pairs = first == factors.end() ? 0 : first - factors.begin();
  }
  return absl::OkStatus();
}

absl::Status GgufCheckpoint::ReadRope(const std::string& prefix, const Architecture& architecture) {
  TREADLE_RETURN_IF_ERROR(CheckRopeKeys(prefix));
  TREADLE_RETURN_IF_ERROR(ReadRotatedPairs());
  TREADLE_ASSIGN_OR_RETURN(const std::string scaling,
                           file_->String(prefix + "rope.scaling.type", "linear"));
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
    return ReadFields(prefix + "rope.scaling.", architecture, rope);
  }
  if (scaling == "linear") return ReadLinear(prefix);
  if (scaling == "yarn") {
    TREADLE_RETURN_IF_ERROR(ReadYarn(prefix + "rope.scaling.", architecture));
    TREADLE_ASSIGN_OR_RETURN(config_.yarn->query_beta, file_->Number(prefix + kQueryBeta, 0.0));
    return absl::OkStatus();
  }
  if (scaling == "none") return absl::OkStatus();
  return Unimplemented(path_, ": ", prefix, "rope.scaling.type is ", Quoted(scaling),
                       ", expected none, linear, longrope or yarn");
}

absl::StatusOr<RecommendedSampling> GgufCheckpoint::Sampling() const {
  RecommendedSampling sampling{.source = Str(path_, " (general.sampling)"), .values = {}};
  for (const auto& [name, key] : kSamplingNames) {
    if (file_->Find(key) == nullptr) continue;
    TREADLE_ASSIGN_OR_RETURN(sampling.values[name], file_->Number(key));
  }
  return sampling;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenGguf(const std::string& path) {
  auto checkpoint = std::make_unique<GgufCheckpoint>();
  TREADLE_RETURN_IF_ERROR(checkpoint->Read(path));
  return checkpoint;
}

}  // namespace treadle
