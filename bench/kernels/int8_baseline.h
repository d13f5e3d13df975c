// The time of a product of LLM.int8() on the GPU when it is put together from cuBLASLt, and takes
// no outliers out (library_int8.h): weights from memory, as ColdProducts has them.
//
// It is given the best case: matrices of one input are one product, and all launches are replayed
// from a graph, between marks on the device, so that no time of the host counts.
//
// Thread safety: call from one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "bench/kernels/cold_products.h"
#include "kernels/formats/matrix_source.h"

namespace treadle {

class Int8Baseline {
 public:
  // sources: as ColdProducts', of LLM.int8(). Errors: there is no usable device, this build has no
  // CUDA, no memory, no library.
  static absl::StatusOr<std::unique_ptr<Int8Baseline>> Create(std::span<const MatrixSource> sources,
                                                              const ColdProducts::Options& options);
  virtual ~Int8Baseline() = default;

  // Seconds of one product, the mean over the copies. Errors: the library has no algorithm, or the
  // device failed.
  virtual absl::StatusOr<double> Run(int64_t rows) = 0;
};

}  // namespace treadle
