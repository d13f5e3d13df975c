// The vector kernels of attention and their plain arguments. Strides count elements.
#pragma once

#include <cstddef>

#include "kernels/cpu/isa_kernel.h"
#include "kernels/dtype.h"

namespace treadle {

// Attention of consecutive rows of one sequence over one K/V head, for a range of blocks.
struct AttentionArguments {
  const float* q;  // [rows, group * head_dim], columns of wider rows
  int64_t q_stride;
  int64_t rows;
  int64_t group;  // query heads that share the K/V head
  int64_t head_dim;
  int64_t value_dim;       // features of V, and of a head of `out`
  int64_t first_position;  // of row 0
  int64_t window;          // KvView::window
  const float* slopes;     // [group]: KvView::slopes; null: none
  const float* sinks;      // [group]: KvView::sinks; null: none
  int64_t block_begin;     // in blocks of kAttentionBlock positions
  int64_t block_end;
  float scale;
  bool bf16;                  // ComputeMode::kBf16
  bool codes;                 // products of codes, of kI8 (KvLayout)
  DType dtype;                // of the cache: kF16, kF32 or kI8
  const std::byte* k;         // this K/V head in page 0: [head_dim, page_size]
  const std::byte* v;         // [page_size, value_dim]; null: the last value_dim features of K
  const std::byte* k_scales;  // of kI8: [page_size] bfloat16
  const std::byte* v_scales;
  int64_t page_bytes;  // from page to page
  int64_t page_size;
  const int32_t* pages;
  float* scratch;  // 64-byte aligned, AttentionScratchFloats
  // If null, the blocks are all that the rows see, and `out` gets the result. Else only the partial
  // results (maximum, sum and vector of each query) of these blocks: AttentionPartialFloats each.
  float* partials;
  float* out;  // [rows, group * value_dim], like q
  int64_t out_stride;
};

TREADLE_ISA_KERNEL(AttendBlocks, void(const AttentionArguments&));
// The same on AMX, for bf16 and for codes.
namespace avx512 {
void AttendBf16OnTiles(const AttentionArguments& a);
void AttendCodesOnTiles(const AttentionArguments& a);
}  // namespace avx512
// Combines `partials` of the blocks [block_begin, block_end), ascending, into `out`.
TREADLE_ISA_KERNEL(CombineAttention, void(const AttentionArguments&));
// For rows * group queries.
TREADLE_ISA_KERNEL(AttentionScratchFloats, int64_t(int64_t queries, int64_t head_dim));
TREADLE_ISA_KERNEL(AttentionPartialFloats, int64_t(int64_t queries, int64_t value_dim));

}  // namespace treadle
