// The reference's ops of mixtures of experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

// Leaves the keys of experts outside the used groups, whose scores are sums of the `counted`
// largest keys, at less than all others.
void KeepUsedGroups(const Routing& routing, int64_t counted, std::vector<float>& keys) {
  const int64_t each = std::ssize(keys) / routing.groups;
  std::vector<int64_t> order(static_cast<size_t>(routing.groups));
  std::iota(order.begin(), order.end(), 0);
  const auto score = [&](int64_t group) {
    std::vector<float> own(keys.begin() + group * each, keys.begin() + (group + 1) * each);
    std::ranges::sort(own, std::ranges::greater());
    return counted == 1 ? own[0] : own[0] + own[1];
  };
  std::ranges::stable_sort(order, std::ranges::greater(), score);
  for (int64_t i = routing.used_groups; i < routing.groups; ++i) {
    std::fill_n(keys.begin() + order[i] * each, each, -INFINITY);
  }
}

}  // namespace

void ReferenceBackend::Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) {
  for (int64_t row = 0; row < logits.rows; ++row) {
    const std::span<const float> x(logits.Row<float>(row), static_cast<size_t>(logits.cols));
    std::vector<int64_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    const auto sigmoid = [&](int64_t id) { return 1 / (1 + std::exp(-double{x[id]})); };
    const bool scored = routing.sigmoid && (routing.bias != nullptr || routing.groups > 1);
    std::vector<float> keys;
    for (int64_t id = 0; id < logits.cols; ++id) {
      const float bias = routing.bias == nullptr ? 0 : routing.bias[id];
      const float key = scored ? static_cast<float>(sigmoid(id)) + bias : x[id];
      keys.push_back(std::isnan(key) ? -INFINITY : key);
    }
    if (routing.groups > 1) KeepUsedGroups(routing, routing.sigmoid ? 2 : 1, keys);
    std::ranges::stable_sort(order, std::ranges::greater(), [&](int64_t id) { return keys[id]; });
    const auto score = [&](int64_t id) {
      return routing.sigmoid ? sigmoid(id) : std::exp(double{x[id]} - x[order[0]]);
    };
    double sum = 0;
    for (int64_t j = 0; j < (routing.normalize ? weights.cols : logits.cols); ++j) {
      sum += score(order[j]);
    }
    if (routing.sigmoid && !routing.normalize) sum = 1;
    for (int64_t j = 0; j < weights.cols; ++j) {
      ids.Row<float>(row)[j] = static_cast<float>(order[j]);
      const double own = routing.expert_scales == nullptr ? 1 : routing.expert_scales[order[j]];
      weights.Row<float>(row)[j] = static_cast<float>(score(order[j]) / sum * routing.scale * own);
    }
  }
}

void ReferenceBackend::Mix(Tensor x, std::span<const int32_t> places, Tensor weights,
                           bool accumulate, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      double sum = accumulate ? out.Row<float>(row)[i] : 0;
      for (int64_t j = 0; j < weights.cols; ++j) {
        const int64_t from = places[row * weights.cols + j];
        sum += double{weights.Row<float>(row)[j]} * x.Row<float>(from)[i];
      }
      out.Row<float>(row)[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace treadle
