// The reference's ops of mixtures of experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/reference/reference_backend.h"

namespace treadle {

void ReferenceBackend::Route(Tensor logits, bool normalize, Tensor ids, Tensor weights) {
  for (int64_t row = 0; row < logits.rows; ++row) {
    const std::span<const float> x(logits.Row<float>(row), static_cast<size_t>(logits.cols));
    std::vector<int64_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int64_t id) { return std::isnan(x[id]) ? -INFINITY : x[id]; };
    std::ranges::stable_sort(order, std::ranges::greater(), key);
    double sum = 0;
    for (int64_t j = 0; j < (normalize ? weights.cols : logits.cols); ++j) {
      sum += std::exp(double{x[order[j]]} - x[order[0]]);
    }
    for (int64_t j = 0; j < weights.cols; ++j) {
      ids.Row<float>(row)[j] = static_cast<float>(order[j]);
      const double power = std::exp(double{x[order[j]]} - x[order[0]]);
      weights.Row<float>(row)[j] = static_cast<float>(power / sum);
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
