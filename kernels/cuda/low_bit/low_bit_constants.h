// The common part of the kernels of low_bit.h's layouts: which there are, and how constants are
// read. Device code, but for the first.
#pragma once

#include <utility>

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

// Layouts that kernels are compiled for, numbered.
struct LowBitLayout {
  int bits;
  int granule;
  bool second;
};
constexpr LowBitLayout LayoutAt(int i) { return {i < 6 ? 4 : 8, 16 << i / 2 % 3, i % 2 == 1}; }
inline constexpr std::make_integer_sequence<int, 12> kLowBitLayouts = {};
constexpr int LayoutOf(const LowBitView& w) {
  const int granule = w.granule == 64 ? 2 : w.granule == 32 ? 1 : 0;
  return (w.bits == 4 ? 0 : 6) + 2 * granule + (w.second == Second::kNone ? 0 : 1);
}

TREADLE_DEVICE float LowHalf(uint32_t word) {
  return simt::FromF16(static_cast<uint16_t>(word & 0xffffu));
}
TREADLE_DEVICE float HighHalf(uint32_t word) {
  return simt::FromF16(static_cast<uint16_t>(word >> 16));
}
TREADLE_DEVICE uint32_t WordOf(const simt::Words4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Bytes of the constants of features g and g + 8 for one run.
template <bool kSecond>
TREADLE_DEVICE int PairBytes(bool half) {
  return (kSecond ? 4 : 2) * (half ? 2 : 4);
}

// The constants of run `run`, as they are stored. pairs: where run 0 of this lane's features
// begins.
template <bool kSecond>
TREADLE_DEVICE simt::Words4 LoadConstants(const std::byte* pairs, int run, bool half) {
  const std::byte* from = pairs + int64_t{run} * (8 * PairBytes<kSecond>(half));
  if (kSecond && !half) return *reinterpret_cast<const simt::Words4*>(from);
  if (!kSecond && half) return {*reinterpret_cast<const uint32_t*>(from), 0, 0, 0};
  const auto words = *reinterpret_cast<const simt::Words2*>(from);
  return {words.x, words.y, 0, 0};
}

// Constants of features g and g + 8; seconds are as the matrix has them.
struct ConstantPair {
  float scale[2];
  float second[2];
};

template <bool kSecond>
TREADLE_DEVICE ConstantPair DecodeConstants(const simt::Words4& words, bool half) {
  ConstantPair pair = {};
  if (kSecond) {
    pair.scale[0] = half ? LowHalf(words.x) : simt::AsFloat(words.x);
    pair.second[0] = half ? HighHalf(words.x) : simt::AsFloat(words.y);
    pair.scale[1] = half ? LowHalf(words.y) : simt::AsFloat(words.z);
    pair.second[1] = half ? HighHalf(words.y) : simt::AsFloat(words.w);
  } else {
    pair.scale[0] = half ? LowHalf(words.x) : simt::AsFloat(words.x);
    pair.scale[1] = half ? HighHalf(words.x) : simt::AsFloat(words.y);
  }
  return pair;
}

// The canonical value; a scale times an integer is exact, so its sum with an offset is rounded
// once.
TREADLE_DEVICE float CanonicalValue(Second kind, float value, float scale, float second) {
  if (kind == Second::kZero) return scale * (value - second);
  return scale * value + second;
}

}  // namespace treadle::cuda
