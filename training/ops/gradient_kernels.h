// The vector kernels of CpuGradients, one thread's share each (kernels/cpu/isa_kernel.h). Formulas:
// gradient_ops.h. Thread safety: pure functions.
#pragma once

#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// product_kernel.h. b: [k, n]; c: [m, n].
struct ProductArguments {
  const float* a;
  int64_t a_row, a_step;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t m, n, k;
};
TREADLE_ISA_KERNEL(AddProductRange, void(const ProductArguments&));

TREADLE_ISA_KERNEL(RmsNormGradientRow, void(const float* x, const float* weight, float eps,
                                            const float* dy, float* dx, int64_t cols));
TREADLE_ISA_KERNEL(SwiGluGradientRow, void(const float* gate, const float* up, const float* dout,
                                           float* dgate, float* dup, int64_t cols));
TREADLE_ISA_KERNEL(GeGluGradientRow, void(const float* gate, const float* up, const float* dout,
                                          float* dgate, float* dup, int64_t cols));
// One head by one position's angles.
TREADLE_ISA_KERNEL(RotateBackHead,
                   void(const float* cos, const float* sin, float* head, int64_t half_dim));
// Logits become scale * softmax(logits). Gives the largest logit and the sum of exponentials of the
// distances from it.
struct SoftmaxSum {
  float top;
  float sum;
};
TREADLE_ISA_KERNEL(SoftmaxRow, SoftmaxSum(float* logits, float scale, int64_t cols));

// All query heads of one sequence that read one K/V head.
struct AttentionGradientArguments {
  const float* q;     // [rows, heads * dim], this group's first column; likewise dout, dq
  const float* dout;  // of the same strides as dq
  float* dq;
  int64_t q_stride, dout_stride, dq_stride;
  float* dk;  // [rows, kv_heads * dim], this head's first column
  float* dv;
  int64_t dkv_stride;
  const float* keys;               // [rows, dim]
  const float* keys_transposed;    // [dim, rows]
  const float* values_transposed;  // [dim, rows]
  float* scores;                   // [kAttentionGradientRows, rows], scratch
  float* dscores;                  // likewise
  int64_t rows, dim, heads;        // heads: of the group
  int64_t window;                  // KvView::window
  float scale;
};
inline constexpr int64_t kAttentionGradientRows = 64;
TREADLE_ISA_KERNEL(AttentionGradientGroup, void(const AttentionGradientArguments&));

}  // namespace treadle
