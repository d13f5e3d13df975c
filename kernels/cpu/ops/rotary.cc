// Rotary position embedding of the half-split kind (Su et al. 2021, as Llama's authors' code orders
// it), and the store of one token's K and V into its slot.
#include "kernels/cpu/isa_kernel.h"
#include "kernels/dtype.h"

namespace treadle {

// One token: rotates its q and k, and stores k and v into its slot.
struct RotateStoreArguments {
  float* q;        // [heads, head_dim]
  float* k;        // [kv_heads, head_dim]
  const float* v;  // [kv_heads, head_dim]; null: V is a part of K
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  const float* cos;  // [half_dim] of this position; half_dim = 0: no rotation
  const float* sin;
  int64_t half_dim;
  DType dtype;        // of the cache: kF16, kF32 or kI8
  bool bf16;          // ComputeMode::kBf16: a cache of floats holds bf16 numbers
  void* k_slot;       // element [0, 0, slot] of the page's K part [kv_heads, head_dim, page_size]
  void* v_slot;       // element [0, slot, 0] of its V part [kv_heads, page_size, head_dim]; of kI8
                      // both in fours (KvLayout)
  uint16_t* k_scale;  // of kI8: [0, slot] of the scales of K [kv_heads, page_size]
  uint16_t* v_scale;
  int64_t page_size;
  int64_t head_stride;  // elements of a head's part
};
TREADLE_ISA_KERNEL(RotateStore, void(const RotateStoreArguments&));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/bf16_chains.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

void RotateHeads(float* x, int64_t heads, const RotateStoreArguments& a) {
  for (int64_t head = 0; head < heads; ++head) {
    float* first = x + head * a.head_dim;
    float* second = first + a.half_dim;
    ForEachVec(a.half_dim, [&](int64_t i, int64_t lanes) {
      const Vec c = LoadLanes(a.cos + i, lanes);
      const Vec s = LoadLanes(a.sin + i, lanes);
      const Vec u = LoadLanes(first + i, lanes);
      const Vec v = LoadLanes(second + i, lanes);
      StoreLanes(first + i, Fms(u, c, Mul(v, s)), lanes);
      StoreLanes(second + i, Fma(v, c, Mul(u, s)), lanes);
    });
  }
}

// The nearest bf16 numbers; kHalf: no finite one beyond the largest that fp16 holds.
template <bool kHalf>
Vec Bf16Of(Vec x) {
  float lanes[kLanes];
  Store(lanes, x);
  for (float& lane : lanes) {
    const bool finite = lane - lane == 0.0f;
    lane = RoundToBf16(lane);
    constexpr float kMax = 65280.0f;
    if (kHalf && finite && __builtin_fabsf(lane) > kMax) lane = __builtin_copysignf(kMax, lane);
  }
  return Load(lanes);
}

// Scale of a row of codes (KvLayout), as it is stored and as a float; there 0 if it is NaN.
struct RowScale {
  uint16_t bits;
  float step;
};
RowScale ScaleOf(const float* x, int64_t n) {
  Vec largest = Zero(), wrong = Zero();  // wrong: NaN where a value is infinite or NaN
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    const Vec v = LoadLanes(x + i, lanes);
    largest = Max(largest, Max(v, Sub(Zero(), v)));
    wrong = Fma(v, Zero(), wrong);
  });
  if (!(Sum(wrong) == 0.0f)) return {0x7fc0, 0.0f};
  const uint32_t bits = __builtin_bit_cast(uint32_t, MaxLane(largest) / 127.0f) + 0xffffu;
  return {static_cast<uint16_t>(bits >> 16), __builtin_bit_cast(float, bits & 0xffff0000u)};
}

// T: float, fp16 bits or codes. K is stored transposed: element d of a head goes to row d, column
// slot.
template <typename T>
void StoreSlot(const RotateStoreArguments& a) {
  constexpr bool kCodes = sizeof(T) == 1;
  T* k_slot = static_cast<T*>(a.k_slot);
  T* v_slot = static_cast<T*>(a.v_slot);
  const bool values = a.v != nullptr;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    const float* k = a.k + head * a.head_dim;
    const float* v = values ? a.v + head * a.head_dim : k;
    RowScale k_row, v_row;
    if constexpr (kCodes) {
      k_row = ScaleOf(k, a.head_dim);
      a.k_scale[head * a.page_size] = k_row.bits;
      if (values) {
        v_row = ScaleOf(v, a.head_dim);
        a.v_scale[head * a.page_size] = v_row.bits;
      }
    }
    const auto rounded = [&](Vec x, const RowScale& row) {
      if constexpr (!kCodes) return a.bf16 ? Bf16Of<sizeof(T) == sizeof(uint16_t)>(x) : x;
      return row.step > 0.0f ? Div(x, Broadcast(row.step)) : Zero();
    };
    ForEachVec(a.head_dim, [&](int64_t i, int64_t lanes) {
      T column[kLanes];
      Store(column, rounded(LoadLanes(k + i, lanes), k_row));
      T* to = k_slot + head * a.head_stride + i * a.page_size;
      constexpr int64_t kTogether = kCodes ? 4 : 1;  // behind the last feature, zeros
      for (int64_t lane = 0; lane < lanes; lane += kTogether) {
        __builtin_memcpy(to + lane * a.page_size, column + lane, kTogether * sizeof(T));
      }
      if (!values) return;
      const Vec value = rounded(LoadLanes(v + i, lanes), v_row);
      T* const v_to = v_slot + head * a.head_stride;
      if constexpr (kCodes) {
        Store(column, value);
        for (int64_t lane = 0; lane < lanes; ++lane) v_to[4 * (i + lane)] = column[lane];
      } else {
        StoreLanes(v_to + i, value, lanes);
      }
    });
  }
}

}  // namespace

void RotateStore(const RotateStoreArguments& a) {
  if (a.half_dim > 0) {
    RotateHeads(a.q, a.heads, a);
    RotateHeads(a.k, a.kv_heads, a);
  }
  switch (a.dtype) {
    case DType::kI8:
      return StoreSlot<int8_t>(a);
    case DType::kF16:
      return StoreSlot<uint16_t>(a);
    default:
      return StoreSlot<float>(a);
  }
}

}  // namespace treadle::TREADLE_ISA
#else
#include <algorithm>

#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/ops/split_rows.h"

namespace treadle {

void CpuOps::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                              const KvView& kv) {
  const KvLayout& layout = kv.layout;
  const int64_t head_dim = layout.head_dim;
  TREADLE_CHECK(layout.dtype != DType::kBF16);
  TREADLE_CHECK(q.cols % head_dim == 0 && k.cols == layout.kv_heads * head_dim);
  const bool values = layout.latent_dim == 0;
  if (values) CheckSameShape(k, v);
  TREADLE_CHECK(rotary == nullptr || 2 * rotary->half_dim <= head_dim);
  const int64_t element = static_cast<int64_t>(SizeOf(layout.dtype));
  SplitRows(pool_, q.rows, q.cols + k.cols + v.cols, [&](int64_t begin, int64_t end) {
    RotateStoreArguments a = {};
    a.heads = q.cols / head_dim;
    a.kv_heads = layout.kv_heads;
    a.head_dim = head_dim;
    a.half_dim = rotary == nullptr ? 0 : rotary->half_dim;
    a.dtype = layout.dtype;
    a.bf16 = compute_ == ComputeMode::kBf16;
    a.page_size = layout.page_size;
    a.head_stride = layout.StoredDim() * layout.page_size;
    for (const SequenceSpan& span : kv.sequences) {
      const int64_t first = std::max<int64_t>(begin, span.first_row);
      const int64_t last = std::min<int64_t>(end, span.first_row + span.num_rows);
      for (int64_t row = first; row < last; ++row) {
        const int64_t position = span.first_position + row - span.first_row;
        const int64_t slot = position % layout.page_size;
        std::byte* page = kv.pages + span.pages[position / layout.page_size] * layout.PageStride();
        a.q = q.Row<float>(row);
        a.k = k.Row<float>(row);
        if (rotary != nullptr) {
          a.cos = rotary->cos + position * rotary->half_dim;
          a.sin = rotary->sin + position * rotary->half_dim;
        }
        a.k_slot = page + layout.KeyElement(0, slot, 0) * element;
        a.k_scale = reinterpret_cast<uint16_t*>(page + layout.Parts() * layout.PartBytes()) + slot;
        if (values) {
          a.v = v.Row<float>(row);
          a.v_slot = page + layout.ValueElement(0, slot, 0) * element;
          a.v_scale = a.k_scale + layout.PartScales();
        }
        kRotateStore[isa_](a);
      }
    }
  });
}

}  // namespace treadle
#endif
