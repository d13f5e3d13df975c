#include "tests/support/tiny_model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/status.h"
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
  int64_t heads = 0;        // rows are heads that rotate: GGUF permutes them
  bool transposed = false;  // the folder keeps [k, n]
};

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

std::vector<TinyTensor> LlamaTensors(const TinyModelOptions& o) {
  TensorList out(o.seed);
  const int64_t vocab = TinyVocabulary();
  const int64_t kv_size = o.hidden / o.heads * o.kv_heads;
  out.Matrix("token_embd.weight", "model.embed_tokens.weight", vocab, o.hidden);
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string g = Str("blk.", i, "."), h = Str("model.layers.", i, ".");
    const std::string attention = h + "self_attn.", mlp = h + "mlp.";
    out.Vector(g + "attn_norm.weight", h + "input_layernorm.weight", o.hidden, 1);
    out.Matrix(g + "attn_q.weight", attention + "q_proj.weight", o.hidden, o.hidden).heads =
        o.heads;
    out.Matrix(g + "attn_k.weight", attention + "k_proj.weight", kv_size, o.hidden).heads =
        o.kv_heads;
    out.Matrix(g + "attn_v.weight", attention + "v_proj.weight", kv_size, o.hidden);
    out.Matrix(g + "attn_output.weight", attention + "o_proj.weight", o.hidden, o.hidden);
    out.Vector(g + "ffn_norm.weight", h + "post_attention_layernorm.weight", o.hidden, 1);
    out.Matrix(g + "ffn_gate.weight", mlp + "gate_proj.weight", o.ffn_hidden, o.hidden);
    out.Matrix(g + "ffn_up.weight", mlp + "up_proj.weight", o.ffn_hidden, o.hidden);
    out.Matrix(g + "ffn_down.weight", mlp + "down_proj.weight", o.hidden, o.ffn_hidden);
  }
  out.Vector("output_norm.weight", "model.norm.weight", o.hidden, 1);
  if (!o.tied_head) out.Matrix("output.weight", "lm_head.weight", vocab, o.hidden);
  return std::move(out.list());
}

std::vector<TinyTensor> Gpt2Tensors(const TinyModelOptions& o) {
  TensorList out(o.seed);
  const int64_t vocab = TinyVocabulary();
  const auto norm = [&](const std::string& gguf, const std::string& hf) {
    out.Vector(gguf + ".weight", hf + ".weight", o.hidden, 1);
    out.Vector(gguf + ".bias", hf + ".bias", o.hidden, 0);
  };
  const auto linear = [&](const std::string& gguf, const std::string& hf, int64_t n, int64_t k) {
    out.Matrix(gguf + ".weight", hf + ".weight", n, k).transposed = true;
    out.Vector(gguf + ".bias", hf + ".bias", n, 0);
  };
  out.Matrix("token_embd.weight", "transformer.wte.weight", vocab, o.hidden);
  out.Matrix("position_embd.weight", "transformer.wpe.weight", o.context, o.hidden);
  for (int64_t i = 0; i < o.layers; ++i) {
    const std::string g = Str("blk.", i, "."), h = Str("transformer.h.", i, ".");
    norm(g + "attn_norm", h + "ln_1");
    linear(g + "attn_qkv", h + "attn.c_attn", 3 * o.hidden, o.hidden);
    linear(g + "attn_output", h + "attn.c_proj", o.hidden, o.hidden);
    norm(g + "ffn_norm", h + "ln_2");
    linear(g + "ffn_up", h + "mlp.c_fc", o.ffn_hidden, o.hidden);
    linear(g + "ffn_down", h + "mlp.c_proj", o.hidden, o.ffn_hidden);
  }
  norm("output_norm", "transformer.ln_f");
  if (!o.tied_head) out.Matrix("output.weight", "lm_head.weight", vocab, o.hidden);
  return std::move(out.list());
}

// Half-split rows (s * half + i) to adjacent pairs (2 * i + s), head by head.
void PermuteHeads(TinyTensor& tensor) {
  const int64_t cols = tensor.shape[1];
  const int64_t head_dim = tensor.shape[0] / tensor.heads;
  const std::vector<float> from = tensor.values;
  for (int64_t row = 0; row < tensor.shape[0]; ++row) {
    const int64_t in_head = row % head_dim;
    const int64_t to = row - in_head + in_head % (head_dim / 2) * 2 + in_head / (head_dim / 2);
    std::copy_n(from.begin() + row * cols, cols, tensor.values.begin() + to * cols);
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

absl::StatusOr<std::string> WriteGguf(const std::string& directory, const std::string& architecture,
                                      const TinyModelOptions& o, std::vector<TinyTensor> tensors) {
  GgufWriter writer;
  const std::string prefix = architecture + ".";
  writer.AddString("general.architecture", architecture);
  writer.AddString("general.name", "tiny " + architecture);
  writer.AddU32(prefix + "block_count", static_cast<uint32_t>(o.layers));
  writer.AddU32(prefix + "embedding_length", static_cast<uint32_t>(o.hidden));
  writer.AddU32(prefix + "feed_forward_length", static_cast<uint32_t>(o.ffn_hidden));
  writer.AddU32(prefix + "context_length", static_cast<uint32_t>(o.context));
  writer.AddU32(prefix + "attention.head_count", static_cast<uint32_t>(o.heads));
  if (architecture == "llama") {
    writer.AddU32("llama.attention.head_count_kv", static_cast<uint32_t>(o.kv_heads));
    writer.AddF32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  } else {
    writer.AddF32("gpt2.attention.layer_norm_epsilon", 1e-5f);
  }
  if (o.tokenizer) AddTokenizer(o, writer);
  for (TinyTensor& tensor : tensors) {
    if (tensor.heads > 0) PermuteHeads(tensor);
    const std::string format = tensor.shape.size() == 1 ? "f32" : o.format;
    TREADLE_ASSIGN_OR_RETURN(const std::string data, EncodeWeights(format, tensor.values));
    writer.AddTensor(tensor.gguf_name, tensor.shape,
                     static_cast<uint32_t>(FindWeightFormat(format)->gguf_type), data);
  }
  const auto path = std::filesystem::path(directory) / ("tiny-" + architecture + ".gguf");
  TREADLE_RETURN_IF_ERROR(WriteFile(path, writer.Bytes()));
  return path.string();
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
    // Vectors stay float, as in the GGUF file: the same weights in both.
    const bool vector = tensor.shape.size() == 1;
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

absl::StatusOr<std::string> WriteFolder(const std::string& directory, const TinyModelOptions& o,
                                        const Json& config, std::vector<TinyTensor> tensors) {
  const std::filesystem::path folder(directory);
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "config.json", config.dump(2)));
  TREADLE_RETURN_IF_ERROR(
      WriteSafetensors(folder / "model.safetensors", o.format, std::move(tensors)));
  if (!o.tokenizer) return directory;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "tokenizer.json", TokenizerJson().dump()));
  Json tokenizer_config = {{"bos_token", "<|endoftext|>"}, {"eos_token", "<|im_end|>"}};
  if (o.chat_template) tokenizer_config["chat_template"] = kTemplate;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder / "tokenizer_config.json", tokenizer_config.dump(2)));
  return directory;
}

}  // namespace

int32_t TinyVocabulary() { return static_cast<int32_t>(MakeVocabulary().tokens.size()); }
int32_t TinyEndOfTurn() { return TinyVocabulary() - 1; }

absl::StatusOr<std::string> WriteTinyLlamaGguf(const std::string& directory,
                                               const TinyModelOptions& options) {
  return WriteGguf(directory, "llama", options, LlamaTensors(options));
}

absl::StatusOr<std::string> WriteTinyGpt2Gguf(const std::string& directory,
                                              const TinyModelOptions& options) {
  return WriteGguf(directory, "gpt2", options, Gpt2Tensors(options));
}

absl::StatusOr<std::string> WriteTinyLlamaFolder(const std::string& directory,
                                                 const TinyModelOptions& o) {
  const Json config = {{"architectures", {"LlamaForCausalLM"}},
                       {"model_type", "llama"},
                       {"hidden_act", "silu"},
                       {"hidden_size", o.hidden},
                       {"intermediate_size", o.ffn_hidden},
                       {"num_hidden_layers", o.layers},
                       {"num_attention_heads", o.heads},
                       {"num_key_value_heads", o.kv_heads},
                       {"max_position_embeddings", o.context},
                       {"rms_norm_eps", 1e-5},
                       {"rope_theta", 10000.0},
                       {"tie_word_embeddings", o.tied_head},
                       {"vocab_size", TinyVocabulary()}};
  return WriteFolder(directory, o, config, LlamaTensors(o));
}

absl::StatusOr<std::string> WriteTinyGpt2Folder(const std::string& directory,
                                                const TinyModelOptions& o) {
  const Json config = {{"architectures", {"GPT2LMHeadModel"}},
                       {"model_type", "gpt2"},
                       {"activation_function", "gelu_new"},
                       {"n_embd", o.hidden},
                       {"n_inner", o.ffn_hidden},
                       {"n_layer", o.layers},
                       {"n_head", o.heads},
                       {"n_positions", o.context},
                       {"layer_norm_epsilon", 1e-5},
                       {"tie_word_embeddings", o.tied_head},
                       {"vocab_size", TinyVocabulary()}};
  return WriteFolder(directory, o, config, Gpt2Tensors(o));
}

}  // namespace treadle
