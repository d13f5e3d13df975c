#include "engine/placement.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t LayersOf(const PlacementCosts& costs) { return static_cast<int64_t>(costs.layers.size()); }

int64_t MostStages(const PlacementCosts& costs) {
  return costs.last_begin < LayersOf(costs) ? costs.last_begin + 1 : LayersOf(costs);
}

PlacedStage StageOf(const PlacementCosts& costs, LayerRange layers, int stages) {
  PlacedStage stage{.layers = layers, .weight_bytes = costs.table_bytes};
  const auto add = [&stage](const PlacementCosts::Part& part) {
    stage.seconds += part.seconds;
    stage.weight_bytes += part.weight_bytes;
  };
  if (layers.begin == 0) add(costs.embedding);
  for (int64_t layer = layers.begin; layer < layers.end; ++layer) add(costs.layers[layer]);
  if (layers.end == LayersOf(costs)) {
    add(costs.head);
    if (layers.begin == 0) stage.weight_bytes -= costs.shared_bytes;
  }
  stage.other_bytes = costs.activation_bytes + (stages > 1 ? costs.link_bytes : 0);
  stage.kv_bytes_per_token = costs.kv_bytes_per_token * (layers.end - layers.begin);
  return stage;
}

uint64_t LeastBytes(const PlacedStage& stage, const PlacementMemory& memory) {
  return stage.weight_bytes + stage.other_bytes + stage.kv_bytes_per_token * memory.page_size;
}

bool Fits(const PlacedStage& stage, const PlacementMemory& memory) {
  return memory.device_bytes == 0 || LeastBytes(stage, memory) <= memory.device_bytes;
}

// Best totals over all ways to cut the first layers into stages, by dynamic programming.
class Cuts {
 public:
  Cuts(const PlacementCosts& costs, int stages, const PlacementMemory& memory)
      : costs_(costs), layers_(LayersOf(costs)), stages_(stages) {
    const size_t ranges = (layers_ + 1) * (layers_ + 1);
    seconds_.assign(ranges, kInfinity);
    for (int64_t begin = 0; begin < MostStages(costs); ++begin) {
      for (int64_t end = begin + 1; end <= layers_; ++end) {
        const PlacedStage stage = StageOf(costs, {begin, end}, stages);
        if (Fits(stage, memory)) Seconds(begin, end) = stage.seconds;
      }
    }
  }

  // Nothing if no way of cutting fits.
  std::optional<std::vector<PlacedStage>> Best() {
    const double slowest =
        Solve(kInfinity, [](double total, double seconds) { return std::max(total, seconds); });
    if (slowest == kInfinity) return std::nullopt;
    Solve(slowest, [](double total, double seconds) { return total + seconds * seconds; });
    std::vector<PlacedStage> placed(stages_);
    int64_t end = layers_;
    for (int stage = stages_ - 1; stage >= 0; --stage) {
      const int64_t begin = cut_[stage * (layers_ + 1) + end];
      placed[stage] = StageOf(costs_, {begin, end}, stages_);
      end = begin;
    }
    return placed;
  }

 private:
  double& Seconds(int64_t begin, int64_t end) { return seconds_[begin * (layers_ + 1) + end]; }

  // The least of combine(... combine(0, first stage) ..., last stage) with no stage above `limit`;
  // cut_ then says how. Ties go to the earliest cut.
  template <typename Combine>
  double Solve(double limit, Combine combine) {
    cut_.assign(stages_ * (layers_ + 1), 0);
    std::vector<double> best(layers_ + 1, kInfinity);  // of the stages so far, over [0, end)
    best[0] = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      std::vector<double> next(layers_ + 1, kInfinity);
      for (int64_t end = stage + 1; end <= layers_; ++end) {
        for (int64_t begin = stage; begin < end; ++begin) {
          const double seconds = Seconds(begin, end);
          if (best[begin] == kInfinity || seconds == kInfinity || seconds > limit) continue;
          const double total = combine(best[begin], seconds);
          if (total < next[end]) {
            next[end] = total;
            cut_[stage * (layers_ + 1) + end] = begin;
          }
        }
      }
      best = std::move(next);
    }
    return best[layers_];
  }

  const PlacementCosts& costs_;
  const int64_t layers_;
  const int stages_;
  std::vector<double> seconds_;  // [layers + 1][layers + 1] of a stage; infinite if it does not fit
  std::vector<int64_t> cut_;     // [stages][layers + 1]: where the stage that ends there begins
};

// An error that names what would fit instead.
absl::Status DoesNotFit(const PlacementCosts& costs, int stages, const PlacementMemory& memory) {
  const std::string problem =
      Str("the model does not fit: ", stages, stages == 1 ? " stage" : " stages",
          " with a device memory of ", memory.device_bytes, " bytes per rank");
  const auto layers = static_cast<int>(LayersOf(costs));
  for (int more = stages + 1; more <= layers; ++more) {
    if (Cuts(costs, more, memory).Best()) {
      return ResourceExhausted(problem, "; ", more, " stages would do");
    }
  }
  uint64_t least = 0;  // of the largest stage of the finest cut
  for (int64_t layer = 0; layer < layers; ++layer) {
    least = std::max(least, LeastBytes(StageOf(costs, {layer, layer + 1}, layers), memory));
  }
  return ResourceExhausted(problem, "; nor would any number of stages do: even with ", layers,
                           ", of a layer each, one needs ", least,
                           " bytes; a higher tensor-parallel degree or smaller weights might");
}

}  // namespace

uint64_t PlacedStage::KvBytes(const PlacementMemory& memory) const {
  const uint64_t taken = weight_bytes + other_bytes;
  return memory.device_bytes > taken ? memory.device_bytes - taken : 0;
}

int64_t PlacedStage::KvTokens(const PlacementMemory& memory) const {
  if (kv_bytes_per_token == 0) return 0;
  const auto tokens = static_cast<int64_t>(KvBytes(memory) / kv_bytes_per_token);
  return tokens / memory.page_size * memory.page_size;
}

absl::StatusOr<std::vector<PlacedStage>> PlaceLayers(const PlacementCosts& costs, int stages,
                                                     const PlacementMemory& memory) {
  TREADLE_CHECK(!costs.layers.empty() && memory.page_size > 0);
  const int64_t most = MostStages(costs);
  if (stages < 1 || stages > most) {
    return InvalidArgument(stages, " pipeline stages: expected 1 to ", most,
                           ", since each has at least one of the model's layers",
                           most < LayersOf(costs) ? ", and some read K/V of earlier ones" : "",
                           "; the nearest that can be is ", std::clamp<int64_t>(stages, 1, most));
  }
  std::optional<std::vector<PlacedStage>> placed = Cuts(costs, stages, memory).Best();
  if (!placed) return DoesNotFit(costs, stages, memory);
  return *std::move(placed);
}

double Balance(const std::vector<PlacedStage>& stages) {
  double sum = 0, slowest = 0;
  for (const PlacedStage& stage : stages) {
    sum += stage.seconds;
    slowest = std::max(slowest, stage.seconds);
  }
  return slowest > 0 ? sum / (slowest * static_cast<double>(stages.size())) : 1;
}

}  // namespace treadle
