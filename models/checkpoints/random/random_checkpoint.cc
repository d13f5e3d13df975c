#include "models/checkpoints/random/random_checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "kernels/dtype.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/random/random_shapes.h"

namespace treadle {
namespace {

class RandomCheckpoint final : public Checkpoint {
 public:
  // Errors name the part that is wrong, and the shapes that there are.
  absl::Status Read(const std::string& path);

 private:
  absl::Status MakeTensors();

  std::shared_ptr<const std::byte> noise_, gains_;
};

struct Change {
  std::string_view name;
  int64_t Shape::*field;
};
constexpr Change kChanges[] = {{"layers", &Shape::layers},     {"hidden", &Shape::hidden},
                               {"heads", &Shape::heads},       {"ffn", &Shape::ffn},
                               {"kv-heads", &Shape::kv_heads}, {"vocab", &Shape::vocab},
                               {"context", &Shape::context},   {"experts", &Shape::experts}};

absl::Status Apply(std::string_view path, std::string_view text, Shape& shape) {
  std::string known;
  for (const Change& change : kChanges) {
    known += Str(known.empty() ? "" : ", ", change.name);
    if (!text.starts_with(change.name) || text.substr(change.name.size(), 1) != "=") continue;
    const std::string_view digits = text.substr(change.name.size() + 1);
    const std::optional<int64_t> number = NumberIn<int64_t>(digits);
    if (!number) {
      return InvalidArgument(path, ": ", change.name, " is ", Quoted(digits),
                             ", expected a number");
    }
    shape.*change.field = *number;
    return absl::OkStatus();
  }
  return InvalidArgument(path, ": has ", Quoted(text), ", expected NAME=NUMBER with ", "a name of ",
                         known);
}

// The text after the prefix.
absl::StatusOr<Shape> ParseShape(std::string_view path, std::string_view text) {
  const size_t name_end = std::min(text.find(','), text.size());
  const std::string_view name = text.substr(0, name_end);
  const auto* found = std::ranges::find(kShapes, name, &Shape::name);
  if (found == std::end(kShapes)) {
    return NotFound(path, ": no shape is named ", Quoted(name), ", expected one of ",
                    RandomShapes());
  }
  Shape shape = *found;
  for (size_t begin = name_end; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin + 1), text.size());
    TREADLE_RETURN_IF_ERROR(Apply(path, text.substr(begin + 1, end - begin - 1), shape));
    begin = end;
  }
  if (shape.heads < 1 || shape.hidden % shape.heads != 0) {
    return InvalidArgument(path, ": hidden size ", shape.hidden, " and ", shape.heads,
                           " heads, expected a multiple of them");
  }
  return shape;
}

ModelConfig ConfigOf(const Shape& shape) {
  ModelConfig config;
  config.architecture = shape.architecture;
  config.layers = shape.layers;
  config.hidden = shape.hidden;
  config.heads = shape.heads;
  const Architecture& architecture = ArchitectureOf(config);
  config.kv_heads = architecture.grouped ? shape.kv_heads : shape.heads;
  config.head_dim = shape.head_dim > 0 ? shape.head_dim : shape.hidden / shape.heads;
  config.ffn_hidden = shape.ffn;
  config.vocab = shape.vocab;
  config.context = shape.context;
  config.tied_head = shape.tied_head;
  config.qkv_bias = architecture.qkv_bias == Presence::kAlways;
  config.output_bias = architecture.output_bias == Presence::kAlways;
  config.rope_base = shape.rope_base;
  config.rope_dim = static_cast<int64_t>(static_cast<double>(config.head_dim) *
                                         architecture.config_json.default_rotary_share);
  config.layer_norms = shape.layer_norms;
  config.window = shape.window;
  config.experts = shape.experts;
  config.experts_per_token = std::min(shape.experts_per_token, shape.experts);
  if (architecture.shared_expert) config.shared_hidden = shape.ffn;
  if (architecture.dense_first)
    config.dense_layers = 1, config.dense_hidden = 10944;  // GLM-4.5 Air's and DeepSeek V2 Lite's
  if (architecture.dense_between) {                        // Maverick's
    config.dense_layers = 0, config.mixed_every = 2, config.dense_hidden = 16384;
    config.head_norms = false;
  }
  if (architecture.chunked) {
    config.query_beta = kOwnQueryBeta;
    config.query_floor = kQueryFloor;
    config.attention_chunk = kChunk;
  }
  config.normalized_experts = !architecture.unnormalized_experts;
  if (architecture.latent) {  // DeepSeek V2 Lite's
    config.latent_dim = 512;
    config.rope_dim = 64;
    config.unrotated_dim = config.value_dim = 128;
    config.shared_experts = 2;
    config.yarn = Yarn{.factor = 40, .original_context = 4096, .score_scale = 0.707};
  }
  if (config.window > 0) config.global_every = architecture.global_every;
  if (architecture.local_base) config.local_rope_base = kLocalRopeBase;
  if (architecture.multipliers) {  // Granite 3.3 2B's
    config.embedding_multiplier = 12;
    config.residual_multiplier = 0.22;
    config.attention_multiplier = 0.015625;
    config.logits_divisor = 8;
  }
  if (architecture.states != StateKind::kNone) {
    for (int64_t i = 0; i < std::min<int64_t>(config.layers, 1 << 12); ++i) {
      if (architecture.one_block && i % 2 == 1) {
        config.ffn_layers.push_back(static_cast<double>(i));
      } else if ((i + (architecture.one_block ? 2 : 1)) % shape.attention_every != 0) {
        config.state_layers.push_back(static_cast<double>(i));
      }
    }
    const bool mamba = architecture.states == StateKind::kMamba2;
    const bool heads = architecture.states != StateKind::kConvolution;
    config.state_key_heads = shape.state_key_heads;
    config.state_heads = shape.state_heads;
    config.state_key_dim = heads ? 128 : 0;
    config.state_value_dim = heads ? mamba ? 64 : 128 : 0;
    config.conv_taps = heads ? 4 : 3;
    config.tiled_states =
        architecture.gguf_tiled_states && config.state_heads != config.state_key_heads;
  }
  if (architecture.local_heads) {  // Gemma 4 E4B's, and 26B-A4B's
    config.local_head_dim = config.head_dim / 2;
    config.local_kv_heads = config.kv_heads;
    if (architecture.experts) {
      config.local_kv_heads = 4 * config.kv_heads;
      config.keys_are_values = true;
      config.shared_hidden = 3 * shape.ffn;
    } else {
      config.shared_kv_layers = config.layers > 24 ? 18 : 0;
      config.layer_embedding = 256;
    }
    config.rotated_pairs = config.head_dim / 8;
    config.logits_cap = 30;
    config.query_scalar = 1;
  }
  CompleteConfig(config);
  if (shape.rope_factor > 0) config.rope_scaling = RopeScaling{.factor = shape.rope_factor};
  return config;
}

// The key that weights depend on. The first number counts ways of making them: count on when
// MakeNoise, MakeGains or a tensor's place in them change.
constexpr int kWay = 1;
constexpr uint64_t kSeed = 1;
std::string RecipeOf(const ModelConfig& c) {
  const RopeScaling scaling = c.rope_scaling.value_or(RopeScaling{.factor = 0});
  return Str("random weights ", kWay, ", seed ", kSeed, ", bf16, ", c.architecture, ", layers ",
             c.layers, ", hidden ", c.hidden, ", heads ", c.heads, ", kv-heads ", c.kv_heads,
             ", head size ", c.head_dim, ", ffn ", c.ffn_hidden, ", vocab ", c.vocab, ", context ",
             c.context, ", tied head ", c.tied_head, ", rope ", c.rope_base, " / ", scaling.factor,
             ", norms ", c.layer_norms, ", window ", c.window, ", experts ", c.experts, " / ",
             c.experts_per_token,
             c.shared_hidden > 0 ? Str(", shared ", c.shared_hidden, " / ", c.dense_hidden) : "");
}

// SplitMix64.
uint64_t NextRandom(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// A prime number of pages, so that rows whose sizes are powers of two repeat late.
std::vector<BFloat16> MakeNoise() {
  constexpr size_t kPages = 4093;
  constexpr float kDeviation = 0.02f;
  const float step = kDeviation * std::sqrt(12.0f) / 65536;  // of a uniform distribution
  std::vector<BFloat16> values(kPages * PageBytes() / sizeof(BFloat16));
  uint64_t state = kSeed;
  for (size_t i = 0; i < values.size(); i += 4) {
    uint64_t bits = NextRandom(state);
    for (size_t lane = 0; lane < 4; ++lane, bits >>= 16) {
      values[i + lane] = ToBFloat16((static_cast<float>(bits & 0xffff) - 32767.5f) * step);
    }
  }
  return values;
}

// Gains of the norms of hidden states, then of those of queries, keys and states, which are ones.
std::vector<BFloat16> MakeGains(int64_t hidden, int64_t queries) {
  constexpr int64_t kOutliers = 6;
  constexpr float kOutlierGain = 20;
  std::vector<BFloat16> gains(static_cast<size_t>(hidden + queries), ToBFloat16(1));
  for (int64_t i = 0; i < kOutliers; ++i) {
    gains[static_cast<size_t>((2 * i + 1) * hidden / (2 * kOutliers))] = ToBFloat16(kOutlierGain);
  }
  return gains;
}

// FNV-1a: where in the noise a tensor begins.
uint64_t HashOf(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

absl::Status Refused(const char* what, size_t bytes) {
  return ResourceExhausted("memory for ", bytes, " bytes of repeated data: ", what, ": ",
                           std::strerror(errno));
}

// A file without a name that holds `block`, filled up to `bytes`; negative if there is none.
int FileOf(std::span<const std::byte> block, size_t bytes) {
  const int file = memfd_create("repeated", MFD_CLOEXEC);
  if (file < 0) return file;
  bool complete = ftruncate(file, static_cast<off_t>(bytes)) == 0;
  for (size_t done = 0; complete && done < block.size();) {
    const ssize_t wrote =
        pwrite(file, block.data() + done, block.size() - done, static_cast<off_t>(done));
    complete = wrote > 0 || (wrote < 0 && errno == EINTR);
    if (wrote > 0) done += static_cast<size_t>(wrote);
  }
  if (complete) return file;
  close(file);
  return -1;
}

// Read-only memory of at least `bytes` in which `block`, filled up with zeros to whole pages,
// repeats without being held more than once: however long it is, it costs the block and its page
// tables. As with a mapped file, dropping its pages (DropMappedPages) loses nothing. Errors:
// ResourceExhausted when the system gives no memory or too few mappings.
absl::StatusOr<std::shared_ptr<const std::byte>> MapRepeatedly(std::span<const std::byte> block,
                                                               size_t bytes) {
  const auto whole_pages = [page = PageBytes()](size_t size) {
    return std::max(page, (size + page - 1) / page * page);
  };
  const size_t period = whole_pages(block.size()), size = whole_pages(bytes);
  const int file = FileOf(block, period);
  if (file < 0) return Refused("memfd", period);
  // Address space first, so that the pieces lie side by side.
  void* const space =
      mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    close(file);
    return Refused("mmap", size);
  }
  auto* const data = static_cast<std::byte*>(space);
  const std::shared_ptr<const std::byte> mapping(data, [data, size](auto) { munmap(data, size); });
  absl::Status status;
  for (size_t at = 0; at < size && status.ok(); at += period) {
    void* const piece =
        mmap(data + at, std::min(period, size - at), PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
    if (piece == MAP_FAILED) status = Refused("mmap", size);
  }
  close(file);
  TREADLE_RETURN_IF_ERROR(status);
  return mapping;
}

std::span<const std::byte> Bytes(const std::vector<BFloat16>& values) {
  return std::as_bytes(std::span(values));
}

absl::Status RandomCheckpoint::Read(const std::string& path) {
  kind_ = Kind::kGguf;  // whose names and layouts its tensors have
  path_ = path;
  model_name_ = path;
  TREADLE_ASSIGN_OR_RETURN(const Shape shape,
                           ParseShape(path, std::string_view(path).substr(kRandomPrefix.size())));
  config_ = ConfigOf(shape);
  TREADLE_RETURN_IF_ERROR(CheckConsistency());
  recipe_ = RecipeOf(config_);
  return MakeTensors();
}

absl::Status RandomCheckpoint::MakeTensors() {
  const Architecture& architecture = ArchitectureOf(config_);
  const WeightFormat* const format = FindWeightFormat("bf16");
  std::vector<StoredTensor> tensors;
  const auto add = [&](const TensorRow& row, int64_t layer) {
    const std::string number = std::to_string(layer);
    const auto add_one = [&](std::string_view suffix, std::vector<int64_t> shape,
                             std::string_view expert = {}) {
      StoredTensor& tensor = tensors.emplace_back();
      tensor.name = SpellTensorName(architecture, kind_, {&row, number, suffix, expert});
      tensor.format = format;
      tensor.shape = std::move(shape);
      tensor.bytes = static_cast<uint64_t>(tensor.Elements()) * sizeof(BFloat16);
    };
    const ModelConfig own = InLayer(row.part) ? config_.OfLayer(layer) : config_;
    const int64_t n = SizeOf(row.rows, own), k = SizeOf(row.columns, own);
    const bool bias = row.bias != nullptr && row.bias(config_);
    if (InExperts(row.part)) {
      for (int64_t i = 0; i < config_.experts; ++i) add_one(".weight", {n, k}, std::to_string(i));
      for (int64_t i = 0; bias && i < config_.experts; ++i)
        add_one(".bias", {n}, std::to_string(i));
      return;
    }
    add_one(".weight", row.columns == Extent::kNone ? std::vector{n} : std::vector{n, k});
    if (bias) add_one(".bias", {n});
  };
  const std::vector<const TensorRow*> rows = TensorsOf(config_);
  for (const TensorRow* row : rows) {
    if (!InLayer(row->part)) add(*row, 0);
  }
  for (int64_t i = 0; i < config_.layers; ++i) {
    for (const TensorRow* row : rows) {
      if (InLayer(*row, config_, i)) add(*row, i);
    }
  }

  const std::vector<BFloat16> noise = MakeNoise();
  const std::vector<BFloat16> gains =
      MakeGains(config_.hidden,
                std::max(config_.heads * config_.head_dim, SizeOf(Extent::kStateValues, config_)));
  const uint64_t largest = std::ranges::max(tensors, {}, &StoredTensor::bytes).bytes;
  TREADLE_ASSIGN_OR_RETURN(noise_, MapRepeatedly(Bytes(noise), Bytes(noise).size() + largest));
  TREADLE_ASSIGN_OR_RETURN(gains_, MapRepeatedly(Bytes(gains), Bytes(gains).size()));
  constexpr uint64_t kAlignment = 64;
  for (StoredTensor& tensor : tensors) {
    const uint64_t offset = HashOf(tensor.name) % (Bytes(noise).size() / kAlignment) * kAlignment;
    const TensorRow& row = *ParseTensorName(architecture, kind_, tensor.name).row;
    const bool norm = row.columns == Extent::kNone && row.part != Part::kSinks;
    if (norm && (tensor.name.ends_with(".weight") || row.bare)) {
      const int64_t first = row.rows == Extent::kHidden ? 0 : config_.hidden;
      tensor.data = gains_.get() + static_cast<size_t>(first) * sizeof(BFloat16);
    } else {
      tensor.data = noise_.get() + offset;
    }
    file_bytes_ += tensor.bytes;
  }
  AddTensors(std::move(tensors));
  return absl::OkStatus();
}

}  // namespace

std::string RandomShapes() {
  std::string names;
  for (const Shape& shape : kShapes) names += Str(names.empty() ? "" : ", ", shape.name);
  return names;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenRandom(const std::string& path) {
  auto checkpoint = std::make_unique<RandomCheckpoint>();
  TREADLE_RETURN_IF_ERROR(checkpoint->Read(path));
  return checkpoint;
}

}  // namespace treadle
