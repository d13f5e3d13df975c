#include "bench/simulate/roofline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/number.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

constexpr double kActivationBytes = 2;  // of an element between ranks and stages

// What a plan's steps do, with at most `window` positions seen by a row; 0: all.
struct Work {
  double positions = 0;  // that all rows read, each its own and all before it
  double read = 0;       // of the cache: each step's rows share what they read
};

Work WorkIn(const IterationPlan& plan, int64_t window) {
  Work work;
  for (const Step& step : plan.steps) {
    const auto rows = static_cast<double>(step.num_tokens);
    double mean = step.first_position + (rows + 1) / 2, last = step.first_position + rows;
    if (window > 0) {
      mean = std::min(mean, static_cast<double>(window));
      last = std::min(last, static_cast<double>(window) + rows - 1);
    }
    work.positions += rows * mean;
    work.read += last;
  }
  return work;
}

}  // namespace

absl::StatusOr<Roofline> Roofline::Of(const Checkpoint& checkpoint,
                                      const RooflineOptions& options) {
  Roofline roofline;
  roofline.options_ = options;
  const ModelConfig& config = roofline.config_ = checkpoint.config();
  const Hardware& hardware = options.hardware;
  if (options.stages < 1 || options.stages > config.layers) {
    return InvalidArgument("--pipeline-parallel is ", options.stages, ", expected 1 to ",
                           config.layers, ", the layers of ", checkpoint.path());
  }
  if (options.tensor_parallel < 1 || options.tensor_parallel > hardware.per_host) {
    return InvalidArgument("--tensor-parallel is ", options.tensor_parallel, ", expected 1 to ",
                           hardware.per_host, ", the GPUs of a host");
  }
  TREADLE_RETURN_IF_ERROR(
      CheckShard(checkpoint, options.weights, static_cast<int>(options.tensor_parallel)));
  // Layers in equal parts, the first stages one more where they do not divide.
  std::vector<Stage>& stages = roofline.stages_;
  stages.resize(options.stages);
  std::vector<int64_t> stage_of(config.layers);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    stage_of[layer] = layer * options.stages / config.layers;
    ++stages[stage_of[layer]].layers;
    if (config.Local(layer)) ++stages[stage_of[layer]].local_layers;
  }
  const Architecture& architecture = ArchitectureOf(config);
  const auto ranks = static_cast<double>(options.tensor_parallel);
  double first_only = 0, positions = 0;  // bytes of embeddings, which no product reads
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const TensorName name = ParseTensorName(architecture, checkpoint.kind(), tensor.name, &config);
    if (name.row == nullptr) continue;
    const double bytes =
        static_cast<double>(options.weights.EstimateBytes(tensor, checkpoint)) / ranks;
    const double operations = 2.0 * static_cast<double>(tensor.Elements()) / ranks;
    const Part part = name.row->part;
    const auto layer = NumberIn<int64_t>(name.layer);
    if (layer && *layer < config.layers) {
      Stage& stage = stages[stage_of[*layer]];
      const double share = InExperts(part) ? static_cast<double>(config.experts_per_token) /
                                                 static_cast<double>(config.experts)
                                           : 1;
      (InExperts(part) ? stage.experts : stage.weights) += bytes;
      if (tensor.shape.size() > 1) stage.operations += share * operations;
      continue;
    }
    if (part == Part::kPositions) positions += bytes;
    if (part == Part::kEmbedding || part == Part::kPositions) first_only += bytes;
    if (part == Part::kHead || (part == Part::kEmbedding && config.tied_head)) {
      stages.back().head_weights += bytes;
      stages.back().head_operations += operations;
    }
  }
  // Every stage has the same pages, of its own layers: as many as the fullest one has room for.
  const double room = hardware.memory * options.efficiency.memory;
  double kv_bytes = std::numeric_limits<double>::infinity();  // of all layers and ranks
  for (int64_t i = 0; i < options.stages; ++i) {
    const Stage& stage = stages[i];
    double weights = stage.weights + stage.experts + stage.head_weights;
    if (i == 0) weights += options.stages == 1 && config.tied_head ? positions : first_only;
    const double here = (room - weights) * ranks * static_cast<double>(config.layers) /
                        static_cast<double>(stage.layers);
    if (here >= kv_bytes) continue;
    kv_bytes = here;
    roofline.fullest_weights_ = weights;
  }
  KvMemoryRequest request{.kv_bytes = std::max<int64_t>(1, static_cast<int64_t>(kv_bytes)),
                          .max_batch_size = INT32_MAX,
                          .max_batch_tokens = options.max_batch_tokens,
                          .max_context = roofline.max_context(),
                          .kv_dtype = options.kv_dtype,
                          .tensor_parallel = options.tensor_parallel};
  const auto kv = PlanKvMemory(config, request);
  if (kv.ok()) {
    roofline.kv_ = *kv;
    return roofline;
  }
  if (!absl::IsResourceExhausted(kv.status())) return kv.status();
  const KvMemoryPlan one =
      KvMemoryOf(config, request, KvMemoryOf(config, request, {}).pages_per_request);
  const double needs = static_cast<double>(options.weights.EstimateBytes(checkpoint)) +
                       static_cast<double>(one.bytes);
  return ResourceExhausted(absl::StrFormat(
      "%s with one request of %d tokens takes %.1f GB, and %d x %d %s have %.1f GB for that (%.0f "
      "%% of "
      "their memory); expected at least %d of them, another --hardware, or fewer bits a weight "
      "(--weights)",
      checkpoint.path(), request.max_context, needs * 1e-9, options.stages, options.tensor_parallel,
      std::string(hardware.name), room * ranks * static_cast<double>(options.stages) * 1e-9,
      100 * options.efficiency.memory, static_cast<int64_t>(std::ceil(needs / room))));
}

double Roofline::Terms::Seconds() const {
  return std::max(weights, operations) + std::max(kv, attention) + all_reduce + overhead;
}

Roofline::Terms Roofline::TermsOf(const IterationPlan& plan, int64_t padding, int stage) const {
  const Stage& at = stages_[static_cast<size_t>(stage)];
  const Efficiency& part = options_.efficiency;
  const double bandwidth = options_.hardware.bandwidth * part.bandwidth;
  const double operations = options_.hardware.operations * part.operations;
  const auto ranks = static_cast<double>(options_.tensor_parallel);
  const auto asked = static_cast<double>(plan.num_tokens());
  const double rows = asked + static_cast<double>(padding);
  const double grown = rows / asked;  // by padding
  double samples = 0;
  for (const Step& step : plan.steps) samples += static_cast<double>(step.outputs.size());

  Terms terms;
  double weights = at.weights;
  if (config_.experts > 0) {  // those that some row goes to, if rows choose independently
    const double share =
        static_cast<double>(config_.experts_per_token) / static_cast<double>(config_.experts);
    weights += at.experts * (1 - std::pow(1 - share, rows));
  }
  if (samples > 0) weights += at.head_weights;
  terms.weights = weights / bandwidth;
  terms.operations = (at.operations * rows + at.head_operations * samples) / operations;
  const double row_bytes =
      (config_.latent_dim > 0 ? 1.0 : 2.0) *
      static_cast<double>(std::max(config_.kv_heads, options_.tensor_parallel)) *
      static_cast<double>(config_.head_dim * SizeOf(options_.kv_dtype)) / ranks;
  const double row_operations = 4.0 * static_cast<double>(config_.heads * config_.head_dim) / ranks;
  for (const auto& [layers, window] : {std::pair(at.layers - at.local_layers, int64_t{0}),
                                       std::pair(at.local_layers, config_.window)}) {
    if (layers == 0) continue;
    const Work work = WorkIn(plan, window);
    const double times = grown * static_cast<double>(layers);
    terms.kv += times * work.read * row_bytes / bandwidth;
    terms.attention += times * work.positions * row_operations / operations;
  }
  const auto layers = static_cast<double>(at.layers);
  if (ranks > 1) {
    const double bytes = rows * static_cast<double>(config_.hidden) * kActivationBytes;
    terms.all_reduce = layers * 2 *
                       (part.all_reduce + 2 * (ranks - 1) / ranks * bytes /
                                              (options_.hardware.link * part.bandwidth));
  }
  terms.overhead = layers * part.layer + part.iteration;
  if (&at == &stages_.back()) terms.overhead += samples * part.sample;
  return terms;
}

double Roofline::Seconds(const IterationPlan& plan, int64_t padding, int stage) const {
  return TermsOf(plan, padding, stage).Seconds();
}

double Roofline::kv_bytes() const {
  return static_cast<double>(kv_.bytes) /
         static_cast<double>(options_.tensor_parallel * options_.stages);
}

std::string Roofline::Bound(int64_t sequences, int64_t position) const {
  IterationPlan plan;
  for (int64_t i = 0; i < sequences; ++i) {
    plan.steps.push_back({.first_position = static_cast<int32_t>(position),
                          .num_tokens = 1,
                          .outputs = {{.row = 0, .sample = true}}});
  }
  const Terms terms = TermsOf(plan, 0, static_cast<int>(stages_.size()) - 1);
  const std::pair<const char*, double> parts[] = {
      {terms.weights >= terms.operations ? "weights" : "operations",
       std::max(terms.weights, terms.operations)},
      {terms.kv >= terms.attention ? "K/V" : "attention", std::max(terms.kv, terms.attention)},
      {"all-reduces", terms.all_reduce},
      {"overheads", terms.overhead}};
  const auto& most = *std::ranges::max_element(parts, {}, &std::pair<const char*, double>::second);
  return absl::StrFormat("%s %.0f %%", most.first, 100 * most.second / terms.Seconds());
}

std::string Roofline::ToString() const {
  const Hardware& hardware = options_.hardware;
  const Efficiency& part = options_.efficiency;
  std::string out = absl::StrFormat(
      "%d stages x %d %s: %.0f GB, %.3f TB/s, %.0f TFLOP/s in 16 bits, links %.0f GB/s (%s)\n"
      "reached (%s): %.0f %% of the memory, %.0f %% of bandwidths, %.0f %% of operations; %.0f us "
      "a "
      "layer, %.0f us an all-reduce, %.0f us a hop, %.0f us a sample, %.1f ms an iteration (%s)\n"
      "a stage's iteration = max(weights, operations) + max(K/V read, attention) + all-reduces + "
      "overheads\n",
      options_.stages, options_.tensor_parallel, std::string(hardware.name), hardware.memory * 1e-9,
      hardware.bandwidth * 1e-12, hardware.operations * 1e-12, hardware.link * 1e-9,
      std::string(hardware.source), std::string(part.name), part.memory * 100, part.bandwidth * 100,
      part.operations * 100, part.layer * 1e6, part.all_reduce * 1e6, part.hop * 1e6,
      part.sample * 1e6, part.iteration * 1e3, std::string(part.source));
  return out + absl::StrFormat(
                   "each GPU holds %.1f GB of weights and %.1f GB of K/V: %d pages of %d tokens\n",
                   fullest_weights_ * 1e-9, kv_bytes() * 1e-9,
                   kv_.pages[PageKind::kWhole] + kv_.pages[PageKind::kWindow],
                   kv_.paging.page_size);
}

}  // namespace treadle
