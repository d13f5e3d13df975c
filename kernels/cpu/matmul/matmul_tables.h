// The kernels of matmul_kernels.h as one instruction set's sources define them.
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"

namespace treadle::TREADLE_ISA {

void MatMulExact(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);
// MatMulKernels::decode.
const float* DecodeTile(const PackedView& weight, int64_t group, int64_t from, int64_t count,
                        float* tile);
void MatMulInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);
void MatMulInt16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);

// Part of MatMulInt16: layouts with HasCodes.
void MatMulCodebook(const MatMulInput& input, const MatMulShare& share,
                    const MatMulScratch& scratch);
// A block of 32 activations of kInt16: its planes (low, high), then, from byte kWordsAt, the 16-bit
// activations themselves, of four consecutive k the even ones before the odd ones.
inline constexpr int64_t kInt16Bytes = 4;  // of an activation
inline constexpr int64_t kWordsAt = 2 * kBlockValues;
// In float, for a few rows: false if there is no such kernel for the layout.
bool MatMulDirect(const MatMulInput& input, const MatMulShare& share);
inline constexpr int64_t kDirectRows = 8;
// kRowInt8, the same in every mode.
void MatMulRowInt8(const MatMulInput& input, const MatMulShare& share,
                   const MatMulScratch& scratch);
void FlagOutliers(const float* x, int64_t stride, int64_t rows, int64_t begin, int64_t end,
                  int32_t threshold_bits, uint8_t* flags);
void QuantizeRow(const float* x, int64_t k, int64_t row, const RowInt8Input& out);
// The codes of one activation. On AVX2 they are words: of four consecutive k the even ones before
// the odd ones.
#ifdef __AVX512F__
inline constexpr int kRowBytes = 1;
#else
inline constexpr int kRowBytes = 2;
#endif

}  // namespace treadle::TREADLE_ISA
