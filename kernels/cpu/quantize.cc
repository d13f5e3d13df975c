// ComputeMode::kInt8's quantization of activations, and this instruction set's table.
#include "kernels/cpu/matmul_tables.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// Eight lanes at a time on every instruction set: the work is small next to the product.

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

// Codes of eight values. What NaN and infinities give does not matter, as their scale is not
// finite, but it stays within +-127.
TREADLE_SIMD __m256i Round(const float* x, __m256 inverse) {
  const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  return _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
}

void QuantizeBlock(const float* x, int8_t* codes, ActivationBlock& block) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 32; i += 8) {  // as integers, NaN is larger than any number, and shows
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
  }
  const int32_t bits = MaxLane(largest);
  float absmax;
  __builtin_memcpy(&absmax, &bits, 4);
  const bool zero = absmax < 0x1p-100f;
  const float scale = zero ? 0.0f : absmax / 127.0f;
  const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : 127.0f / absmax);
  const __m256i q0 = Round(x, inverse);
  const __m256i q1 = Round(x + 8, inverse);
  const __m256i q2 = Round(x + 16, inverse);
  const __m256i q3 = Round(x + 24, inverse);
  block.low_sum = SumLanes(_mm256_add_epi32(q0, q1));
  block.high_sum = SumLanes(_mm256_add_epi32(q2, q3));
  block.scale = scale;
  block.scaled_sum = scale * static_cast<float>(block.low_sum + block.high_sum);
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q0, q1), _mm256_packs_epi32(q2, q3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm256_permutevar8x32_epi32(packed, order));
}

}  // namespace

void Quantize(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  for (int64_t b = 0; b < k / kBlockValues; ++b) {
    QuantizeBlock(x + b * kBlockValues, codes + b * kBlockValues, blocks[b]);
  }
}

const MatMulKernels kMatMulKernels = {
    .exact = MatMulExact, .int8 = MatMulInt8, .quantize = Quantize};

}  // namespace treadle::TREADLE_ISA
