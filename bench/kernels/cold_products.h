// A matrix product whose weights come from memory, as in a real iteration: it rotates over copies
// of them that together exceed any cache.
//
// Thread safety: as the backend's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/formats/matrix_source.h"

namespace treadle {

class ColdProducts {
 public:
  // Projections of one input, of the type that a model would give it, for up to `max_rows` rows;
  // `sources` may be dropped afterwards. accumulate: added to their outputs. asynchronous: the
  // backend's ops return before they are done. CHECK-fails on an error of the backend.
  struct Options {
    int64_t max_rows = 1;
    bool accumulate = false;
    int64_t cold_bytes = 0;
    bool asynchronous = false;
  };
  ColdProducts(Backend& backend, std::span<const MatrixSource> sources, const Options& options);

  // The activations. [rows, k] The same dozen columns of all rows, as far as there are so many,
  // hold outliers of LLM.int8(), and no others do: about as in large models (Dettmers, chapter 2).
  static std::vector<float> Activations(int64_t rows, int64_t k);
  // How many copies weights of so many bytes need.
  static int64_t Copies(const Options& options, double weight_bytes);

  // Seconds of one product. Median over the copies (what interrupts a few of them does not show);
  // of an asynchronous backend the mean, since nobody waits between them.
  double Run(int64_t rows);
  // Bytes that one product must move.
  double bytes(int64_t rows) const;
  double operations(int64_t rows) const;

 private:
  struct Output {
    Buffer buffer;
    Tensor tensor;  // [max_rows, n]
  };

  void MakeInput(int64_t k);

  Backend& backend_;
  const Options options_;
  double weight_bytes_ = 0;
  int64_t features_ = 0;  // n of all projections
  Buffer input_buffer_;
  Tensor input_;  // [max_rows, k]
  std::vector<Output> outputs_;
  std::vector<std::unique_ptr<PackedMatrix>> packed_;  // copy after copy
  std::vector<double> times_;
};

}  // namespace treadle
