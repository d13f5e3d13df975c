// Any quantized matrix as codes of one byte and the constants of runs of columns: what backends
// pack that have no layout of its format's own. LLM.int8()'s matrices too.
//
// A weight is scale * value(code) + second (inline formats), or scale * (value(code) - second)
// (apart formats).
//
// Thread safety: constant.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/formats/matrix_source.h"

namespace treadle {

class CodedRows {
 public:
  // The source outlives this. Not for dense formats.
  explicit CodedRows(const MatrixSource& source);

  // The width of a code: an apart format's own, 4 or 8 for an inline one.
  int bits() const { return bits_; }
  // The value of each code. [2^bits]
  std::span<const float> values() const { return values_; }
  // So many columns share their constants in every row; a divisor of k.
  int64_t run() const { return run_; }

  // Row `row` of the source. codes: [k]; scales, seconds: [k / run].
  void Read(int64_t row, uint8_t* codes, float* scales, float* seconds) const;

 private:
  const MatrixSource& source_;
  int bits_ = 8;
  std::span<const float> values_;
  int64_t run_ = 0;
  uint8_t code_of_[256] = {};  // inline formats: of an integer, plus 128
};

}  // namespace treadle
