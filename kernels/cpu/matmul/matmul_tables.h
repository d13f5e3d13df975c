// What the matrix kernels of one instruction set share with each other only.
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"

namespace treadle::TREADLE_ISA {

// Part of MatMulInt16: layouts with HasCodes.
MatMulFunction MatMulCodebook;
// A block of 32 activations of kInt16: its planes (low, high), then, from byte kWordsAt, the 16-bit
// activations themselves, of four consecutive k the even ones before the odd ones.
inline constexpr int64_t kWordsAt = 2 * kBlockValues;
// In float, for a few rows: false if there is no such kernel for the layout.
bool MatMulDirect(const MatMulInput& input, const MatMulShare& share);
inline constexpr int64_t kDirectRows = 8;
// kRowInt8, the same in every mode.
MatMulFunction MatMulRowInt8;
// The codes of one activation. On AVX2 they are words: of four consecutive k the even ones before
// the odd ones.
#ifdef __AVX512F__
inline constexpr int kRowBytes = kRowBytesAvx512;
#else
inline constexpr int kRowBytes = kRowBytesAvx2;
#endif

}  // namespace treadle::TREADLE_ISA
