// Rotary position embedding of the half-split kind (Su et al. 2021, as Llama's authors' code orders
// it) of q and k, fused with the store of K and V into the cache.
//
// Bound by bytes: q is read and written, k and v are read as f32 and written in the cache's type
// (2,048 rows of 32 x 8 heads of 128 at 16 bits: 92 MB, 20 us at 4.6 TB/s). For few rows it is a
// matter of latency, so a row's work is spread over several blocks.
#include <bit>

#include "kernels/cuda/attention/kv_element.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 128;

struct RotaryParams {
  float* q;  // [rows, heads * head_dim]
  const float* k;
  const float* v;  // [rows, kv_heads * head_dim]
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  const float* cos;  // [max_positions, half_dim]
  const float* sin;
  char* pages;
  int64_t page_bytes;
  int64_t part_bytes;
  int32_t page_shift;
  int32_t half_dim;  // 0: no rotation
  int32_t head_dim;
  int32_t heads;
  int32_t kv_heads;
  DeviceBatch batch;
};

// kWidth neighbouring elements: 4, aligned as such, or 1.
template <int kWidth>
struct Lanes {
  static_assert(kWidth == 1 || kWidth == 4);
  float x[kWidth];
};

template <int kWidth>
TREADLE_DEVICE Lanes<kWidth> Load(const float* from) {
  Lanes<kWidth> lanes;
  if constexpr (kWidth == 1) {
    lanes.x[0] = *from;
  } else {
    simt::LoadFloats(from, lanes.x);
  }
  return lanes;
}
template <int kWidth>
TREADLE_DEVICE void Store(float* to, const Lanes<kWidth>& lanes) {
  if constexpr (kWidth == 1) {
    *to = lanes.x[0];
  } else {
    simt::StoreFloats(lanes.x, to);
  }
}
template <DType kType, int kWidth>
TREADLE_DEVICE void StoreRounded(typename KvElement<kType>::Stored* to,
                                 const Lanes<kWidth>& lanes) {
  if constexpr (kType == DType::kF32) {
    Store(to, lanes);
  } else if constexpr (kWidth == 1) {
    *to = KvElement<kType>::Store(lanes.x[0]);
  } else {
    uint32_t bits[4];
    TREADLE_UNROLL
    for (int i = 0; i < 4; ++i) bits[i] = KvElement<kType>::Store(lanes.x[i]);
    *reinterpret_cast<simt::Words2*>(to) = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
  }
}

// Turns the pairs (first, second) by the angles of the table.
template <int kWidth>
TREADLE_DEVICE void Rotate(const float* cos, const float* sin, Lanes<kWidth>& first,
                           Lanes<kWidth>& second) {
  const Lanes<kWidth> c = Load<kWidth>(cos);
  const Lanes<kWidth> s = Load<kWidth>(sin);
  TREADLE_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    const float u = first.x[i];
    const float v = second.x[i];
    first.x[i] = simt::Fma(u, c.x[i], -(v * s.x[i]));
    second.x[i] = simt::Fma(v, c.x[i], u * s.x[i]);
  }
}

// A head's work comes in items of kWidth pairs that are turned, then of kWidth elements that are
// not. Items of a row: those of q, k and v, in this order.
struct Items {
  int32_t turned;     // per head of q and k
  int32_t kept;       // per head of k
  int32_t unrotated;  // per head of v
};
template <int kWidth>
TREADLE_HOST_DEVICE Items ItemsOf(int32_t head_dim, int32_t half_dim) {
  return {half_dim / kWidth, (head_dim - 2 * half_dim) / kWidth, head_dim / kWidth};
}

// Where position's slot of a head lies in the K part; V: part_bytes after it.
template <DType kType>
TREADLE_DEVICE char* SlotOf(const RotaryParams& p, const DeviceSequence& sequence, int32_t position,
                            int32_t head) {
  const int64_t page = p.batch.pages[sequence.first_page + (position >> p.page_shift)];
  const int64_t slot = (int64_t{head} << p.page_shift) + (position & ((1 << p.page_shift) - 1));
  return p.pages + page * p.page_bytes +
         slot * p.head_dim * static_cast<int64_t>(sizeof(typename KvElement<kType>::Stored));
}

// Grid: rows, items of a row.
template <DType kType, int kWidth>
TREADLE_KERNEL(kThreads)
void RotateAndStoreKernel(RotaryParams p) {
  simt::AwaitEarlierLaunches();
  using Stored = typename KvElement<kType>::Stored;
  const int row = simt::BlockX();
  const int32_t s = p.batch.row_sequence[row];
  if (s < 0) return;
  const DeviceSequence sequence = p.batch.sequences[s];
  const int32_t position = p.batch.row_position[row];
  const Items items = ItemsOf<kWidth>(p.head_dim, p.half_dim);
  const float* cos = p.cos + int64_t{position} * p.half_dim;
  const float* sin = p.sin + int64_t{position} * p.half_dim;

  int32_t item = simt::BlockY() * kThreads + simt::Thread();
  if (item < p.heads * items.turned) {
    const int32_t at = item % items.turned * kWidth;
    float* q = p.q + row * p.q_stride + int64_t{item / items.turned} * p.head_dim + at;
    Lanes<kWidth> first = Load<kWidth>(q);
    Lanes<kWidth> second = Load<kWidth>(q + p.half_dim);
    Rotate(cos + at, sin + at, first, second);
    Store(q, first);
    Store(q + p.half_dim, second);
    return;
  }
  item -= p.heads * items.turned;
  const int32_t k_items = items.turned + items.kept;
  if (item < p.kv_heads * k_items) {
    const int32_t head = item / k_items;
    const int32_t at = item % k_items * kWidth;
    const float* k = p.k + row * p.k_stride + int64_t{head} * p.head_dim;
    auto* slot = reinterpret_cast<Stored*>(SlotOf<kType>(p, sequence, position, head));
    if (at < p.half_dim) {
      Lanes<kWidth> first = Load<kWidth>(k + at);
      Lanes<kWidth> second = Load<kWidth>(k + at + p.half_dim);
      Rotate(cos + at, sin + at, first, second);
      StoreRounded<kType>(slot + at, first);
      StoreRounded<kType>(slot + at + p.half_dim, second);
    } else {
      StoreRounded<kType>(slot + at + p.half_dim, Load<kWidth>(k + at + p.half_dim));
    }
    return;
  }
  item -= p.kv_heads * k_items;
  if (item < p.kv_heads * items.unrotated) {
    const int32_t head = item / items.unrotated;
    const int32_t at = item % items.unrotated * kWidth;
    const Lanes<kWidth> v = Load<kWidth>(p.v + row * p.v_stride + int64_t{head} * p.head_dim + at);
    char* slot = SlotOf<kType>(p, sequence, position, head) + p.part_bytes;
    StoreRounded<kType>(reinterpret_cast<Stored*>(slot) + at, v);
  }
}

template <DType kType, int kWidth>
void Launch(Device& device, const RotaryParams& p) {
  const Items items = ItemsOf<kWidth>(p.head_dim, p.half_dim);
  const int32_t count =
      p.heads * items.turned + p.kv_heads * (items.turned + items.kept + items.unrotated);
  device.Launch(RotateAndStoreKernel<kType, kWidth>,
                {.grid_x = static_cast<uint32_t>(p.batch.rows),
                 .grid_y = static_cast<uint32_t>((count + kThreads - 1) / kThreads),
                 .threads = kThreads},
                p);
}

template <int kWidth>
void LaunchTyped(Device& device, DType type, const RotaryParams& p) {
  if (type == DType::kF32) return Launch<DType::kF32, kWidth>(device, p);
  if (type == DType::kF16) return Launch<DType::kF16, kWidth>(device, p);
  TREADLE_CHECK(type == DType::kBF16);
  Launch<DType::kBF16, kWidth>(device, p);
}

bool Aligned(const void* pointer, int64_t stride) {
  return std::bit_cast<uintptr_t>(pointer) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

void RotateAndStoreKv(Device& device, Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                      const KvLayout& layout, std::byte* pages, const DeviceBatch& batch) {
  TREADLE_CHECK(layout.key_order == KeyOrder::kByPosition);
  TREADLE_CHECK(layout.page_size >= 16 &&
                std::has_single_bit(static_cast<uint64_t>(layout.page_size)));
  TREADLE_CHECK(k.cols == layout.kv_heads * layout.head_dim && v.cols == k.cols);
  TREADLE_CHECK(q.cols % layout.head_dim == 0);
  TREADLE_CHECK(rotary == nullptr || 2 * rotary->half_dim <= layout.head_dim);
  if (batch.rows == 0) return;
  RotaryParams p = {};
  p.q = q.Row<float>(0);
  p.k = k.Row<float>(0);
  p.v = v.Row<float>(0);
  p.q_stride = q.stride;
  p.k_stride = k.stride;
  p.v_stride = v.stride;
  p.pages = reinterpret_cast<char*>(pages);
  p.page_bytes = layout.PageStride();
  p.part_bytes = layout.PageBytes() / 2;
  p.page_shift = std::countr_zero(static_cast<uint64_t>(layout.page_size));
  p.head_dim = static_cast<int32_t>(layout.head_dim);
  p.heads = static_cast<int32_t>(q.cols / layout.head_dim);
  p.kv_heads = static_cast<int32_t>(layout.kv_heads);
  p.batch = batch;
  if (rotary != nullptr) {
    p.cos = rotary->cos;
    p.sin = rotary->sin;
    p.half_dim = static_cast<int32_t>(rotary->half_dim);
  }
  const bool wide = p.head_dim % 4 == 0 && p.half_dim % 4 == 0 && Aligned(p.q, q.stride) &&
                    Aligned(p.k, k.stride) && Aligned(p.v, v.stride) && Aligned(p.cos, 0) &&
                    Aligned(p.sin, 0);
  if (wide) {
    LaunchTyped<4>(device, layout.dtype, p);
  } else {
    LaunchTyped<1>(device, layout.dtype, p);
  }
}

}  // namespace treadle::cuda
