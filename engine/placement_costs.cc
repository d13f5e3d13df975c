#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "base/number.h"
#include "base/status.h"
#include "engine/activation_link.h"
#include "engine/kv/kv_cache.h"
#include "engine/placement.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPageSize = 32;  // of the measurement's cache
constexpr size_t kWarmUp = 2;
constexpr size_t kMinRuns = 8;
constexpr size_t kMaxRuns = 25;
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
  void Abort(absl::Status) override {}

 private:
  const Shard shard_;
};

// [layers] bytes in the file.
std::vector<double> StoredBytes(const Checkpoint& checkpoint) {
  const Architecture& architecture = ArchitectureOf(checkpoint.config());
  std::vector<double> stored(checkpoint.config().layers, 0);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const auto layer =
        NumberIn<size_t>(ParseTensorName(architecture, checkpoint.kind(), tensor.name).layer);
    if (!layer || *layer >= stored.size()) continue;
    stored[*layer] += static_cast<double>(tensor.bytes + tensor.constant_bytes);
  }
  return stored;
}

// Reads memory as the rest of an iteration would: a layer that is measured over and over would find
// its weights in caches where it does not find them between all the others.
class CacheSweep {
 public:
  explicit CacheSweep(uint64_t bytes)
      : words_(std::min(bytes, kMaxSwept) / sizeof(uint64_t), 1) {}  // ones: pages of its own
  void Run() {
    uint64_t sum = 0;
    for (const uint64_t word : words_) sum += word;
    sum_ = sum;
  }

 private:
  static constexpr uint64_t kMaxSwept = uint64_t{128} << 20;
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
    TREADLE_ASSIGN_OR_RETURN(probe.cache_, KvCache::Create(backend, *probe.model_,
                                                           {.page_size = kPageSize,
                                                            .num_pages = {pages, pages},
                                                            .dtype = options.kv_dtype}));
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
      const bool enough = layer.size() >= kMinRuns && end - start > kEnough;
      if (enough || layer.size() == kMaxRuns)
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

}  // namespace

absl::StatusOr<PlacementCosts> MeasureCosts(const Checkpoint& checkpoint, Backend& backend,
                                            const CostOptions& options) {
  const ModelConfig& config = checkpoint.config();
  // The last layer, with those that it reads the K/V of.
  const int64_t last = config.LastStageBegin();
  TREADLE_ASSIGN_OR_RETURN(Probe tail,
                           Probe::Create(checkpoint, backend, options, {last, config.layers}));
  TREADLE_ASSIGN_OR_RETURN(const Probe::Seconds seconds, tail.Measure(checkpoint.file_bytes()));
  PlacementCosts costs;
  costs.head.seconds = seconds.head;
  const Model& model = tail.model();
  const uint64_t outside = costs.head.weight_bytes = model.outside_bytes();
  costs.table_bytes = model.table_bytes();
  costs.embedding.weight_bytes = outside;
  if (config.tied_head || config.layers == 1) {
    costs.shared_bytes = outside;
  } else {
    LoadOptions first = options.load;
    first.layers = {0, 1};
    first.progress = nullptr;
    TREADLE_ASSIGN_OR_RETURN(const auto begin, Model::Load(checkpoint, backend, first));
    costs.embedding.weight_bytes = begin->outside_bytes();
  }
  const auto layer_bytes = static_cast<double>(model.weight_bytes() - costs.table_bytes - outside);
  if (config.layer_embedding > 0) {  // all stages have what is outside of layers
    costs.table_bytes += outside;
    costs.embedding.weight_bytes = costs.head.weight_bytes = costs.shared_bytes = 0;
  }
  costs.last_begin = last;
  const std::vector<double> stored = StoredBytes(checkpoint);
  const double measured = std::accumulate(stored.begin() + last, stored.end(), 0.0);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const double ratio = measured > 0 ? stored[layer] / measured : 1;
    costs.layers.push_back(
        {seconds.layer * ratio, static_cast<uint64_t>(layer_bytes * ratio + 0.5)});
  }
  costs.kv_bytes_per_token = tail.layout().PageBytes() / kPageSize;
  costs.activation_bytes = model.activation_bytes();
  costs.link_bytes = ActivationLink::BufferBytes(
      {.hidden = config.hidden, .max_batch_tokens = options.load.max_batch_tokens});
  return costs;
}

}  // namespace treadle
