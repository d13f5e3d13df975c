// ComputeMode::kInt8's, kInt12's and kInt16's quantization of activations.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

template <int32_t kSteps>
void QuantizeWords(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  for (int64_t b = 0; b < k / kBlockValues; ++b, codes += kInt16Bytes * kBlockValues) {
    __m256i q[4];
    blocks[b] = QuantizeBlock<kSteps>(x + b * kBlockValues, q);
    StorePlanes<7>(codes, codes + kBlockValues, q);
    StoreWordCodes(codes + kWordsAt, q);
  }
}

}  // namespace

void QuantizeInt8(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks) {
  for (int64_t b = 0; b < k / kBlockValues; ++b, codes += kBlockValues) {
    __m256i q[4];
    blocks[b] = QuantizeBlock<kInt8Steps>(x + b * kBlockValues, q);
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
