// FP8 matrices and Treadle's own k-bit ones; hf_quantization.h lists their entries.
#include <numeric>
#include <utility>

#include "models/checkpoints/huggingface/quantized_parts.h"

namespace treadle {
namespace {

// How a matrix' scales lie in their entry.
struct Fp8Scales {
  int64_t rows = 1;     // rows of the matrix that share one
  int64_t columns = 1;  // columns that do
  int64_t per_row = 1;  // scales of one row of blocks
};

absl::StatusOr<Fp8Scales> ScaleLayout(const SafetensorsEntry& scale, int64_t n, int64_t k,
                                      const HfQuantization& quantization) {
  const int64_t count = scale.Elements();
  if (FindSafetensorsFormat(scale.dtype) == nullptr) {
    return EntryError(scale, "is ", scale.dtype, ", expected F32, F16 or BF16");
  }
  if (count == 1) return Fp8Scales{n, k, 1};
  const bool vector = scale.shape.size() == 1 || (scale.shape.size() == 2 && scale.shape[1] == 1);
  if (vector && scale.shape[0] == n) return Fp8Scales{1, k, 1};
  const int64_t rows = quantization.block_rows, columns = quantization.block_columns;
  const int64_t blocks[] = {(n + rows - 1) / rows, (k + columns - 1) / columns};
  if (scale.shape.size() == 2 && scale.shape[0] == blocks[0] && scale.shape[1] == blocks[1]) {
    return Fp8Scales{rows, columns, blocks[1]};
  }
  return EntryError(scale, "has shape ", ShapeText(scale.shape), ", expected one number, [", n,
                    "], [", n, ", 1], or ", ShapeText(blocks), " for blocks of ", rows, " x ",
                    columns);
}

absl::StatusOr<MatrixConstants> ReadFp8Constants(const SafetensorsEntry& weight,
                                                 const SafetensorsEntry& scale, int64_t n,
                                                 int64_t k, const Fp8Scales& layout) {
  for (size_t i = 0; i < weight.data.size(); ++i) {
    if ((std::to_integer<int>(weight.data[i]) & 127) == 127) {
      return EntryError(weight, "is NaN at element ", i, ", expected finite weights");
    }
  }
  TREADLE_ASSIGN_OR_RETURN(std::vector<float> stored, FiniteValues(scale));
  MatrixConstants constants;
  if (layout.rows == n && layout.columns == k) {
    constants.scale_block = n * k;
    constants.scales = std::move(stored);
    return constants;
  }
  // Flat blocks that divide a row and lie in one block of columns each.
  constants.scale_block = std::gcd(k, layout.columns);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; column += constants.scale_block) {
      constants.scales.push_back(
          stored[row / layout.rows * layout.per_row + column / layout.columns]);
    }
  }
  return constants;
}

bool ClaimsFp8(const QuantizedParts&, const SafetensorsEntry& weight, const HfQuantization&) {
  return weight.dtype == "F8_E4M3" && weight.shape.size() == 2;
}

absl::StatusOr<StoredTensor> ReadFp8(QuantizedParts& parts, const SafetensorsEntry& weight,
                                     const HfQuantization& quantization) {
  const SafetensorsEntry* scale = parts.Take(weight.name + "_scale");
  if (scale == nullptr) scale = parts.Take(weight.name + "_scale_inv");
  if (scale == nullptr) {
    return EntryError(weight, "is F8_E4M3 without ", Quoted(weight.name + "_scale"), " or ",
                      Quoted(weight.name + "_scale_inv"), " beside it");
  }
  const int64_t n = weight.shape[0], k = weight.shape[1];
  TREADLE_ASSIGN_OR_RETURN(const Fp8Scales layout, ScaleLayout(*scale, n, k, quantization));
  StoredTensor tensor = TensorOf(weight, FindWeightFormat("fp8"), weight.shape, scale->data.size());
  tensor.constants = [weight, scale = *scale, n, k, layout] {
    return ReadFp8Constants(weight, scale, n, k, layout);
  };
  return tensor;
}

bool ClaimsKBit(const QuantizedParts& parts, const SafetensorsEntry& weight,
                const HfQuantization&) {
  return parts.Find(weight.name + ".quant_state.treadle") != nullptr;
}

absl::StatusOr<StoredTensor> ReadKBit(QuantizedParts& parts, const SafetensorsEntry& weight,
                                      const HfQuantization&) {
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* state,
                           parts.Require(weight.name + ".quant_state.treadle", "U8", -1));
  TREADLE_ASSIGN_OR_RETURN(const MatrixDescription matrix, ReadDescription(*state, "block"));
  const nlohmann::json name = matrix.json.value("format", nlohmann::json());
  const WeightFormat* format =
      name.is_string() ? FindWeightFormat(name.get<std::string>()) : nullptr;
  if (format == nullptr || !format->apart() || !format->codebook.empty()) {
    return EntryError(*state, "has no format from kbit3 to kbit8");
  }
  const int64_t bytes = format->MatrixBytes(matrix.n, matrix.k);
  if (weight.dtype != "U8" || static_cast<int64_t>(weight.data.size()) != bytes) {
    return EntryError(weight, "is ", weight.dtype, " ", ShapeText(weight.shape), ", expected U8 [",
                      bytes, "] for a matrix [", matrix.n, ", ", matrix.k, "] in ", format->name);
  }
  const int64_t blocks = (matrix.n * matrix.k + matrix.block - 1) / matrix.block;
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scales,
                           parts.Require(weight.name + ".scales", "F16", blocks));
  TREADLE_ASSIGN_OR_RETURN(
      const SafetensorsEntry* codebook,
      parts.Require(weight.name + ".codebook", "F32", int64_t{1} << format->code_bits));
  StoredTensor tensor = TensorOf(weight, format, {matrix.n, matrix.k},
                                 scales->data.size() + codebook->data.size() + state->data.size());
  tensor.constants = [scales = *scales, codebook = *codebook,
                      block = matrix.block]() -> absl::StatusOr<MatrixConstants> {
    MatrixConstants constants;
    constants.scale_block = block;
    TREADLE_ASSIGN_OR_RETURN(constants.scales, FiniteValues(scales));
    TREADLE_ASSIGN_OR_RETURN(constants.codebook, FiniteValues(codebook));
    return constants;
  };
  return tensor;
}

}  // namespace

const QuantizedReader kFp8Reader = {ClaimsFp8, ReadFp8};
const QuantizedReader kKBitReader = {ClaimsKBit, ReadKBit};

}  // namespace treadle
