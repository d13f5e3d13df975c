#include "tests/support/tiny_model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/gpt2.h"
#include "models/architectures/llama.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_tensors.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

absl::Status WriteFile(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  return out ? absl::OkStatus() : Internal(path.string(), ": cannot be written");
}

absl::Status WriteSafetensors(const std::filesystem::path& path, const std::string& format,
                              std::vector<TinyTensor> tensors) {
  const WeightFormat* matrix_format = FindWeightFormat(format);
  if (matrix_format == nullptr || matrix_format->safetensors_dtype.empty()) {
    return Unimplemented("safetensors cannot hold '", format, "'");
  }
  Json header = Json::object();
  std::string data;
  for (TinyTensor& tensor : tensors) {
    if (tensor.transposed) tensor.Transpose();
    if (tensor.queries > 0) tensor.InterleaveHeads();
    if (tensor.rotated > 0 && tensor.hf_pairs) tensor.PermuteHeads();
    for (float& value : tensor.values) {
      value = tensor.rates ? std::log(value) : value - tensor.hf_less;
    }
    // Vectors stay float, as in the GGUF file: the same weights in both.
    const bool vector = tensor.KeptAsFloats();
    const WeightFormat* stored = vector ? FindWeightFormat("f32") : matrix_format;
    TREADLE_ASSIGN_OR_RETURN(const std::string bytes, EncodeWeights(stored->name, tensor.values));
    header[tensor.hf_name] = {{"dtype", std::string(stored->safetensors_dtype)},
                              {"shape", tensor.shape},
                              {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  const uint64_t length = text.size();
  return WriteFile(
      path, std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data);
}

// The fields of the configuration that GGUF has by name.
void AddFields(const Architecture& architecture, const std::string& prefix,
               const ModelConfig& config, GgufWriter& writer) {
  for (const ConfigField<ModelConfig>& field : FieldsOf<ModelConfig>()) {
    if (field.gguf == nullptr || !field.IsOf(architecture)) continue;
    const bool inner = std::string_view(field.gguf) == "feed_forward_length";
    const std::string key =
        Str(prefix, inner && architecture.dense_first ? "expert_" : "", field.gguf);
    if (architecture.one_block && (inner || std::string_view(field.name) == "kv_heads")) {
      std::vector<int32_t> sizes;
      for (int64_t i = 0; i < config.layers; ++i) {
        const bool there = inner ? config.IsFfn(i) : config.HasKv(i) && !config.KeepsState(i);
        sizes.push_back(there ? static_cast<int32_t>(inner ? config.ffn_hidden : config.kv_heads)
                              : 0);
      }
      writer.AddI32s(key, sizes);
      continue;
    }
    VisitMember(field, config, [&]<typename Value>(const Value& value) {
      if constexpr (std::is_same_v<Value, int64_t>) {
        const bool known = field.otherwise != nullptr && field.otherwise(config) == value;
        if (!known) writer.AddU32(key, static_cast<uint32_t>(value));
      } else if constexpr (std::is_same_v<Value, double>) {
        writer.AddF32(key, static_cast<float>(value));
      }
    });
  }
}

// The fields that it writes otherwise.
void AddOtherFields(const Architecture& architecture, const std::string& prefix,
                    const ModelConfig& config, GgufWriter& writer) {
  const auto number = [&](const char* key, int64_t value) {
    writer.AddU32(prefix + key, static_cast<uint32_t>(value));
  };
  if (architecture.latent) {
    number("attention.key_length_mla", config.QueryDim());
    number("attention.value_length_mla", config.value_dim);
  }
  if (architecture.dense_first) number("feed_forward_length", config.dense_hidden);
  if (config.window > 0) {
    number("attention.sliding_window", config.window);
    if (architecture.local_layers != Presence::kNever)
      number("attention.sliding_window_pattern", 2);
  }
  if (architecture.states != StateKind::kNone) {
    number("ssm.inner_size", config.state_heads * config.state_value_dim);
    number("shortconv.l_cache", config.conv_taps);
    std::vector<int32_t> keeps;
    for (int64_t i = 0; i < config.layers; ++i) keeps.push_back(config.KeepsState(i) ? 1 : 0);
    writer.AddI32s(prefix + "attention.recurrent_layers", keeps);
  }
  if (config.unrotated_every == 1) writer.AddBool(prefix + "rope.scaling.finetuned", false);
  writer.AddF32(prefix + GgufEpsilonKey(architecture), 1e-5f);
}

absl::Status AddTensors(const Architecture& architecture, const TinyModelOptions& o,
                        GgufWriter& writer) {
  const int64_t count = TinyConfig(architecture, o).experts;
  std::map<std::string, std::string> experts;         // by name, of all
  std::map<std::string, std::vector<float>> numbers;  // of layers' activations, by key
  for (TinyTensor& tensor : TinyTensors(architecture, o)) {
    if (const size_t at = tensor.gguf_name.find(".ffn_act."); at != std::string::npos) {
      std::string key = "xielu." + tensor.gguf_name.substr(at + std::string(".ffn_act.").size());
      numbers[key.substr(0, key.rfind('.'))].push_back(tensor.values[0]);
      continue;
    }
    if (tensor.rotated > 0 && tensor.gguf_pairs) tensor.PermuteHeads();
    for (float& value : tensor.values) value = tensor.rates ? -value : value;
    const std::string format = tensor.KeptAsFloats() ? "f32" : o.format;
    TREADLE_ASSIGN_OR_RETURN(const std::string data, EncodeWeights(format, tensor.values));
    TensorName parsed = ParseTensorName(architecture, Checkpoint::Kind::kGguf, tensor.gguf_name);
    const auto type = static_cast<uint32_t>(FindWeightFormat(format)->gguf_type);
    if (parsed.expert.empty()) {
      writer.AddTensor(tensor.gguf_name, tensor.shape, type, data);
      continue;
    }
    // All experts' matrices in one tensor.
    const bool last = parsed.expert == std::to_string(count - 1);
    parsed.expert = {};
    const std::string all = SpellTensorName(architecture, Checkpoint::Kind::kGguf, parsed);
    experts[all] += data;
    if (!last) continue;
    tensor.shape.insert(tensor.shape.begin(), count);
    writer.AddTensor(all, tensor.shape, type, experts[all]);
  }
  for (const auto& [key, values] : numbers) writer.AddF32s(key, values);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> WriteTinyGguf(const Architecture& architecture,
                                          const std::string& directory, const TinyModelOptions& o) {
  GgufWriter writer;
  const std::string name(architecture.name), prefix = Str(architecture.GgufName(), ".");
  const ModelConfig config = TinyConfig(architecture, o);
  writer.AddString("general.architecture", std::string(architecture.GgufName()));
  writer.AddString("general.name", "tiny " + name);
  AddFields(architecture, prefix, config, writer);
  AddOtherFields(architecture, prefix, config, writer);
  for (const auto& [key, value] : o.numbers) writer.AddF32(prefix + key, value);
  if (o.tokenizer) AddTinyTokenizer(o.chat_template, writer);
  TREADLE_RETURN_IF_ERROR(AddTensors(architecture, o, writer));
  const auto path = std::filesystem::path(directory) / ("tiny-" + name + ".gguf");
  TREADLE_RETURN_IF_ERROR(WriteFile(path, writer.Bytes()));
  return path.string();
}

absl::StatusOr<std::string> WriteTinyFolder(const Architecture& architecture,
                                            const std::string& directory,
                                            const TinyModelOptions& o) {
  const ConfigJson& fields = architecture.config_json;
  const ModelConfig sizes = TinyConfig(architecture, o);
  Json config = {{"architectures", {fields.classes[0]}},
                 {"model_type", architecture.name},
                 {"tie_word_embeddings", o.tied_head}};
  if (fields.epsilon != nullptr) config[fields.epsilon] = 1e-5;
  for (const FixedField& field : fields.fixed) {
    if (field.required) config[field.name] = Json::parse(field.json);
  }
  if (fields.rotary_share != nullptr) config[fields.rotary_share] = 0.5;
  for (int64_t i = 0; architecture.states != StateKind::kNone && i < sizes.layers; ++i) {
    config["layer_types"].push_back(sizes.KeepsState(i)    ? "linear_attention"
                                    : !sizes.IsFfn(i)      ? "full_attention"
                                    : architecture.experts ? "moe"
                                                           : "mlp");
  }
  if (architecture.states == StateKind::kConvolution) config["block_auto_adjust_ff_dim"] = false;
  if (architecture.may_not_rotate) {
    config["position_embedding_type"] = sizes.unrotated_every == 1 ? "nope" : "rope";
  }
  if (sizes.window > 0) {
    config["sliding_window"] = sizes.window;
    for (int64_t i = 0; architecture.local_layers != Presence::kNever && i < sizes.layers; ++i) {
      config["layer_types"].push_back(sizes.Local(i) ? "sliding_attention" : "full_attention");
    }
  }
  for (const ConfigField<ModelConfig>& field : FieldsOf<ModelConfig>()) {
    const JsonField said = JsonFieldOf(architecture, field);
    if (said.name == nullptr) continue;
    VisitMember(field, sizes, [&]<typename Value>(const Value& value) {
      const bool known = said.otherwise != nullptr &&
                         nlohmann::json(said.otherwise(sizes)) == nlohmann::json(value);
      if (std::is_arithmetic_v<Value> && (!std::is_same_v<Value, int64_t> || !known))
        config[said.name] = value;
    });
  }
  const std::filesystem::path folder(directory);
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "config.json", config.dump(2)));
  TREADLE_RETURN_IF_ERROR(
      WriteSafetensors(folder / "model.safetensors", o.format, TinyTensors(architecture, o)));
  if (!o.tokenizer) return directory;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "tokenizer.json", TinyTokenizerJson()));
  TREADLE_RETURN_IF_ERROR(
      WriteFile(folder / "tokenizer_config.json", TinyTokenizerConfigJson(o.chat_template)));
  return directory;
}

absl::StatusOr<std::string> WriteTinyLlamaGguf(const std::string& directory,
                                               const TinyModelOptions& options) {
  return WriteTinyGguf(kLlama, directory, options);
}

absl::StatusOr<std::string> WriteTinyGpt2Gguf(const std::string& directory,
                                              const TinyModelOptions& options) {
  return WriteTinyGguf(kGpt2, directory, options);
}

absl::StatusOr<std::string> WriteTinyLlamaFolder(const std::string& directory,
                                                 const TinyModelOptions& options) {
  return WriteTinyFolder(kLlama, directory, options);
}

absl::StatusOr<std::string> WriteTinyGpt2Folder(const std::string& directory,
                                                const TinyModelOptions& options) {
  return WriteTinyFolder(kGpt2, directory, options);
}

}  // namespace treadle
