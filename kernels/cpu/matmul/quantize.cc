// ComputeMode::kInt8's, kInt12's and kInt16's quantization of activations.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

template <int32_t kSteps>
void QuantizeWords(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  const int64_t count = k / kBlockValues;
  for (int64_t begin = 0, end; begin < count; begin = end) {
    end = SpanEnd(begin, count);
    const ActivationScale scale = ScaleOf<kSteps>(x + begin * kBlockValues, end - begin);
    for (int64_t b = begin; b < end; ++b, codes += kInt16Bytes * kBlockValues) {
      __m256i q[4];
      blocks[b] = QuantizeBlock(x + b * kBlockValues, scale, kSteps, q);
      StorePlanes<7>(codes, codes + kBlockValues, q);
      StoreWordCodes(codes + kWordsAt, q);
    }
  }
}

}  // namespace

void QuantizeInt8(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  for (int64_t b = 0; b < k / kBlockValues; ++b, codes += kBlockValues) {
    __m256i q[4];
    const float* values = x + b * kBlockValues;
    blocks[b] = QuantizeBlock(values, ScaleOf<kInt8Steps>(values, 1), kInt8Steps, q);
    StoreByteCodes(codes, q);
  }
}
void QuantizeInt12(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  QuantizeWords<kInt12Steps>(x, k, codes, blocks);
}
void QuantizeInt16(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  QuantizeWords<kInt16Steps>(x, k, codes, blocks);
}

}  // namespace treadle::TREADLE_ISA
