#include "tests/support/tiny_tensors.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {
namespace {

// Random weights in the order of the calls.
struct TensorList {
  TinyTensor& Add(std::string gguf, std::string hf, std::vector<int64_t> shape, float center,
                  float scale) {
    TinyTensor tensor{.gguf_name = std::move(gguf), .hf_name = std::move(hf), .shape = shape};
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    for (int64_t i = 0; i < count; ++i) {
      // Uniform of variance one, from the generator's bits: the same with every library.
      const float uniform = static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f;
      tensor.values.push_back(center + scale * uniform * std::sqrt(12.0f));
    }
    return list.emplace_back(std::move(tensor));
  }

  std::mt19937_64 random;
  std::vector<TinyTensor> list;
};

void SetStates(const Architecture& architecture, const TinyModelOptions& o, ModelConfig& config) {
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

void SetExperts(const Architecture& architecture, const TinyModelOptions& o, ModelConfig& config) {
  config.experts = architecture.grouped_experts ? 6 : architecture.experts ? 5 : 0;
  config.experts_per_token = architecture.gated_rows ? 1 : architecture.experts ? 2 : 0;
  config.normalized_experts = !architecture.unnormalized_experts;
  if (architecture.shared_expert) config.shared_hidden = o.ffn_hidden;
  if (architecture.dense_first) config.dense_layers = 1, config.dense_hidden = 2 * o.ffn_hidden;
  if (architecture.dense_between) config.dense_layers = 0, config.mixed_every = 2;
  if (architecture.sigmoid_router || architecture.grouped_experts) config.expert_scale = 1.5;
  if (architecture.grouped_experts) {
    config.expert_groups = 3;
    config.used_expert_groups = 2;
    config.shared_experts = 2;
  }
}

}  // namespace

void TinyTensor::PermuteHeads() {
  const int64_t rows = shape[0], cols = std::ssize(values) / rows;
  const int64_t half = rotated / 2;
  const std::vector<float> from = values;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t in_head = row % head_dim;
    const int64_t before = rotated_last ? head_dim - rotated : 0;
    if (in_head >= rotated && before == 0) continue;
    const int64_t place =
        in_head < rotated ? before + in_head % half * 2 + in_head / half : in_head - rotated;
    const int64_t to = row - in_head + place;
    std::copy_n(from.begin() + row * cols, cols, values.begin() + to * cols);
  }
}

void TinyTensor::InterleaveHeads() {
  const std::vector<float> from = values;
  const int64_t each = static_cast<int64_t>(from.size()) / shape[0] * head_dim;
  const int64_t kv_heads = shape[0] / head_dim / (queries + 2);
  auto to = values.begin();
  const auto copy = [&](int64_t head) { to = std::copy_n(from.begin() + head * each, each, to); };
  for (int64_t kv = 0; kv < kv_heads; ++kv) {
    for (int64_t i = 0; i < queries; ++i) copy(kv * queries + i);
    copy(kv_heads * queries + kv);
    copy(kv_heads * (queries + 1) + kv);
  }
}

void TinyTensor::Transpose() {
  const int64_t n = shape[0], k = shape[1];
  const std::vector<float> from = values;
  for (int64_t i = 0; i < n * k; ++i) values[i % k * n + i / k] = from[i];
  shape = {k, n};
}

ModelConfig TinyConfig(const Architecture& architecture, const TinyModelOptions& o) {
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
  if (architecture.states != StateKind::kNone) SetStates(architecture, o, config);
  if (architecture.local_heads) {
    config.local_head_dim = 2 * config.head_dim;
    config.local_kv_heads = config.kv_heads;
    config.shared_kv_layers = o.shared_kv_layers;
    config.layer_embedding = 32;
    config.logits_cap = 20;
    config.query_scalar = 1;
  }
  if (architecture.chunked) {
    config.query_beta = kOwnQueryBeta;
    config.query_floor = kQueryFloor;
    config.attention_chunk = kChunk;
  }
  SetExperts(architecture, o, config);
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
  CompleteConfig(config);
  return config;
}

std::vector<TinyTensor> TinyTensors(const Architecture& architecture, const TinyModelOptions& o) {
  const ModelConfig whole = TinyConfig(architecture, o);
  TensorList out{.random = std::mt19937_64(o.seed), .list = {}};
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
    const int64_t n = SizeOf(row.rows, config), k = SizeOf(row.columns, config);
    const auto by_heads = [&](TinyTensor& tensor) {
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
    const std::string suffix = row.bare ? "" : ".weight";
    if (row.columns == Extent::kNone) {
      TinyTensor& vector = out.Add(gguf + suffix, hf + suffix, {n}, 1, 0.1f);
      const bool counts = !row.bare && row.part != Part::kStateNorm;
      vector.hf_less = counts ? architecture.hugging_face_gain : 0;
      vector.rates = row.part == Part::kDecayRate;
      by_heads(vector);
    } else {  // scaled so that a row's product with unit inputs is about one
      const float scale = 1 / std::sqrt(static_cast<float>(k));
      TinyTensor& matrix = out.Add(gguf + ".weight", hf + ".weight", {n, k}, 0, scale);
      matrix.transposed = InLayer(row.part) && architecture.hugging_face_transposed;
      by_heads(matrix);
    }
    if (row.bias != nullptr && row.bias(config)) {
      by_heads(out.Add(gguf + ".bias", hf + ".bias", {n}, 0, 0.1f));
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
  return std::move(out.list);
}

}  // namespace treadle
