// Activations quantized and to memory, and reductions over them: eight lanes at a time on every
// instruction set, for the work is small next to the product, or 16 rows for AMX.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

TREADLE_SIMD int32_t MaxLane(__m256i x) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

TREADLE_SIMD int32_t SumLanes(__m256i x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

// 32 codes as bytes; those that do not fit saturate.
TREADLE_SIMD void StoreByteCodes(int8_t* codes, const __m256i (&q)[4]) {
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm256_permutevar8x32_epi32(packed, order));
}

// As words, of four consecutive ones the even ones before the odd ones.
TREADLE_SIMD void StoreWordCodes(int8_t* codes, const __m256i (&q)[4]) {
  for (int i = 0; i < 4; i += 2) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[i], q[i + 1]), 0xd8);
    words = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 16 * i), words);
  }
}

// Codes of eight values. What NaN and infinities give does not matter, as their scale is not
// finite, but it stays within +-largest.
TREADLE_SIMD __m256i RoundCodes(const float* x, __m256 inverse, int32_t largest) {
  const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  return _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(largest)),
                          _mm256_set1_epi32(-largest));
}

// Steps to absmax.
inline constexpr int32_t kInt8Steps = 127, kInt12Steps = 127 * 16, kInt16Steps = 127 * 128;

// A scale, and what values are multiplied with.
struct ActivationScale {
  float scale;
  float inverse;
};

// The scale of `blocks` blocks of 32.
template <int32_t kSteps>
TREADLE_SIMD ActivationScale ScaleOf(const float* x, int64_t blocks) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < 32 * blocks; i += 8) {  // as integers, NaN is larger than any number
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
  }
  const int32_t bits = MaxLane(largest);
  float absmax;
  __builtin_memcpy(&absmax, &bits, 4);
  if (absmax < 0x1p-100f) return {0.0f, 0.0f};
  return {absmax / kSteps, kSteps / absmax};
}

// 32 codes, within +-steps.
TREADLE_SIMD ActivationBlock QuantizeBlock(const float* x, const ActivationScale& scale,
                                           int32_t steps, __m256i (&q)[4]) {
  const __m256 inverse = _mm256_set1_ps(scale.inverse);
  for (int i = 0; i < 4; ++i) q[i] = RoundCodes(x + 8 * i, inverse, steps);
  ActivationBlock block;
  block.scale = scale.scale;
  block.low_sum = SumLanes(_mm256_add_epi32(q[0], q[1]));
  block.high_sum = SumLanes(_mm256_add_epi32(q[2], q[3]));
  block.scaled_sum = block.scale * static_cast<float>(block.low_sum + block.high_sum);
  return block;
}

// Two planes of codes q = 2^kBits * high + low: high is q / 2^kBits, rounded half up.
template <int kBits>
TREADLE_SIMD void StorePlanes(int8_t* low, int8_t* high, const __m256i (&q)[4]) {
  __m256i upper[4], lower[4];
  for (int i = 0; i < 4; ++i) {
    upper[i] =
        _mm256_srai_epi32(_mm256_add_epi32(q[i], _mm256_set1_epi32(1 << (kBits - 1))), kBits);
    lower[i] = _mm256_sub_epi32(q[i], _mm256_slli_epi32(upper[i], kBits));
  }
  StoreByteCodes(low, lower);
  StoreByteCodes(high, upper);
}

#ifdef __AVX512F__
// Lane r: what `op` makes of the lanes of rows[r].
template <typename Op>
TREADLE_SIMD __m512i ReduceEach(const __m512i (&rows)[kTileRows], Op op) {
  __m512i fours[4];  // rows 4i to 4i + 3, in each 128 bits a part of their lanes
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i* r = rows + 4 * i;
    const __m512i a = op(_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
    const __m512i b = op(_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
    fours[i] = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto join = [&](__m512i a, __m512i b) __attribute__((always_inline)) {
    return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return join(join(fours[0], fours[1]), join(fours[2], fours[3]));
}
#endif

}  // namespace
}  // namespace treadle::TREADLE_ISA
