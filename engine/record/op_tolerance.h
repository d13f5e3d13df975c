// By how much an op's result may differ from the reference's, from its operands' magnitudes: the
// number of roundings that separate the two, in units of float's (2^-24).
//
// Each gives a function of row and column; tensors outlive it. Thread safety: pure.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace treadle {

using ToleranceOf = std::function<double(int64_t row, int64_t column)>;

// Of a weight's rows, as its format stores them.
struct WeightMagnitudes {
  std::vector<float> norms;    // [n], Euclidean, of |scale * code| + |offset|
  std::vector<float> largest;  // [n]
  // As LLM.int8() has it; 0: none.
  float outlier_threshold = 0;
  bool row_int8 = false;
  bool rounds_codebook = false;  // the mode does (kernels/cpu/cpu_backend.h)
};
WeightMagnitudes MagnitudesOf(const MatrixSource& source, ComputeMode compute);

ToleranceOf Exactly();
// before: what is added to; or empty.
ToleranceOf RmsNormTolerance(Tensor expected, Tensor before);
ToleranceOf LayerNormTolerance(Tensor x, const float* weight, const float* bias, float eps);
// x: the projection's rows; batch: all of the call's.
ToleranceOf MatMulTolerance(const WeightMagnitudes& weight, Tensor x, Tensor batch,
                            const float* bias, Tensor before);
// Of what was rotated: a few roundings of the row's largest element.
ToleranceOf RowTolerance(Tensor rotated);
// Of an element of the row in the cache.
double StoredTolerance(Tensor k, int64_t row, DType cache);
ToleranceOf AttentionTolerance(Tensor q, const KvView& kv, float scale);
ToleranceOf GatedTolerance(Tensor gate, Tensor up, Tensor expected);
// Some roundings of the element itself.
ToleranceOf ElementTolerance(Tensor x);
ToleranceOf MixTolerance(Tensor x, std::span<const int32_t> places, Tensor weights, Tensor before);
// Of a log probability.
double SampleTolerance(Tensor logits, int64_t row);

}  // namespace treadle
