// Host side of the dense family: a matrix as its kernels read it (dense_kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/formats/matrix_source.h"

namespace treadle::cuda {

// Rows [begin, begin + count) of the packed matrix, [count, DenseStride(k)], zeros beyond k: each
// value decoded canonically and rounded once to `dtype` (kF32: as it is; kF16, kBF16: half to even,
// kF16 saturating). threads: how many share the work.
void PackDenseRows(const MatrixSource& source, DType dtype, int64_t begin, int64_t count,
                   int threads, std::byte* out);

}  // namespace treadle::cuda
