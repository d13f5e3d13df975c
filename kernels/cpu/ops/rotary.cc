// Rotary position embedding of the half-split kind (Su et al. 2021, as Llama's authors' code orders
// it), and the store of one token's K and V into its slot.
#include "kernels/cpu/isa_kernels.h"
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

// T: float or fp16 bits. K is stored transposed: element d of a head goes to row d, column slot.
template <typename T>
void StoreSlot(const RotateStoreArguments& a) {
  T* k_slot = static_cast<T*>(a.k_slot);
  T* v_slot = static_cast<T*>(a.v_slot);
  const int64_t head_stride = a.head_dim * a.page_size;
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    const float* k = a.k + head * a.head_dim;
    const float* v = a.v + head * a.head_dim;
    ForEachVec(a.head_dim, [&](int64_t i, int64_t lanes) {
      T column[kLanes];
      Store(column, LoadLanes(k + i, lanes));
      T* to = k_slot + head * head_stride + i * a.page_size;
      for (int64_t lane = 0; lane < lanes; ++lane) to[lane * a.page_size] = column[lane];
      StoreLanes(v_slot + head * head_stride + i, LoadLanes(v + i, lanes), lanes);
    });
  }
}

}  // namespace

void RotateStore(const RotateStoreArguments& a) {
  if (a.half_dim > 0) {
    RotateHeads(a.q, a.heads, a);
    RotateHeads(a.k, a.kv_heads, a);
  }
  if (a.half) {
    StoreSlot<uint16_t>(a);
  } else {
    StoreSlot<float>(a);
  }
}

}  // namespace treadle::TREADLE_ISA
