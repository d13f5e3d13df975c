// The kernels of attention_warpgroups.h for f16 caches.
#include "kernels/cuda/attention/attention_warpgroups.h"

namespace treadle::cuda {

AttentionCode WarpgroupAttentionF16(int64_t head_dim) {
  return WarpgroupAttention<DType::kF16>(head_dim);
}

}  // namespace treadle::cuda
