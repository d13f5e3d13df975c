#include "models/architectures/llama_names.h"

namespace treadle {

std::vector<int32_t> HalfSplitOrder(int64_t heads, int64_t head_dim, int64_t rope_dim) {
  std::vector<int32_t> order;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t i = 0; i < head_dim; ++i) {
      const int64_t half = rope_dim / 2;
      const int64_t row = i < half ? 2 * i : i < rope_dim ? 2 * (i - half) + 1 : i;
      order.push_back(static_cast<int32_t>(head * head_dim + row));
    }
  }
  return order;
}

}  // namespace treadle
