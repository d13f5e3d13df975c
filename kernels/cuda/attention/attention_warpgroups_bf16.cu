// The kernels of attention_warpgroups.h for bf16 caches.
#include "kernels/cuda/attention/attention_warpgroups.h"

namespace treadle::cuda {

AttentionCode WarpgroupAttentionBf16(int64_t head_dim) {
  return WarpgroupAttention<DType::kBF16>(head_dim);
}

}  // namespace treadle::cuda
