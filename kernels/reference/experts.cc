// The reference's ops of mixtures of experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/reference/reference_backend.h"

namespace treadle {

void ReferenceBackend::Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) {
  for (int64_t row = 0; row < logits.rows; ++row) {
    const std::span<const float> x(logits.Row<float>(row), static_cast<size_t>(logits.cols));
    std::vector<int64_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    const auto sigmoid = [&](int64_t id) { return 1 / (1 + std::exp(-double{x[id]})); };
    const auto key = [&](int64_t id) {
      const bool biased = routing.sigmoid && routing.bias != nullptr;
      const float key = biased ? static_cast<float>(sigmoid(id)) + routing.bias[id] : x[id];
      return std::isnan(key) ? -INFINITY : key;
    };
    std::ranges::stable_sort(order, std::ranges::greater(), key);
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
      weights.Row<float>(row)[j] = static_cast<float>(score(order[j]) / sum * routing.scale);
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
