// The K/V cache as Attention sees it: one layer's pages, and which rows belong to which sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/state_layout.h"

namespace treadle {

// How the K part of a page lies.
enum class KeyOrder : uint8_t {
  kByFeature,   // [kv_heads, head_dim, page_size]: vector lanes run over positions (host backends)
  kByPosition,  // [kv_heads, page_size, head_dim]: as V
};

// Geometry of a cache. A slot is K and V of one token in all layers; a page holds `page_size`
// slots.
//
// With kI8, K of a position and head, and V likewise, is head_dim codes of [-127, 127] and one
// scale, and stands for code * scale. The scale is the largest magnitude / 127 as a bfloat16,
// rounded up; a code is value / scale in float, rounded half to even. Where all values are zero,
// the scale and the codes are; where one is infinite or NaN, the scale is NaN, and so is the row.
//
// In every ComputeMode Attention multiplies these codes by codes: those of a query times `scale`,
// in steps of absmax / 16256, and of a block's p = exp(score - m) times V's scale, for each query
// and of what it sees, in steps of the largest / 32767; both rounded half to even, and 0 if the
// largest is below 2^-100. Sums of codes are exact. score = (sum * K's scale) * the query's step,
// vector = sum * p's step. Only latents, and heads of more than 1,024 features, multiply code *
// scale.
struct KvLayout {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t page_size = 0;  // slots per page, a power of two, at least 16
  int64_t num_pages = 0;
  DType dtype = DType::kF16;  // kF16 or kF32; on host backends also kI8, on CUDA kBF16
  KeyOrder key_order = KeyOrder::kByFeature;
  int64_t layers = 1;      // whose parts of a page lie one after the other
  StateLayout state = {};  // of pages that hold a state instead
  // Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): V of a head is the last
  // latent_dim features of its K, and is not stored apart. 0: V is stored, and as wide as K. With
  // KeyOrder::kByFeature only.
  int64_t latent_dim = 0;

  // Features of V.
  int64_t ValueDim() const { return latent_dim > 0 ? latent_dim : head_dim; }
  // Parts that are stored: K and V, or K alone.
  int64_t Parts() const { return latent_dim > 0 ? 1 : 2; }
  // Bytes of one page of one layer: K part, in its order, V part [kv_heads, page_size, head_dim],
  // then, of kI8, the scales of K and those of V, [kv_heads, page_size] each. Codes lie in fours,
  // as products of bytes read them: K [kv_heads, StoredDim / 4, page_size, 4 features], V
  // [kv_heads, page_size / 4, StoredDim, 4 positions].
  int64_t StoredDim() const { return dtype == DType::kI8 ? (head_dim + 3) / 4 * 4 : head_dim; }
  int64_t PartElements() const { return kv_heads * StoredDim() * page_size; }
  int64_t PartScales() const { return dtype == DType::kI8 ? kv_heads * page_size : 0; }
  int64_t PartBytes() const { return PartElements() * static_cast<int64_t>(SizeOf(dtype)); }
  int64_t PageBytes() const {
    if (state.present()) return state.Floats(page_size) * static_cast<int64_t>(sizeof(float));
    return Parts() * (PartBytes() + PartScales() * static_cast<int64_t>(sizeof(BFloat16)));
  }
  // Bytes from a page of one layer to its next page.
  int64_t PageStride() const { return layers * PageBytes(); }
  // Element i of a head of K or V within a page.
  int64_t KeyElement(int64_t head, int64_t slot, int64_t i) const {
    if (key_order == KeyOrder::kByPosition) return (head * page_size + slot) * head_dim + i;
    if (dtype == DType::kI8) {
      return (head * StoredDim() + i / 4 * 4) * page_size + slot * 4 + i % 4;
    }
    return (head * head_dim + i) * page_size + slot;
  }
  int64_t ValueElement(int64_t head, int64_t slot, int64_t i) const {
    if (latent_dim > 0) return KeyElement(head, slot, head_dim - latent_dim + i);
    if (dtype == DType::kI8) {
      return PartElements() + (head * page_size + slot / 4 * 4) * StoredDim() + i * 4 + slot % 4;
    }
    return PartElements() + (head * page_size + slot) * head_dim + i;
  }
};

// Rows [first_row, first_row + num_rows) of the flat batch are tokens at positions first_position,
// first_position + 1, ... of one sequence. Its position p lives in page pages[p / page_size], slot
// p % page_size. Row i attends to positions 0 ..= its own, its own chunk included.
struct SequenceSpan {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t first_position = 0;
  const int32_t* pages = nullptr;  // at least ceil((first_position + num_rows) / page_size) ids
};

// Slots of page `from` become the slots of page `to` as well.
struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
};

struct KvView {
  KvLayout layout;
  std::byte* pages = nullptr;  // this layer's: [num_pages], PageStride() bytes apart
  std::span<const SequenceSpan> sequences;
  // A row at position p attends to positions above p - window only (sliding windows, Beltagy et al.
  // 2020, section 3.1); 0: to all up to its own.
  int64_t window = 0;
  // The score of query head h at a distance of d positions falls by slopes[h] * d (ALiBi, Press et
  // al. 2022, section 3). [heads of q], in the backend's memory; null: nothing falls.
  const float* slopes = nullptr;
  // A logit of each query head that joins every row's softmax and brings no value (attention sinks,
  // Xiao et al. 2024, section 3.3; learned, as in gpt-oss). [heads of q], likewise; null: none.
  const float* sinks = nullptr;

  // The first position that the row at `position` attends to.
  int64_t FirstSeen(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

}  // namespace treadle
