// A SIMULATION of ways to quantize to 8 bits that are not formats of ours: a backend that rounds
// activations and weights to what each way could represent, and multiplies the results as 32-bit
// floats. It answers what a way costs in quality (LLM.int8(), Table 2.1), not how fast it is.
//
// Thread safety: as Backend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/backend.h"

namespace treadle {

struct Int8Variant {
  std::string_view name = {};
  // 255 levels from the least to the greatest value (zero is one of them); else from -absmax to
  // absmax.
  bool zero_point = false;
  bool activation_rows = false;  // a constant per row of X; else one for all rows of a call
  bool weight_rows = false;      // a constant per row of W, an output feature; else one for all
  // Columns of X in which any row of the call reaches `threshold` are multiplied apart: X as
  // floats, W as `outlier_weights_int8` says.
  bool decomposed = false;
  bool outlier_weights_int8 = false;  // as bitsandbytes keeps them; else 32 bits (the thesis: 16)
  float threshold = 6.0f;
};

// The rows of Table 2.1, in its order, then LLM.int8() with 8-bit weights of outlier columns.
std::span<const Int8Variant> Int8Variants();

// values [rows, cols] -> what `variant` represents, in place; one constant per row, or one for all.
void RoundToInt8(bool zero_point, bool per_row, std::span<float> values, int64_t rows,
                 int64_t cols);

// `backend`: on the CPU, exact. Matrices with `untouched_rows` rows (the head, the embedding) stay
// as they are. A call is one MatMul.
std::unique_ptr<Backend> SimulateInt8(std::unique_ptr<Backend> backend, const Int8Variant& variant,
                                      int64_t untouched_rows);

}  // namespace treadle
