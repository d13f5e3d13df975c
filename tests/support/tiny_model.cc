#include "tests/support/tiny_model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/gpt2.h"
#include "models/architectures/llama.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/support/gguf_writer.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTemplate =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}";

struct TinyTensor {
  std::string gguf_name;
  std::string hf_name;
  std::vector<int64_t> shape;  // [n, k] or [n]
  std::vector<float> values;
  // Rows are heads, whose elements pair up by their halves up to `rotated`; a container may have
  // the elements of each pair side by side. 0: not such rows.
  int64_t rotated = 0;
  bool gguf_pairs = false, hf_pairs = false;
  bool rotated_last = false;  // files have these elements behind the others of a head
  bool transposed = false;    // the folder keeps [k, n]
  int64_t head_dim = 0;
  // Fused rows that the folder keeps by K/V heads: so many queries for each. 0: not such rows.
  int64_t queries = 0;
  float hf_less = 0;   // what the folder's values are smaller by
  bool rates = false;  // logarithms in folders, negative in GGUF
};

// Vectors, and convolutions, whose rows are too short for blocks.
bool KeptAsFloats(const TinyTensor& tensor) {
  return tensor.shape.size() == 1 || tensor.shape.back() < 16;
}

std::string Utf8(int code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

// GPT-2's printable spelling of a byte: itself if printable, else the next character from U+0100
// on.
std::vector<std::string> ByteTokens() {
  std::vector<std::string> tokens(256);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    tokens[byte] = Utf8(printable ? byte : next++);
  }
  return tokens;
}

struct TinyVocabularyTable {
  std::vector<std::string> tokens;
  std::vector<std::string> merges;  // "a b"
  std::vector<int32_t> kinds;       // GGUF's: 1 normal, 3 control
};

TinyVocabularyTable MakeVocabulary() {
  TinyVocabularyTable table;
  table.tokens = ByteTokens();
  const std::string space = table.tokens[' '];
  const std::pair<std::string, std::string> merges[] = {
      {"t", "h"},   {"th", "e"}, {space, "the"}, {"i", "n"},    {"e", "r"}, {space, "a"},
      {"o", "n"},   {"a", "n"},  {"an", "d"},    {"l", "l"},    {"o", "r"}, {"e", "n"},
      {space, "w"}, {"r", "e"},  {"in", "g"},    {space, "and"}};
  for (const auto& [left, right] : merges) {
    table.merges.push_back(left + " " + right);
    table.tokens.push_back(left + right);
  }
  table.kinds.assign(table.tokens.size(), 1);
  for (const char* special : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    table.tokens.push_back(special);
    table.kinds.push_back(3);
  }
  return table;
}

// Random weights in the order of the calls.
class TensorList {
 public:
  explicit TensorList(uint64_t seed) : random_(seed) {}

  // Scaled so that a row's product with unit inputs is about one.
  TinyTensor& Matrix(std::string gguf, std::string hf, int64_t n, int64_t k) {
    return Add(std::move(gguf), std::move(hf), {n, k}, 0, 1 / std::sqrt(static_cast<float>(k)));
  }
  void Vector(std::string gguf, std::string hf, int64_t n, float center) {
    Add(std::move(gguf), std::move(hf), {n}, center, 0.1f);
  }
  std::vector<TinyTensor>& list() { return list_; }

 private:
  TinyTensor& Add(std::string gguf, std::string hf, std::vector<int64_t> shape, float center,
                  float scale) {
    TinyTensor tensor{std::move(gguf), std::move(hf), std::move(shape), {}};
    int64_t count = 1;
    for (const int64_t extent : tensor.shape) count *= extent;
    for (int64_t i = 0; i < count; ++i) {
      // Uniform of variance one, from the generator's bits: the same with every library.
      const float uniform = static_cast<float>(random_() >> 40) * 0x1p-24f - 0.5f;
      tensor.values.push_back(center + scale * uniform * std::sqrt(12.0f));
    }
    list_.push_back(std::move(tensor));
    return list_.back();
  }
  std::mt19937_64 random_;
  std::vector<TinyTensor> list_;
};

ModelConfig ConfigOf(const Architecture& architecture, const TinyModelOptions& o) {
  ModelConfig config;
  config.architecture = architecture.name;
  config.layers = o.layers;
  config.hidden = o.hidden;
  config.heads = o.heads;
  config.kv_heads = architecture.grouped ? o.kv_heads : o.heads;
  config.head_dim = o.hidden / o.heads;
  config.ffn_hidden = o.ffn_hidden;
  config.vocab = TinyVocabulary();
  config.context = o.context;
  config.tied_head = o.tied_head;
  config.qkv_bias = architecture.qkv_bias == Presence::kAlways;
  config.output_bias = architecture.output_bias == Presence::kAlways;
  config.window = architecture.local_layers != Presence::kNever ? 24 : o.window;
  config.global_every = 2;
  config.query_scalar = config.head_dim;
  if (architecture.multipliers) {
    config.embedding_multiplier = 3;
    config.residual_multiplier = 0.5;
    config.attention_multiplier = 0.375;
    config.logits_divisor = 2;
  }
  if (architecture.states != StateKind::kNone) {
    for (int64_t i = 0; i < o.layers; ++i) {  // of single blocks: attention, a network, a state
      const int64_t kind = architecture.one_block ? 2 - i % 3 : i % 2;
      if (kind == 0) config.state_layers.push_back(static_cast<double>(i));
      if (kind == 1 && architecture.one_block) config.ffn_layers.push_back(static_cast<double>(i));
    }
    config.conv_taps = 4;
    if (architecture.states != StateKind::kConvolution) {
      config.state_key_heads = config.state_heads = o.heads;
      config.state_key_dim = 16;
      config.state_value_dim = 32;
    }
    if (architecture.may_not_rotate && !architecture.experts) config.unrotated_every = 1;
  }
  if (architecture.local_heads) {
    config.local_head_dim = 2 * config.head_dim;
    config.local_kv_heads = config.kv_heads;
    config.shared_kv_layers = o.shared_kv_layers;
    config.layer_embedding = 32;
    config.logits_cap = 20;
    config.query_scalar = 1;
  }
  config.experts = architecture.grouped_experts ? 6 : architecture.experts ? 5 : 0;
  config.experts_per_token = architecture.gated_rows ? 1 : architecture.experts ? 2 : 0;
  config.normalized_experts = !architecture.unnormalized_experts;
  if (architecture.shared_expert) config.shared_hidden = o.ffn_hidden;
  if (architecture.dense_first) config.dense_layers = 1, config.dense_hidden = 2 * o.ffn_hidden;
  if (architecture.dense_between) config.dense_layers = 0, config.mixed_every = 2;
  if (architecture.chunked) {
    config.query_beta = kOwnQueryBeta;
    config.query_floor = kQueryFloor;
    config.attention_chunk = kChunk;
  }
  if (architecture.sigmoid_router || architecture.grouped_experts) config.expert_scale = 1.5;
  const ConfigJson& json = architecture.config_json;
  config.rope_base = json.default_rope_base;
  config.rope_dim = json.rotary_share != nullptr ? config.head_dim / 2 : config.head_dim;
  config.local_rope_base = kLocalRopeBase;
  if (architecture.latent) {
    config.latent_dim = 64;
    config.rope_dim = config.head_dim;
    config.unrotated_dim = config.value_dim = 32;
    config.query_latent_dim = architecture.sigmoid_router ? 96 : 0;
  }
  if (architecture.grouped_experts) {
    config.expert_groups = 3;
    config.used_expert_groups = 2;
    config.shared_experts = 2;
  }
  CompleteConfig(config);
  return config;
}

std::vector<TinyTensor> TensorsOf(const Architecture& architecture, const TinyModelOptions& o) {
  const ModelConfig whole = ConfigOf(architecture, o);
  TensorList out(o.seed);
  const auto add = [&](const TensorRow& row, int64_t layer, int64_t expert) {
    const ModelConfig config = InLayer(row.part) ? whole.OfLayer(layer) : whole;
    const auto spell = [&](Checkpoint::Kind kind, const char* suffix) {
      const bool prefixed = kind == Checkpoint::Kind::kHuggingFace && row.part != Part::kHead;
      return Str(prefixed ? architecture.hugging_face_prefix : "",
                 SpellTensorName(architecture, kind,
                                 {&row, std::to_string(layer), suffix, std::to_string(expert)}));
    };
    const std::string gguf = spell(Checkpoint::Kind::kGguf, "");
    const std::string hf = spell(Checkpoint::Kind::kHuggingFace, "");
    const int64_t n = SizeOf(row.rows, config);
    if (row.columns == Extent::kNone) {
      const std::string suffix = row.bare ? "" : ".weight";
      out.Vector(gguf + suffix, hf + suffix, n, 1);
      const bool counts = !row.bare && row.part != Part::kStateNorm;
      out.list().back().hf_less = counts ? architecture.hugging_face_gain : 0;
      out.list().back().rates = row.part == Part::kDecayRate;
    } else {
      TinyTensor& matrix =
          out.Matrix(gguf + ".weight", hf + ".weight", n, SizeOf(row.columns, config));
      matrix.transposed = InLayer(row.part) && architecture.hugging_face_transposed;
    }
    const auto by_heads = [&] {
      TinyTensor& tensor = out.list().back();
      tensor.head_dim = config.head_dim;
      tensor.gguf_pairs = architecture.gguf_pairs;
      tensor.hf_pairs = architecture.hugging_face_pairs;
      if (row.part == Part::kQ || row.part == Part::kK) tensor.rotated = config.rope_dim;
      tensor.rotated_last = architecture.latent;
      if (architecture.latent && row.part == Part::kQ) tensor.head_dim = config.QueryDim();
      if (row.part == Part::kQkv && architecture.hugging_face_qkv_by_heads) {
        tensor.queries = config.heads / config.kv_heads;
      }
    };
    by_heads();
    if (row.bias != nullptr && row.bias(config)) {
      out.Vector(gguf + ".bias", hf + ".bias", n, 0);
      by_heads();
    }
  };
  const std::vector<const TensorRow*> rows = TensorsOf(whole);
  const auto add_all = [&](auto of, int64_t layer) {
    for (const TensorRow* row : rows) {
      const int64_t copies = InExperts(row->part) ? whole.experts : 1;
      for (int64_t i = 0; of(*row) && i < copies; ++i) add(*row, layer, i);
    }
  };
  const auto first = [](const TensorRow& row) {
    return row.part == Part::kEmbedding || row.part == Part::kPositions ||
           row.part == Part::kEmbeddingNorm;
  };
  add_all(first, 0);
  for (int64_t i = 0; i < o.layers; ++i) {
    add_all([&](const TensorRow& row) { return InLayer(row, whole, i); }, i);
  }
  add_all([&](const TensorRow& row) { return !InLayer(row.part) && !first(row); }, 0);
  return std::move(out.list());
}

// Half-split rows (s * half + i) to adjacent pairs (2 * i + s), head by head.
void PermuteHeads(TinyTensor& tensor) {
  const int64_t rows = tensor.shape[0], cols = std::ssize(tensor.values) / rows;
  const int64_t half = tensor.rotated / 2;
  const std::vector<float> from = tensor.values;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t in_head = row % tensor.head_dim;
    const int64_t before = tensor.rotated_last ? tensor.head_dim - tensor.rotated : 0;
    if (in_head >= tensor.rotated && before == 0) continue;
    const int64_t place = in_head < tensor.rotated ? before + in_head % half * 2 + in_head / half
                                                   : in_head - tensor.rotated;
    const int64_t to = row - in_head + place;
    std::copy_n(from.begin() + row * cols, cols, tensor.values.begin() + to * cols);
  }
}

// All queries, keys and values to those of one K/V head after those of another.
void InterleaveHeads(TinyTensor& tensor) {
  const std::vector<float> from = tensor.values;
  const int64_t each = static_cast<int64_t>(from.size()) / tensor.shape[0] * tensor.head_dim;
  const int64_t kv_heads = tensor.shape[0] / tensor.head_dim / (tensor.queries + 2);
  auto to = tensor.values.begin();
  const auto copy = [&](int64_t head) { to = std::copy_n(from.begin() + head * each, each, to); };
  for (int64_t kv = 0; kv < kv_heads; ++kv) {
    for (int64_t i = 0; i < tensor.queries; ++i) copy(kv * tensor.queries + i);
    copy(kv_heads * tensor.queries + kv);
    copy(kv_heads * (tensor.queries + 1) + kv);
  }
}

void Transpose(TinyTensor& tensor) {
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  const std::vector<float> from = tensor.values;
  for (int64_t i = 0; i < n * k; ++i) tensor.values[i % k * n + i / k] = from[i];
  tensor.shape = {k, n};
}

absl::Status WriteFile(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  return out ? absl::OkStatus() : Internal(path.string(), ": cannot be written");
}

void AddTokenizer(const TinyModelOptions& options, GgufWriter& writer) {
  const TinyVocabularyTable table = MakeVocabulary();
  const auto last = static_cast<uint32_t>(table.tokens.size() - 1);
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddString("tokenizer.ggml.pre", "gpt-2");
  writer.AddStrings("tokenizer.ggml.tokens", table.tokens);
  writer.AddI32s("tokenizer.ggml.token_type", table.kinds);
  writer.AddStrings("tokenizer.ggml.merges", table.merges);
  writer.AddU32("tokenizer.ggml.bos_token_id", last - 2);
  writer.AddU32("tokenizer.ggml.unknown_token_id", last - 2);
  writer.AddU32("tokenizer.ggml.eos_token_id", last);
  writer.AddBool("tokenizer.ggml.add_bos_token", false);
  if (options.chat_template) writer.AddString("tokenizer.chat_template", kTemplate);
}

Json TokenizerJson() {
  const TinyVocabularyTable table = MakeVocabulary();
  Json vocabulary = Json::object(), added = Json::array(), merges = Json::array();
  for (size_t i = 0; i < table.tokens.size(); ++i) {
    if (table.kinds[i] == 1) {
      vocabulary[table.tokens[i]] = i;
    } else {
      added.push_back({{"id", i},
                       {"content", table.tokens[i]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
    }
  }
  for (const std::string& merge : table.merges) merges.push_back(merge);
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}}}};
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
    if (tensor.transposed) Transpose(tensor);
    if (tensor.queries > 0) InterleaveHeads(tensor);
    if (tensor.rotated > 0 && tensor.hf_pairs) PermuteHeads(tensor);
    for (float& value : tensor.values) {
      value = tensor.rates ? std::log(value) : value - tensor.hf_less;
    }
    // Vectors stay float, as in the GGUF file: the same weights in both.
    const bool vector = KeptAsFloats(tensor);
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

}  // namespace

int32_t TinyVocabulary() { return static_cast<int32_t>(MakeVocabulary().tokens.size()); }
int32_t TinyEndOfTurn() { return TinyVocabulary() - 1; }

absl::StatusOr<std::string> WriteTinyGguf(const Architecture& architecture,
                                          const std::string& directory, const TinyModelOptions& o) {
  GgufWriter writer;
  const std::string name(architecture.name), prefix = Str(architecture.GgufName(), ".");
  const ModelConfig config = ConfigOf(architecture, o);
  writer.AddString("general.architecture", std::string(architecture.GgufName()));
  writer.AddString("general.name", "tiny " + name);
  for (const ConfigField<ModelConfig>& field : FieldsOf<ModelConfig>()) {
    if (field.gguf == nullptr || !field.IsOf(architecture)) continue;
    const bool of_experts =
        architecture.dense_first && std::string_view(field.gguf) == "feed_forward_length";
    const std::string key = Str(prefix, of_experts ? "expert_" : "", field.gguf);
    const bool inner = std::string_view(field.gguf) == "feed_forward_length";
    if (architecture.one_block && (inner || std::string_view(field.name) == "kv_heads")) {
      std::vector<int32_t> sizes;
      for (int64_t i = 0; i < o.layers; ++i) {
        const bool there = inner ? config.IsFfn(i) : config.HasKv(i) && !config.KeepsState(i);
        sizes.push_back(there ? static_cast<int32_t>(inner ? o.ffn_hidden : config.kv_heads) : 0);
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
  if (architecture.latent) {
    writer.AddU32(prefix + "attention.key_length_mla", static_cast<uint32_t>(config.QueryDim()));
    writer.AddU32(prefix + "attention.value_length_mla", static_cast<uint32_t>(config.value_dim));
  }
  if (architecture.dense_first) {
    writer.AddU32(prefix + "feed_forward_length", static_cast<uint32_t>(config.dense_hidden));
  }
  if (config.window > 0) {
    writer.AddU32(prefix + "attention.sliding_window", static_cast<uint32_t>(config.window));
    if (architecture.local_layers != Presence::kNever) {
      writer.AddU32(prefix + "attention.sliding_window_pattern", 2);
    }
  }
  if (architecture.states != StateKind::kNone) {
    writer.AddU32(prefix + "ssm.inner_size",
                  static_cast<uint32_t>(config.state_heads * config.state_value_dim));
    writer.AddU32(prefix + "shortconv.l_cache", static_cast<uint32_t>(config.conv_taps));
    std::vector<int32_t> keeps;
    for (int64_t i = 0; i < o.layers; ++i) keeps.push_back(config.KeepsState(i) ? 1 : 0);
    writer.AddI32s(prefix + "attention.recurrent_layers", keeps);
  }
  if (config.unrotated_every == 1) writer.AddBool(prefix + "rope.scaling.finetuned", false);
  writer.AddF32(prefix + GgufEpsilonKey(architecture), 1e-5f);
  for (const auto& [key, value] : o.numbers) writer.AddF32(prefix + key, value);
  if (o.tokenizer) AddTokenizer(o, writer);
  std::map<std::string, std::string> experts;         // by name, of all
  std::map<std::string, std::vector<float>> numbers;  // of layers' activations, by key
  for (TinyTensor& tensor : TensorsOf(architecture, o)) {
    if (const size_t at = tensor.gguf_name.find(".ffn_act."); at != std::string::npos) {
      std::string key = "xielu." + tensor.gguf_name.substr(at + std::string(".ffn_act.").size());
      numbers[key.substr(0, key.rfind('.'))].push_back(tensor.values[0]);
      continue;
    }
    if (tensor.rotated > 0 && tensor.gguf_pairs) PermuteHeads(tensor);
    for (float& value : tensor.values) value = tensor.rates ? -value : value;
    const std::string format = KeptAsFloats(tensor) ? "f32" : o.format;
    TREADLE_ASSIGN_OR_RETURN(const std::string data, EncodeWeights(format, tensor.values));
    TensorName parsed = ParseTensorName(architecture, Checkpoint::Kind::kGguf, tensor.gguf_name);
    const auto type = static_cast<uint32_t>(FindWeightFormat(format)->gguf_type);
    if (parsed.expert.empty()) {
      writer.AddTensor(tensor.gguf_name, tensor.shape, type, data);
      continue;
    }
    // All experts' matrices in one tensor.
    const bool last = parsed.expert == std::to_string(config.experts - 1);
    parsed.expert = {};
    const std::string all = SpellTensorName(architecture, Checkpoint::Kind::kGguf, parsed);
    experts[all] += data;
    if (!last) continue;
    tensor.shape.insert(tensor.shape.begin(), config.experts);
    writer.AddTensor(all, tensor.shape, type, experts[all]);
  }
  for (const auto& [key, values] : numbers) writer.AddF32s(key, values);
  const auto path = std::filesystem::path(directory) / ("tiny-" + name + ".gguf");
  TREADLE_RETURN_IF_ERROR(WriteFile(path, writer.Bytes()));
  return path.string();
}

absl::StatusOr<std::string> WriteTinyFolder(const Architecture& architecture,
                                            const std::string& directory,
                                            const TinyModelOptions& o) {
  const ConfigJson& fields = architecture.config_json;
  const ModelConfig sizes = ConfigOf(architecture, o);
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
      WriteSafetensors(folder / "model.safetensors", o.format, TensorsOf(architecture, o)));
  if (!o.tokenizer) return directory;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "tokenizer.json", TokenizerJson().dump()));
  Json tokenizer_config = {{"bos_token", "<|endoftext|>"}, {"eos_token", "<|im_end|>"}};
  if (o.chat_template) tokenizer_config["chat_template"] = kTemplate;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "tokenizer_config.json", tokenizer_config.dump(2)));
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
