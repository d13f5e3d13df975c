// Two parts of a softmax-weighted sum become one: the formula that combines blocks and splits.
//
// Scores are binary logarithms of weights (queries are multiplied by log2(e) along with the scale),
// because that is what the hardware raises.
#pragma once

#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

// The number to subtract from scores of maximum `max`: itself, but for a part that saw no position.
TREADLE_DEVICE float Shift(float max) { return max == -simt::Infinity() ? 0.0f : max; }

TREADLE_DEVICE float Weight(float score, float shift) { return simt::Exp2(score - shift); }

struct FoldFactors {
  float max;    // of both
  float left;   // what the earlier part is multiplied by
  float right;  // and the later one
};

TREADLE_DEVICE FoldFactors Factors(float left_max, float right_max) {
  FoldFactors f;
  f.max = right_max > left_max ? right_max : left_max;
  f.left = Weight(left_max, Shift(f.max));
  f.right = Weight(right_max, Shift(f.max));
  return f;
}

// Folds sums, and elements of vectors.
TREADLE_DEVICE float Fold(float left, float right, const FoldFactors& f) {
  return simt::Fma(right, f.right, left * f.left);
}

}  // namespace treadle::cuda
