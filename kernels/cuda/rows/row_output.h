// Where ops leave rows of results: as f32, or rounded to 16 bits for the products that read them
// (Backend::InputType).
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/cuda/segment.h"
#include "kernels/dtype.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

struct RowOutput {
  void* data = nullptr;
  int64_t stride = 0;  // in elements
  DType dtype = DType::kF32;
};

// An output that is made of `input`, as kernels/backend.h asks.
inline RowOutput OutputOf(const Tensor& out, const Tensor& input) {
  if (out.dtype != DType::kF32) {
    TREADLE_CHECK(out.dtype == DType::kF16 || out.dtype == DType::kBF16);
    TREADLE_CHECK(out.cols % 64 == 0 && out.stride % 8 == 0 &&
                  reinterpret_cast<uintptr_t>(out.data) % 16 == 0);
    const auto end = [](const Tensor& t) {
      return static_cast<const std::byte*>(t.data) +
             t.rows * t.stride * static_cast<int64_t>(SizeOf(t.dtype));
    };
    TREADLE_CHECK(end(out) <= input.data || end(input) <= out.data);
  }
  return {out.data, out.stride, out.dtype};
}

// Two numbers rounded to a 16-bit type, `low` in the lower half of the word.
TREADLE_DEVICE uint32_t RoundPair(DType dtype, float low, float high) {
  return simt::Pack16(dtype == DType::kBF16, low, high);
}

// Elements at and at + 1, counted from the first row's first one. at: even, if they have 16 bits.
TREADLE_DEVICE void StorePair(const RowOutput& out, int64_t at, float low, float high) {
  if (out.dtype == DType::kF32) {
    float* to = static_cast<float*>(out.data) + at;
    to[0] = low;
    to[1] = high;
  } else {
    auto* to = static_cast<uint16_t*>(out.data) + at;
    *reinterpret_cast<uint32_t*>(to) = RoundPair(out.dtype, low, high);
  }
}
TREADLE_DEVICE void StoreOne(const RowOutput& out, int64_t at, float value) {
  if (out.dtype == DType::kF32) {
    static_cast<float*>(out.data)[at] = value;
  } else {
    static_cast<uint16_t*>(out.data)[at] = static_cast<uint16_t>(RoundPair(out.dtype, value, 0));
  }
}

// A kernel of Embed, a block per row: value(row of the table, column) is what the table holds.
template <typename Value>
TREADLE_DEVICE void EmbedRow(const EmbedRows& p, Value value) {
  simt::AwaitEarlierLaunches();
  int32_t id = p.ids[simt::BlockX()];
  if (id < -1) id = p.last_samples[-2 - id];
  id -= p.first;
  const bool there = id >= 0 && id < p.n;  // else zeros
  float* out = p.out + simt::BlockX() * p.out_stride;
  for (int column = simt::Thread(); column < p.k; column += simt::Threads()) {
    const float y = there ? value(id, column) : 0.0f;
    out[column] = p.accumulate != 0 ? out[column] + y : y;
  }
}

}  // namespace treadle::cuda
