#include <cmath>
#include <filesystem>
#include <utility>

#include "base/json_file.h"
#include "base/output_file.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/huggingface/text_files.h"
#include "models/checkpoints/write/hf_matrix_writer.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "models/text/tokenizer_json.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

template <typename Struct>
Json RopeScalingOf(const char* type, const Struct& of) {
  Json json = {{"rope_type", type}, {"type", type}};
  for (const ConfigField<Struct>& field : FieldsOf<Struct>()) {
    if (field.json == nullptr) continue;
    VisitMember(field, of, [&](const auto& value) { json[field.json] = value; });
  }
  return json;
}

absl::StatusOr<Json> MakeConfig(const Checkpoint& source) {
  const ModelConfig& config = source.config();
  const Architecture& architecture = ArchitectureOf(config);
  const ConfigJson& fields = architecture.config_json;
  const bool partial = architecture.rotary && fields.rotary_share != nullptr;
  if (config.rope_dim != config.head_dim && architecture.rotary && !partial &&
      !architecture.latent) {
    return Unimplemented(source.path(), ": rotates ", config.rope_dim, " of ", config.head_dim,
                         " elements of a head, which config.json cannot say");
  }
  const bool window = config.window > 0 && architecture.local_layers != Presence::kAlways;
  std::string_view type = fields.model_type.empty() ? architecture.name : fields.model_type;
  if (window && !fields.window_model_type.empty()) type = fields.window_model_type;
  Json json = {{"architectures", {window ? fields.classes.back() : fields.classes.front()}},
               {"model_type", type},
               {fields.rope_base, config.rope_base},
               {"tie_word_embeddings", config.tied_head},
               {"dtype", "float32"},
               {"torch_dtype", "float32"}};
  if (fields.epsilon != nullptr) {
    json[fields.epsilon] = config.norm_epsilon;
  } else if (config.norm_epsilon != static_cast<float>(fields.default_epsilon)) {
    return Unimplemented(source.path(), ": norm epsilon is ", config.norm_epsilon, ", expected ",
                         fields.default_epsilon, ", for config.json has no field for it");
  }
  if (partial) {
    const auto head_dim = static_cast<double>(config.head_dim);
    double share = static_cast<double>(config.rope_dim) / head_dim;
    if (head_dim * share < static_cast<double>(config.rope_dim)) share = std::nextafter(share, 2);
    json[fields.rotary_share] = share;
  }
  for (const ConfigField<ModelConfig>& field : FieldsOf<ModelConfig>()) {
    const JsonField said = JsonFieldOf(architecture, field);
    for (const char* name : {said.name, said.name == nullptr ? nullptr : said.also}) {
      if (name == nullptr) continue;
      VisitMember(field, config, [&](const auto& value) { json[name] = value; });
    }
  }
  for (const JsonField& field : fields.repeated) {
    json[field.name] = config.*std::get<int64_t ModelConfig::*>(field.member);
  }
  for (const FixedField& field : fields.fixed) json[field.name] = Json::parse(field.json);
  if (architecture.grouped_experts && !architecture.sigmoid_router) {
    json["topk_method"] = config.expert_groups > 1 ? "group_limited_greedy" : "greedy";
  }
  if (architecture.qkv_bias == Presence::kAsStored) {
    if (architecture.output_bias == Presence::kAsStored && config.qkv_bias != config.output_bias) {
      return Unimplemented(source.path(),
                           ": has biases on Q, K and V alone, which config.json cannot say");
    }
    json["attention_bias"] = config.qkv_bias;
  }
  for (int64_t i = 0; architecture.local_heads && i < config.layers; ++i) {
    json["layer_types"].push_back(config.Local(i) ? "sliding_attention" : "full_attention");
  }
  if (window) {
    json["sliding_window"] = config.window;
    for (int64_t i = 0; architecture.local_layers == Presence::kAsStored && i < config.layers;
         ++i) {
      json["layer_types"].push_back(config.Local(i) ? "sliding_attention" : "full_attention");
    }
    if (fields.window_switch != nullptr) {
      json[fields.window_switch] = true;
      json["max_window_layers"] = config.global_layers;
    }
  }
  const bool states = architecture.states != StateKind::kNone;
  for (int64_t i = 0; states && i < config.layers; ++i) {
    json[architecture.one_block ? "layers_block_type" : "layer_types"].push_back(
        config.KeepsState(i) ? "linear_attention"
        : !config.IsFfn(i)   ? "full_attention"
        : config.experts > 0 ? "moe"
                             : "mlp");
  }
  if (architecture.states == StateKind::kConvolution) json["block_auto_adjust_ff_dim"] = false;
  if (architecture.may_not_rotate) {
    json["position_embedding_type"] = config.unrotated_every == 1 ? "nope" : "rope";
  }
  if (config.rope_linear_factor != 1) {
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", config.rope_linear_factor}};
  }
  if (config.rotated_pairs > 0) {
    // Half a pair more, so that the product is not rounded down to one pair less.
    const double share = (2 * static_cast<double>(config.rotated_pairs) + 0.5) /
                         static_cast<double>(config.head_dim);
    json["rope_parameters"] = {
        {"full_attention",
         {{"rope_type", "proportional"},
          {"partial_rotary_factor", std::min(share, 1.0)},
          {"rope_theta", config.rope_base}}},
        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", config.local_rope_base}}}};
  }
  if (config.yarn) json["rope_scaling"] = RopeScalingOf("yarn", *config.yarn);
  if (const auto& rope = config.long_rope) {
    json["rope_scaling"] = RopeScalingOf("longrope", *rope);
    json["original_max_position_embeddings"] = rope->original_context;
  }
  if (const TokenizerSpec* tokenizer = source.tokenizer()) {
    if (tokenizer->bos >= 0) json["bos_token_id"] = tokenizer->bos;
    if (tokenizer->eos >= 0) json["eos_token_id"] = tokenizer->eos;
    if (tokenizer->padding >= 0) json["pad_token_id"] = tokenizer->padding;
  }
  return json;
}

// config.json of the model, without quantization_config. Errors: something that config.json cannot
// say.
absl::StatusOr<Json> HfConfigOf(const Checkpoint& source) {
  const bool of_text = source.left_aside().empty();
  if (source.kind() == Checkpoint::Kind::kGguf || !of_text) return MakeConfig(source);
  return ParseJsonFile(*source.config_file());
}

// Tokenizer, chat template and generation settings.
absl::Status WriteHfTextFiles(const Checkpoint& source, const OutputFolder& folder) {
  std::map<std::string, std::string> files;
  if (source.kind() == Checkpoint::Kind::kHuggingFace) {
    TREADLE_ASSIGN_OR_RETURN(files, ContentsOf(source.text_files()));
  } else if (const TokenizerSpec* tokenizer = source.tokenizer()) {
    files = TokenizerJsonFiles(*tokenizer, source.chat_template(), source.config().context);
  }
  for (const auto& [name, text] : files) TREADLE_RETURN_IF_ERROR(folder.Write(name, text));
  return absl::OkStatus();
}

class HuggingFaceOutput : public CheckpointOutput {
 public:
  HuggingFaceOutput(const Checkpoint& source, const std::string& path,
                    const QuantizeOptions& options)
      : source_(source), path_(path), options_(options) {}

  absl::Status Create();
  absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const override;
  absl::Status Add(const ConvertedTensor& tensor) override;
  absl::StatusOr<uint64_t> Finish(const Provenance& provenance) override;
  std::vector<std::string> Notices() const override;

 private:
  bool gguf() const { return source_.kind() == Checkpoint::Kind::kGguf; }
  absl::StatusOr<TensorTarget> GgufTarget(const StoredTensor& tensor) const;

  const Checkpoint& source_;
  const std::string path_;
  const QuantizeOptions& options_;
  std::optional<QuantizeSpec> as_floats_;  // f32
  std::unique_ptr<OutputFolder> folder_;
  std::unique_ptr<SafetensorsWriter> writer_;
  HfQuantizationSummary summary_;
  float outlier_threshold_ = 6.0f;  // of the matrices written
  uint64_t bytes_as_floats_ = 0;    // of matrices that were blocks of GGUF, and nobody converts
  Json config_;
};

absl::Status HuggingFaceOutput::Create() {
  if (const Architecture& architecture = ArchitectureOf(source_.config());
      gguf() && architecture.hugging_face_transposed) {
    return Unimplemented(path_, ": a folder from a .gguf file of architecture ", architecture.name,
                         ", whose folders keep matrices transposed; expected ",
                         "an OUT that ends in .gguf");
  }
  TREADLE_ASSIGN_OR_RETURN(as_floats_, ParseQuantizeSpec("f32"));
  size_t room = 4096;  // metadata
  for (const StoredTensor& tensor : source_.tensors()) {
    TREADLE_ASSIGN_OR_RETURN(const TensorTarget target, Target(tensor));
    room += HfHeaderRoom(target.name);
  }
  TREADLE_ASSIGN_OR_RETURN(config_, HfConfigOf(source_));
  TREADLE_ASSIGN_OR_RETURN(folder_, OutputFolder::Create(path_));
  TREADLE_RETURN_IF_ERROR(WriteHfTextFiles(source_, *folder_));
  TREADLE_ASSIGN_OR_RETURN(writer_,
                           SafetensorsWriter::Create(folder_->Path("model.safetensors"), room));
  return absl::OkStatus();
}

absl::StatusOr<TensorTarget> HuggingFaceOutput::GgufTarget(const StoredTensor& tensor) const {
  TensorTarget target;
  const ModelConfig& config = source_.config();
  const Architecture& architecture = ArchitectureOf(config);
  const TensorName name = ParseTensorName(architecture, source_.kind(), tensor.name, &config);
  if (config.long_rope && tensor.name.starts_with("rope_factors_")) return target;  // config.json's
  if (config.rotated_pairs > 0 && tensor.name == "rope_freqs.weight") return target;  // likewise
  if (name.row == nullptr) {
    return Unimplemented(path_, ": tensor '", tensor.name,
                         "' has no place in a Hugging Face folder; expected an OUT that ends in "
                         ".gguf");
  }
  target.name = SpellTensorName(architecture, Checkpoint::Kind::kHuggingFace, name);
  target.row_order = OrderBetween(FileRowOrder(*name.row, config, Checkpoint::Kind::kGguf),
                                  FileRowOrder(*name.row, config, Checkpoint::Kind::kHuggingFace));
  // Blocks of GGUF have no place there: floats, exactly.
  if (tensor.shape.size() == 2 && tensor.format->block > 1) {
    target.to = &*as_floats_;
    target.to_keep = true;
  }
  if (tensor.shape.size() == 1 && architecture.hugging_face_gain != 0) {
    target.to = &*as_floats_;
    target.more = -architecture.hugging_face_gain;
  }
  return target;
}

absl::StatusOr<TensorTarget> HuggingFaceOutput::Target(const StoredTensor& tensor) const {
  TensorTarget target;
  target.name = tensor.name;
  if (gguf()) {
    TREADLE_ASSIGN_OR_RETURN(target, GgufTarget(tensor));
  } else {
    target.transposed = TransposedInFolder(source_.config(), tensor);
  }
  // A number that is no module's: its name in a folder has no suffix.
  constexpr std::string_view kWeight = ".weight";
  if (target.name.ends_with(kWeight)) {
    const std::string name = target.name.substr(0, target.name.size() - kWeight.size());
    if (IsNumber(name)) target.name = name;
  }
  if (tensor.shape.size() != 2) return target;
  // Read, but not written.
  if (tensor.format->name.starts_with("gptq") || (!gguf() && tensor.format->block > 1)) {
    target.to = &*as_floats_;
    target.to_keep = true;
  }
  const QuantizeSpec* to = options_.weights.For(tensor, source_);
  if (to == nullptr) return target;
  if (!to->format->apart() && to->format->block > 1) {
    return InvalidArgument(path_, ": a Hugging Face folder has no ", to->name,
                           ", expected an OUT that ends in .gguf");
  }
  target.to = to;
  target.to_keep = false;
  return target;
}

absl::Status HuggingFaceOutput::Add(const ConvertedTensor& tensor) {
  if (tensor.to_keep) bytes_as_floats_ += tensor.data.size();
  if (tensor.format->activations == ActivationPolicy::kRowInt8) {
    outlier_threshold_ = tensor.constants.outlier_threshold;
  }
  if (tensor.shape.size() == 2) {
    const MatrixRole role = RoleOf(tensor.name);
    const bool linear = role != MatrixRole::kEmbedding && role != MatrixRole::kPositions;
    summary_.Note(tensor, linear, role == MatrixRole::kEmbedding && source_.config().tied_head);
  }
  if (tensor.name.ends_with(".act_fn.beta") || tensor.name.ends_with(".act_fn.eps")) {
    ConvertedTensor scalar = tensor;
    scalar.shape = {};
    return AddHfTensor(scalar, *writer_);
  }
  return AddHfTensor(tensor, *writer_);
}

absl::StatusOr<uint64_t> HuggingFaceOutput::Finish(const Provenance& provenance) {
  Provenance metadata = provenance;
  metadata["format"] = "pt";
  TREADLE_RETURN_IF_ERROR(writer_->Finish(metadata));
  const Json dtype = config_.value("dtype", config_.value("torch_dtype", Json("float32")));
  const Json quantization =
      summary_.Config(options_.outlier_threshold.value_or(outlier_threshold_),
                      dtype.is_string() ? dtype.get<std::string>() : "float32");
  config_.erase("quantization_config");
  if (!quantization.is_null()) config_["quantization_config"] = quantization;
  TREADLE_RETURN_IF_ERROR(folder_->Write(
      "config.json", config_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"));
  TREADLE_RETURN_IF_ERROR(folder_->Finish());
  return writer_->data_bytes();
}

std::vector<std::string> HuggingFaceOutput::Notices() const {
  std::vector<std::string> notices;
  const FusedExperts experts = ArchitectureOf(source_.config()).hugging_face_experts;
  if (experts == FusedExperts::kByTurns || experts == FusedExperts::kByHalvesTransposed) {
    notices.push_back(
        "Treadle reads this folder; transformers wants all experts of a layer in one tensor");
  }
  if (ArchitectureOf(source_.config()).hugging_face_fused_states && !gguf()) {
    notices.push_back(
        "Treadle reads this folder; transformers wants linear_attn.in_proj_qkvz in one tensor");
  }
  if (ArchitectureOf(source_.config()).latent) {
    notices.push_back(
        "Treadle reads this folder; transformers wants a layer's k_b_proj and v_b_proj in one "
        "tensor, kv_b_proj");
  }
  if (!ArchitectureOf(source_.config()).hugging_face_gate_up.empty()) {
    notices.push_back(
        "Treadle reads this folder; transformers wants a layer's gate and up in one tensor");
  }
  if (bytes_as_floats_ > 0) {
    notices.push_back(Str(bytes_as_floats_ / 1'000'000,
                          " MB are matrices kept in 32 bits, because what is written here "
                          "has neither GGUF's blocks nor GPTQ's groups: embedding=f16 halves the "
                          "embedding"));
  }
  if (!summary_.Config(0, "").is_null() && !summary_.ReadByBitsAndBytes()) {
    notices.push_back(
        "Treadle reads this folder; transformers with bitsandbytes reads nf4, fp4 or int8 alone, "
        "in linear layers only");
  }
  return notices;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateHuggingFaceOutput(
    const Checkpoint& source, const std::string& path, const QuantizeOptions& options) {
  auto output = std::make_unique<HuggingFaceOutput>(source, path, options);
  TREADLE_RETURN_IF_ERROR(output->Create());
  return output;
}

}  // namespace treadle
