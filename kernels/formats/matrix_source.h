// A matrix as a checkpoint, or a quantizer, hands it to a backend; and its canonical values.
//
// Thread safety: everything here is a pure function of its arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/formats/weight_format.h"

namespace treadle {

// Which activations LLM.int8() takes out of its integer product.
enum class OutlierRule : uint8_t {
  kPerRow,   // elements of a row with |x| >= threshold: a row depends on itself alone
  kPerCall,  // columns in which any row of the call has one (the paper's rule; voids N1 and N2)
};

// The constants that apart formats keep besides their codes (weight_format.h).
struct MatrixConstants {
  // w[i] = scales[b] * (codebook[code[i]] - zeros[b]), each rounded once, with b = i / scale_block
  // and i = row * k + column: a block may straddle rows. For LLM.int8() scale_block is k and a
  // scale is absmax / 127.
  std::vector<float> scales;
  // As many as scales, or none: all 0. Not for LLM.int8().
  std::vector<float> zeros = {};
  int64_t scale_block = 0;
  // [2^code_bits]; empty: the format's own.
  std::vector<float> codebook;
  // If set: what is stored i-th of a row belongs to input feature input_order[i], so that features
  // that share a scale can lie side by side (GPTQ's act-order); "column" above then is i. A
  // canonical row is in the order of the features all the same. [k], each feature once. Not for
  // LLM.int8().
  std::vector<int32_t> input_order = {};
  // If set: the matrix' codes, which lie in another order in the file; MatrixSource::data points
  // here.
  std::vector<std::byte> codes;
  // LLM.int8() only. 0: no decomposition.
  float outlier_threshold = 6.0f;
  OutlierRule outlier_rule = OutlierRule::kPerRow;
};

// W [n, k], row-major in `format`'s layout.
struct MatrixSource {
  const WeightFormat* format = nullptr;
  const std::byte* data = nullptr;
  int64_t n = 0;  // output features
  int64_t k = 0;  // input features, a multiple of format->block
  // If set: row i of the packed matrix is row row_order[i] of the source. [n]
  std::span<const int32_t> row_order = {};
  // Dense formats only: `data` is [k, n] (GPT-2's Conv1D in Hugging Face files).
  bool transposed = false;
  // Apart formats only.
  const MatrixConstants* constants = nullptr;
  // Set: the matrix is only ever looked up (Backend::Embed), and `data` is the copy of the file's
  // bytes that this keeps. A backend may leave it there instead of packing it.
  std::shared_ptr<const void> file = nullptr;
  // A layer's matrix: only ever multiplied with (Backend::MatMul), never looked up, and no head. A
  // backend may keep less of it; ComputeMode::kBf16 is for these.
  bool of_layer = false;
  // With of_layer: the answers bear activations of 8 bits here (ComputeMode::kMixed).
  bool coarse = false;

  // The source's row that is the packed matrix's row `row`.
  int64_t SourceRow(int64_t row) const { return row_order.empty() ? row : row_order[row]; }
};

// Owns what its source() points to.
struct OwnedMatrix {
  const WeightFormat* format = nullptr;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<std::byte> data = {};
  MatrixConstants constants = {};  // apart formats

  MatrixSource source() const {
    return {.format = format,
            .data = data.data(),
            .n = n,
            .k = k,
            .constants = format->apart() ? &constants : nullptr};
  }
};

// Errors: a shape that the format does not allow, a bad row or input order, constants that are
// missing, of the wrong size, or not finite.
absl::Status CheckMatrixSource(const MatrixSource& source);

// MatrixConstants::input_order of the matrix; empty: in order.
std::span<const int32_t> InputOrderOf(const MatrixSource& source);

// The value of each code of an apart format's matrix. [2^code_bits]
std::span<const float> CodebookOf(const MatrixSource& source);

// How many columns of an apart format's matrix share their constants in every row; a divisor of k.
int64_t ConstantRun(const MatrixSource& source);

// Whether products of integers take the codes as they are: an inline format's, or those of an apart
// format (GPTQ, AWQ) whose weights are scale * (code - zero), with four or eight bits, a zero that
// is a code, and constants that change at multiples of 32 columns.
bool HasIntegers(const MatrixSource& source);
// Whether these are nibbles (WeightFormat::nibbles).
bool HasNibbles(const MatrixSource& source);
// The zero of an apart format's block of constants. With HasIntegers.
float ZeroCode(const MatrixSource& source, size_t block);

// Codes [first, first + count) of an apart format's flat matrix, one per byte.
void UnpackCodes(const WeightFormat& format, const std::byte* data, int64_t first, int64_t count,
                 uint8_t* codes);

// Row `row` of the source (not of the packed matrix), decoded canonically. out: [k]
void DecodeSourceRow(const MatrixSource& source, int64_t row, float* out);

}  // namespace treadle
