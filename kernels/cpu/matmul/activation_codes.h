// Quantized activations to memory, and reductions over them: eight lanes at a time on every
// instruction set, for the work is small next to the product.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

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

}  // namespace
}  // namespace treadle::TREADLE_ISA
