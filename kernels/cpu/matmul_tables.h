// The kernels of matmul_kernels.h as one instruction set's sources define them.
#pragma once

#include "kernels/cpu/matmul_kernels.h"

namespace treadle::TREADLE_ISA {

void MatMulExact(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);
void MatMulInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);
void MatMulInt16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);

}  // namespace treadle::TREADLE_ISA
