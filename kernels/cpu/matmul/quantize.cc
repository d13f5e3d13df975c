// ComputeMode::kInt8's and kInt16's quantization of activations.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// Codes of eight values. What NaN and infinities give does not matter, as their scale is not
// finite, but it stays within +-largest.
TREADLE_SIMD __m256i Round(const float* x, __m256 inverse, int32_t largest) {
  const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  return _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(largest)),
                          _mm256_set1_epi32(-largest));
}

// P planes of 32 codes: of 127 steps to absmax, or of 127 * 128.
template <int P>
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
  constexpr int32_t kSteps = P == 1 ? 127 : 127 * 128;
  const float scale = zero ? 0.0f : absmax / kSteps;
  const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : kSteps / absmax);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) q[i] = Round(x + 8 * i, inverse, kSteps);
  block.low_sum = SumLanes(_mm256_add_epi32(q[0], q[1]));
  block.high_sum = SumLanes(_mm256_add_epi32(q[2], q[3]));
  block.scale = scale;
  block.scaled_sum = scale * static_cast<float>(block.low_sum + block.high_sum);
  if constexpr (P == 2) {
    StoreWordCodes(codes + kWordsAt, q);
    // q = 128 * high + low, low in [-64, 63]
    __m256i high[4];
    for (int i = 0; i < 4; ++i) {
      high[i] = _mm256_srai_epi32(_mm256_add_epi32(q[i], _mm256_set1_epi32(64)), 7);
      q[i] = _mm256_sub_epi32(q[i], _mm256_slli_epi32(high[i], 7));
    }
    StoreByteCodes(codes + kBlockValues, high);
  }
  StoreByteCodes(codes, q);
}

template <int P>
void Quantize(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  for (int64_t b = 0; b < k / kBlockValues; ++b) {
    QuantizeBlock<P>(x + b * kBlockValues,
                     codes + b * (P == 1 ? kInt8Bytes : kInt16Bytes) * kBlockValues, blocks[b]);
  }
}

}  // namespace

void QuantizeInt8(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  Quantize<1>(x, k, codes, blocks);
}
void QuantizeInt16(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  Quantize<2>(x, k, codes, blocks);
}

}  // namespace treadle::TREADLE_ISA
