#include "engine/placement_costs.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/activation_link.h"
#include "engine/kv_cache.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPageSize = 32;  // of the measurement's cache
constexpr size_t kWarmUp = 2;
constexpr size_t kFewest = 8;  // runs
constexpr size_t kMost = 25;
constexpr auto kEnough = std::chrono::milliseconds(200);

// One rank alone: the other ranks' parts are copies of its own.
class SoloCommunicator final : public Communicator {
 public:
  explicit SoloCommunicator(Shard shard) : shard_(shard) {}
  int rank() const override { return shard_.rank; }
  int size() const override { return shard_.size; }
  bool asynchronous() const override { return false; }
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override {
    for (int64_t i = 0; i < count; ++i) out[i] = accumulate ? out[i] + in[i] : in[i];
    return absl::OkStatus();
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    for (int rank = 0; rank < shard_.size; ++rank) {
      std::memcpy(static_cast<std::byte*>(out) + rank * bytes, in, bytes);
    }
    return absl::OkStatus();
  }
  absl::Status Broadcast(void*, size_t, int) override { return absl::OkStatus(); }
  absl::StatusOr<Transfer> Send(const void*, size_t, int) override { return Transfer{0}; }
  absl::StatusOr<Transfer> Recv(void*, size_t, int) override { return Transfer{0}; }
  absl::Status Wait(Transfer) override { return absl::OkStatus(); }
  void Abort(absl::Status) override {}

 private:
  const Shard shard_;
};

// The layer that a tensor belongs to: the first part of its name, between dots, that is a number.
// -1: none, as embedding and head.
int64_t LayerOf(std::string_view name, int64_t layers) {
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    int64_t number = -1;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    if (error == std::errc{} && end == part.data() + part.size() && number >= 0 &&
        number < layers) {
      return number;
    }
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return -1;
}

// [layers] bytes in the file.
std::vector<double> StoredBytes(const Checkpoint& checkpoint) {
  const int64_t layers = checkpoint.config().layers;
  std::vector<double> stored(layers, 0);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const int64_t layer = LayerOf(tensor.name, layers);
    if (layer >= 0) stored[layer] += static_cast<double>(tensor.bytes + tensor.constant_bytes);
  }
  return stored;
}

// Reads memory as the rest of an iteration would: a layer that is measured over and over would find
// its weights in caches where it does not find them between all the others.
class CacheSweep {
 public:
  explicit CacheSweep(uint64_t bytes)
      : words_(std::min(bytes, kMostSwept) / sizeof(uint64_t), 1) {}  // ones: pages of its own
  void Run() {
    uint64_t sum = 0;
    for (const uint64_t word : words_) sum += word;
    sum_ = sum;
  }

 private:
  static constexpr uint64_t kMostSwept = uint64_t{128} << 20;
  const std::vector<uint64_t> words_;
  volatile uint64_t sum_ = 0;  // so that it is read
};

// The last layer and the head, loaded, with what an iteration needs.
class Probe {
 public:
  static absl::StatusOr<Probe> Create(const Checkpoint& checkpoint, Backend& backend,
                                      const CostOptions& options, LayerRange layers) {
    Probe probe(backend, options);
    LoadOptions load = options.load;
    load.layers = layers;
    load.max_head_rows = probe.rows_;
    load.progress = nullptr;
    TREADLE_ASSIGN_OR_RETURN(probe.model_, Model::Load(checkpoint, backend, load));
    const ModelConfig& config = checkpoint.config();
    const int64_t context = load.max_context > 0 ? load.max_context : config.context;
    const auto position =
        static_cast<int32_t>(std::clamp<int64_t>(options.position, 0, context - 1));
    const int64_t pages_each = position / kPageSize + 1;
    const int64_t rows = probe.rows_;
    const int64_t chunk = std::clamp<int64_t>(options.prompt_tokens, 0,
                                              std::min(load.max_batch_tokens - rows, context));
    const int64_t tokens = probe.tokens_ = rows + chunk;
    const int64_t pages = rows * pages_each + (chunk + kPageSize - 1) / kPageSize;
    TREADLE_ASSIGN_OR_RETURN(
        probe.cache_,
        KvCache::Create(backend, *probe.model_,
                        {.page_size = kPageSize, .num_pages = pages, .dtype = options.kv_dtype}));
    TREADLE_ASSIGN_OR_RETURN(probe.hidden_,
                             backend.Allocate(tokens * config.hidden * sizeof(float)));
    TREADLE_ASSIGN_OR_RETURN(probe.logits_,
                             backend.Allocate(rows * probe.model_->vocab().size() * sizeof(float)));
    probe.ids_.assign(tokens, 0);
    probe.positions_.assign(rows, position);
    for (int64_t page = 0; page < pages; ++page) {
      probe.pages_.push_back(static_cast<int32_t>(page));
    }
    for (int64_t row = 0; row < rows; ++row) {
      probe.sequences_.push_back(
          {static_cast<int32_t>(row), 1, position, probe.pages_.data() + row * pages_each});
    }
    for (int64_t i = 0; i < chunk; ++i) probe.positions_.push_back(static_cast<int32_t>(i));
    if (chunk > 0) {
      probe.sequences_.push_back({static_cast<int32_t>(rows), static_cast<int32_t>(chunk), 0,
                                  probe.pages_.data() + rows * pages_each});
    }
    for (int64_t i = 0; i < tokens * config.hidden; ++i) {
      probe.input_.push_back(0.01f * static_cast<float>(1 + i % 97) - 0.5f);
    }
    return probe;
  }

  struct Seconds {
    double layer = 0;
    double head = 0;
  };

  const Model& model() const { return *model_; }
  const KvLayout& layout() const { return cache_->layout(); }

  // The fastest of some iterations: others who take the core do not show. `others`: bytes of the
  // weights that an iteration reads besides.
  absl::StatusOr<Seconds> Measure(uint64_t others) {
    CacheSweep sweep(others);
    std::vector<double> layer, head;
    const Clock::time_point start = Clock::now();
    for (size_t run = 0;; ++run) {
      sweep.Run();
      const Clock::time_point begin = Clock::now();
      TREADLE_RETURN_IF_ERROR(Forward());
      const Clock::time_point middle = Clock::now();
      sweep.Run();
      const Clock::time_point resumed = Clock::now();
      TREADLE_RETURN_IF_ERROR(Head());
      const Clock::time_point end = Clock::now();
      if (run < kWarmUp) continue;
      layer.push_back(std::chrono::duration<double>(middle - begin).count());
      head.push_back(std::chrono::duration<double>(end - resumed).count());
      const bool enough = layer.size() >= kFewest && end - start > kEnough;
      if (enough || layer.size() == kMost)
        return Seconds{*std::ranges::min_element(layer), *std::ranges::min_element(head)};
    }
  }

 private:
  Probe(Backend& backend, const CostOptions& options)
      : backend_(&backend),
        rows_(std::clamp<int64_t>(options.rows, 1, options.load.max_batch_tokens)),
        solo_(options.load.shard) {}

  absl::Status Forward() {
    // Numbers that no kernel has a shorter way for.
    backend_->CopyToDevice(hidden_.data(), input_.data(), hidden_.bytes());
    Communicator* const ranks = solo_.size() > 1 ? &solo_ : nullptr;
    const absl::Status status =
        model_->Forward({ids_, positions_, sequences_}, cache_->pages(), ranks, Hidden(tokens_));
    TREADLE_RETURN_IF_ERROR(status);
    return backend_->Synchronize();
  }

  // Norm, head, and the choice of the likeliest token.
  absl::Status Head() {
    const ShardRange vocab = model_->vocab();
    const Tensor logits = DenseTensor(logits_.data(), DType::kF32, rows_, vocab.size());
    const std::vector<SampleRow> asked(rows_, SampleRow{.parameters = &greedy_});
    std::vector<SampleResult> results(rows_);
    std::vector<ShardSample> shards(rows_);
    model_->Head(Hidden(rows_), logits);
    if (solo_.size() > 1) {
      backend_->SampleShard(logits, static_cast<int32_t>(vocab.begin), asked, shards);
    } else {
      backend_->Sample(logits, asked, results);
    }
    return backend_->Synchronize();
  }

  Tensor Hidden(int64_t rows) const {
    return DenseTensor(hidden_.data(), DType::kF32, rows, model_->config().hidden);
  }

  Backend* backend_;
  int64_t rows_;        // that pass through the head
  int64_t tokens_ = 0;  // these, and the chunk's
  SoloCommunicator solo_;
  std::unique_ptr<Model> model_;
  std::optional<KvCache> cache_;
  std::vector<int32_t> ids_, positions_;  // [tokens]
  std::vector<int32_t> pages_;            // of each sequence
  std::vector<SequenceSpan> sequences_;   // into pages_; the last one may be a chunk
  std::vector<float> input_;              // [tokens, hidden]
  Buffer hidden_;                         // [tokens, hidden]
  Buffer logits_;                         // [rows, vocab of the shard]
  SamplingParameters greedy_{.temperature = 0};
};

uint64_t Minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Packed bytes of a model's parts, told apart by what differs between loaded ranges.
struct PackedBytes {
  uint64_t tables = 0;  // in every range
  uint64_t last_layer = 0;
  uint64_t embedding = 0;
};

uint64_t Scaled(uint64_t bytes, double ratio) {
  return static_cast<uint64_t>(static_cast<double>(bytes) * ratio + 0.5);
}

// For three layers or more. `tail`: the last layer with the head.
absl::StatusOr<PackedBytes> DifferencesOfRanges(
    const std::vector<double>& stored, bool tied, uint64_t tail,
    const std::function<absl::StatusOr<uint64_t>(LayerRange)>& load) {
  const size_t last = stored.size() - 1;
  TREADLE_ASSIGN_OR_RETURN(const uint64_t one, load({1, 2}));
  TREADLE_ASSIGN_OR_RETURN(const uint64_t two, load({1, 3}));
  PackedBytes packed;
  if (last == 2) {  // the second of the two has the head
    packed.tables = Minus(one + tail, two);
  } else {
    const double ratio = stored[2] / stored[1];
    packed.tables = Scaled(Minus(Scaled(one, 1 + ratio), two), 1 / ratio);
  }
  const uint64_t layer = Minus(one, packed.tables);
  packed.last_layer = Scaled(layer, stored[last] / stored[1]);
  if (tied) {
    packed.embedding = Minus(tail, packed.tables + packed.last_layer);
  } else {
    TREADLE_ASSIGN_OR_RETURN(const uint64_t first, load({0, 1}));
    packed.embedding = Minus(first, packed.tables + Scaled(layer, stored[0] / stored[1]));
  }
  return packed;
}

absl::StatusOr<PackedBytes> MeasureBytes(const Checkpoint& checkpoint, Backend& backend,
                                         const CostOptions& options,
                                         const std::vector<double>& stored, uint64_t tail) {
  const bool tied = checkpoint.config().tied_head;
  const bool told = std::ranges::all_of(stored, [](double bytes) { return bytes > 0; });
  if (stored.size() >= 3 && told) {
    return DifferencesOfRanges(
        stored, tied, tail, [&](LayerRange layers) -> absl::StatusOr<uint64_t> {
          LoadOptions part = options.load;
          part.layers = layers;
          part.progress = nullptr;
          TREADLE_ASSIGN_OR_RETURN(const auto model, Model::Load(checkpoint, backend, part));
          return model->weight_bytes();
        });
  }
  // Too few layers to see one alone: as the file divides them.
  double rest = 0;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (LayerOf(tensor.name, checkpoint.config().layers) >= 0) continue;
    rest += static_cast<double>(tensor.bytes + tensor.constant_bytes);
  }
  if (!tied && stored.size() > 1) rest /= 2;  // the head's half
  PackedBytes packed;
  packed.last_layer = Scaled(tail, stored.back() / std::max(stored.back() + rest, 1.0));
  packed.embedding = Minus(tail, packed.last_layer);
  return packed;
}

}  // namespace

absl::StatusOr<PlacementCosts> MeasureCosts(const Checkpoint& checkpoint, Backend& backend,
                                            const CostOptions& options) {
  const ModelConfig& config = checkpoint.config();
  const int64_t last = config.layers - 1;
  TREADLE_ASSIGN_OR_RETURN(Probe tail,
                           Probe::Create(checkpoint, backend, options, {last, last + 1}));
  TREADLE_ASSIGN_OR_RETURN(const Probe::Seconds seconds, tail.Measure(checkpoint.file_bytes()));
  PlacementCosts costs;
  costs.head.seconds = seconds.head;
  const std::vector<double> stored = StoredBytes(checkpoint);
  const uint64_t tail_bytes = tail.model().weight_bytes();
  TREADLE_ASSIGN_OR_RETURN(const PackedBytes packed,
                           MeasureBytes(checkpoint, backend, options, stored, tail_bytes));
  costs.embedding.weight_bytes = packed.embedding;
  costs.head.weight_bytes = Minus(tail_bytes, packed.tables + packed.last_layer);
  costs.table_bytes = packed.tables;
  if (config.tied_head || config.layers == 1) {
    costs.shared_bytes = std::min(costs.embedding.weight_bytes, costs.head.weight_bytes);
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const double ratio = stored[last] > 0 ? stored[layer] / stored[last] : 1;
    costs.layers.push_back({seconds.layer * ratio, Scaled(packed.last_layer, ratio)});
  }
  costs.kv_bytes_per_token = tail.layout().PageBytes() / kPageSize;
  costs.activation_bytes = tail.model().activation_bytes();
  costs.link_bytes = ActivationLink::BufferBytes(
      {.hidden = config.hidden, .max_batch_tokens = options.load.max_batch_tokens});
  return costs;
}

}  // namespace treadle
