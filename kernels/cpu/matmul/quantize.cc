// ComputeMode::kInt8's and kInt16's quantization of activations.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// P planes of 32 codes.
template <int P>
void QuantizeBlock(const float* x, int8_t* codes, ActivationBlock& block) {
  __m256i q[4];
  block = QuantizeBlock<P>(x, q);
  if constexpr (P == 1) {
    StoreByteCodes(codes, q);
  } else {
    StorePlanes(codes, codes + kBlockValues, q);
    StoreWordCodes(codes + kWordsAt, q);
  }
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
