// The kernels of attention_warpgroups.h for bf16 caches.
#include "kernels/cuda/attention/attention_warpgroups.h"

template treadle::cuda::AttentionCode treadle::cuda::WarpgroupAttention<treadle::DType::kBF16>(
    int64_t);
