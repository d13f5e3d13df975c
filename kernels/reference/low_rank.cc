// The reference's op of adapters.
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace treadle {

void ReferenceBackend::AddLowRank(Tensor x, std::span<const LowRankProduct> products) {
  for (const auto& [by, rows, out] : products) {
    for (const int32_t row : rows) {
      std::vector<double> inner(static_cast<size_t>(by.rank));
      for (int64_t j = 0; j < by.rank; ++j) {
        double& sum = inner[static_cast<size_t>(j)];
        if (by.a == nullptr) sum = x.Row<float>(row)[j];
        for (int64_t i = 0; by.a != nullptr && i < x.cols; ++i) {
          sum += double{x.Row<float>(row)[i]} * LoadElement(by.type, by.a, LowRankAt(x.cols, i, j));
        }
      }
      for (int64_t i = 0; i < out.cols; ++i) {
        double sum = out.Row<float>(row)[i];
        for (int64_t j = 0; j < by.rank; ++j) {
          sum +=
              inner[static_cast<size_t>(j)] * LoadElement(by.type, by.b, LowRankAt(by.rank, j, i));
        }
        out.Row<float>(row)[i] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace treadle
