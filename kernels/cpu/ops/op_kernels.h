// The table of vector kernels behind CpuOps, one per instruction set, and their plain arguments.
//
// Each function does one thread's share; CpuOps splits the work and owns all scratch. Only plain
// pointers and numbers cross this line, because the two sides are compiled with different
// instruction sets (see simd.h on linkage). Strides count elements.
//
// Thread safety: kernels are stateless; distinct shares may run at the same time.
#pragma once

#include <cstdint>

namespace treadle {

// RmsNorm (bias unused) and LayerNorm of `rows` rows. x, out: [rows, cols].
struct NormArguments {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t rows;
  int64_t cols;
  const float* weight;  // [cols]
  const float* bias;    // [cols] or null
  float eps;
};

// One token: rotates its q and k, and stores k and v into its slot.
struct RotateStoreArguments {
  float* q;        // [heads, head_dim]
  float* k;        // [kv_heads, head_dim]
  const float* v;  // [kv_heads, head_dim]
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  const float* cos;  // [half_dim] of this position; half_dim = 0: no rotation
  const float* sin;
  int64_t half_dim;
  bool half;     // the cache holds fp16, else f32
  void* k_slot;  // element [0, 0, slot] of the page's K part [kv_heads, head_dim, page_size]
  void* v_slot;  // element [0, slot, 0] of its V part [kv_heads, page_size, head_dim]
  int64_t page_size;
};

// Attention of consecutive rows of one sequence over one K/V head, for a range of blocks.
struct AttentionArguments {
  const float* q;  // [rows, group * head_dim], columns of wider rows
  int64_t q_stride;
  int64_t rows;
  int64_t group;  // query heads that share the K/V head
  int64_t head_dim;
  int64_t first_position;  // of row 0
  int64_t block_begin;     // in blocks of kAttentionBlock positions
  int64_t block_end;
  float scale;
  bool half;
  const void* k;        // this K/V head in page 0: [head_dim, page_size]
  const void* v;        // [page_size, head_dim]
  int64_t page_stride;  // elements from page to page
  int64_t page_size;
  const int32_t* pages;
  float* scratch;  // 64-byte aligned, attention_scratch_floats
  // If null, the blocks are all that the rows see, and `out` gets the result. Else only the partial
  // results (maximum, sum and vector of each query) of these blocks: attention_partial_floats each.
  float* partials;
  float* out;  // like q
  int64_t out_stride;
};

// Sampling's passes over (part of) a row of logits. NaN counts as -inf, +inf as the largest float.
struct SampleKernels {
  // Largest of x[0, n); -inf if none.
  float (*max)(const float* x, int64_t n);
  // Lowest i >= from with x[i] >= floor, or -1.
  int64_t (*first_at_least)(const float* x, int64_t from, int64_t n, float floor);
  // Sum of exp((x[i] - max) * factor) over x[0, n); meant for n of at most about a thousand.
  float (*sum_exp)(const float* x, int64_t n, float max, float factor);
  // Every i with floor <= x[i] < ceiling, ascending, to ids, and exp((x[i] - max) * factor) to
  // weights. Room for n + 16 of each. Returns how many.
  int64_t (*gather)(const float* x, int64_t n, float floor, float ceiling, float max, float factor,
                    int32_t* ids, float* weights);
};

struct OpKernels {
  void (*rms_norm)(const NormArguments&);
  void (*layer_norm)(const NormArguments&);
  void (*rotate_store)(const RotateStoreArguments&);
  void (*attention)(const AttentionArguments&);
  // Combines `partials` of the blocks [0, block_end), ascending, into `out`.
  void (*combine_attention)(const AttentionArguments&);
  // For rows * group queries.
  int64_t (*attention_scratch_floats)(int64_t queries, int64_t head_dim);
  int64_t (*attention_partial_floats)(int64_t queries, int64_t head_dim);
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t n);
  void (*gelu)(const float* x, float* out, int64_t n);
  void (*exp)(const float* x, float* out, int64_t n);
  SampleKernels sample;
};

namespace avx2 {
extern const OpKernels kOpKernels;
}
namespace avx512 {
extern const OpKernels kOpKernels;
}

}  // namespace treadle
