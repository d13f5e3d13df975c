// A row of activations becomes codes: what the kernels of its own and the fused one share. Device
// code; all threads of a block work on one row.
#pragma once

#include "kernels/cuda/row_int8/row_int8_kernels.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

inline constexpr uint32_t kMagnitudeBits = 0x7fffffff;
inline constexpr float kInt8Steps = 127;
inline constexpr float kInt8SmallestAbsmax = 0x1p-100f;

// Columns [column, column + 4) of a row, as bits; 0 beyond its end.
TREADLE_DEVICE void LoadFour(const float* row, int column, int k, uint32_t (&bits)[4]) {
  if (column + 4 <= k && (reinterpret_cast<uintptr_t>(row) & 15) == 0) {
    const simt::Words4 words = *reinterpret_cast<const simt::Words4*>(row + column);
    bits[0] = words.x;
    bits[1] = words.y;
    bits[2] = words.z;
    bits[3] = words.w;
    return;
  }
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) bits[i] = column + i < k ? simt::AsBits(row[column + i]) : 0;
}

// Bit i: element column + i is an outlier. column: a multiple of 4.
TREADLE_DEVICE uint32_t OutliersOfFour(const Int8Input& input, int column,
                                       const uint32_t (&bits)[4]) {
  if (input.of_call != 0) return (input.call_flags[column / 32] >> (column % 32)) & 15;
  uint32_t outliers = 0;
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    outliers |= (bits[i] & kMagnitudeBits) >= input.threshold_bits ? 1u << i : 0u;
  }
  return outliers;
}

// The row's scale (dx) and 127 / absmax; both 0 if its codes are.
struct Int8RowScale {
  float scale = 0;
  float inverse = 0;
};
TREADLE_DEVICE Int8RowScale RowScaleOf(uint32_t absmax_bits) {
  const float absmax = simt::AsFloat(absmax_bits);
  if (absmax < kInt8SmallestAbsmax) return {};  // not so if it is NaN
  return {simt::Divide(absmax, kInt8Steps), simt::Divide(kInt8Steps, absmax)};
}

// Groups of four columns of a thread that are on their way from memory at a time.
inline constexpr int kInt8Batch = 4;

// Calls mark(column) for each outlier of the row. Returns the bits of the largest magnitude of the
// others that this thread saw.
template <typename Mark>
TREADLE_DEVICE uint32_t ScanRow(const Int8Input& input, const float* row, const Mark& mark) {
  const int step = 4 * simt::Threads();
  uint32_t largest = 0;
  for (int first = 4 * simt::Thread(); first < input.k; first += kInt8Batch * step) {
    uint32_t bits[kInt8Batch][4];
    TREADLE_UNROLL
    for (int b = 0; b < kInt8Batch; ++b) LoadFour(row, first + b * step, input.k, bits[b]);
    TREADLE_UNROLL
    for (int b = 0; b < kInt8Batch; ++b) {
      const int column = first + b * step;
      if (column >= input.k) break;
      const uint32_t outliers = OutliersOfFour(input, column, bits[b]);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t magnitude = bits[b][i] & kMagnitudeBits;
        if ((outliers >> i & 1) == 0) {
          largest = magnitude > largest ? magnitude : largest;
        } else if (column + i < input.k) {
          mark(column + i);
        }
      }
    }
  }
  return largest;
}

// Calls store(column, word) for every four columns of the row's units.
template <typename Store>
TREADLE_DEVICE void EncodeRow(const Int8Input& input, const float* row, float inverse,
                              const Store& store) {
  const int end = input.units * kInt8Unit;
  for (int column = 4 * simt::Thread(); column < end; column += 4 * simt::Threads()) {
    uint32_t word = 0;
    if (column < input.k) {
      uint32_t bits[4];
      LoadFour(row, column, input.k, bits);
      const uint32_t outliers = OutliersOfFour(input, column, bits);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) {
        // Infinities and NaN that are no outliers: the scale is not finite, so no code matters.
        int code = simt::RoundHalfEven(simt::AsFloat(bits[i]) * inverse);
        code = code > 127 ? 127 : code < -127 ? -127 : code;
        if ((outliers >> i & 1) != 0) code = 0;
        word |= static_cast<uint32_t>(code & 255) << (8 * i);
      }
    }
    store(column, word);
  }
}

// Every thread of a block takes four columns at a time.
inline constexpr int kInt8QuantizeThreads = 1024;  // at most
inline uint32_t Int8QuantizeThreads(int64_t k) {
  const int64_t threads = (k + 127) / 128 * simt::kWarp;
  return static_cast<uint32_t>(threads < kInt8QuantizeThreads ? threads : kInt8QuantizeThreads);
}

// The shared memory of a block that quantizes a row.
struct Int8QuantizeShared {
  uint32_t absmax_bits;
  uint32_t outliers;
};

// Row `row` of input.row_info, and its codes: store(column, word) is called as EncodeRow does.
template <typename Store>
TREADLE_DEVICE void QuantizeRow(const Int8Input& input, int row, Int8QuantizeShared* shared,
                                const Store& store) {
  if (simt::Thread() == 0) *shared = {};
  simt::SyncThreads();
  const float* x = input.x + row * input.x_stride;
  Int8Row& info = input.row_info[row];
  const uint32_t largest = simt::WarpMax(ScanRow(input, x, [&](int column) {
    const uint32_t at = simt::AtomicAdd(&shared->outliers, 1);
    if (at < kInt8Listed) info.columns[at] = column;
  }));
  if (simt::Lane() == 0) simt::AtomicMax(&shared->absmax_bits, largest);
  simt::SyncThreads();
  const Int8RowScale scale = RowScaleOf(shared->absmax_bits);
  if (simt::Thread() == 0) {
    info.scale = scale.scale;
    info.outliers = static_cast<int32_t>(shared->outliers);
  }
  EncodeRow(input, x, scale.inverse, store);
}

}  // namespace treadle::cuda
