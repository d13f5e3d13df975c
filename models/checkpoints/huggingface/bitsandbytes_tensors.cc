// Matrices of bitsandbytes' checkpoints; hf_quantization.h lists their entries.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/json_file.h"
#include "models/checkpoints/huggingface/quantized_parts.h"

namespace treadle {
namespace {

constexpr std::string_view kTypes[] = {"nf4", "fp4"};

std::string StateName(const SafetensorsEntry& weight, std::string_view type) {
  return Str(weight.name, ".quant_state.bitsandbytes__", type);
}

bool Claims4Bit(const QuantizedParts& parts, const SafetensorsEntry& weight,
                const HfQuantization& quantization) {
  const auto has = [&](const std::string& name) { return parts.Find(name) != nullptr; };
  return has(StateName(weight, "nf4")) || has(StateName(weight, "fp4")) ||
         has(weight.name + ".absmax") ||
         (weight.dtype == "U8" && quantization.method == "bitsandbytes" &&
          !has(weight.name + ".quant_state.treadle"));
}

// The second level of double quantization: absmax[i] = map[code[i]] * scales[i / block] + offset.
struct Nested {
  SafetensorsEntry map;
  SafetensorsEntry scales;
  int64_t block = 0;
  float offset = 0;
};

absl::StatusOr<Nested> ReadNested(QuantizedParts& parts, const SafetensorsEntry& weight,
                                  const SafetensorsEntry& state, const nlohmann::json& json,
                                  int64_t blocks) {
  const auto block = json.value("nested_blocksize", nlohmann::json());
  const auto offset = json.value("nested_offset", nlohmann::json());
  if (!IntegerIn(block, 1, int64_t{1} << 30)) {
    return EntryError(state, "has no nested_blocksize from 1 to 2^30, which u8 absmax needs");
  }
  if (!offset.is_number() || !std::isfinite(offset.get<float>())) {
    return EntryError(state, "has no finite nested_offset, which u8 absmax needs");
  }
  Nested nested;
  nested.block = block.get<int64_t>();
  nested.offset = offset.get<float>();
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* map,
                           parts.Require(weight.name + ".nested_quant_map", "F32", 256));
  const int64_t count = (blocks + nested.block - 1) / nested.block;
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scales,
                           parts.Require(weight.name + ".nested_absmax", "F32", count));
  nested.map = *map;
  nested.scales = *scales;
  return nested;
}

absl::StatusOr<std::vector<float>> DecodeNested(const SafetensorsEntry& codes,
                                                const Nested& nested) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<float> map, FiniteValues(nested.map));
  TREADLE_ASSIGN_OR_RETURN(const std::vector<float> scales, FiniteValues(nested.scales));
  std::vector<float> absmax(codes.data.size());
  for (size_t i = 0; i < absmax.size(); ++i) {
    const float value = map[std::to_integer<uint8_t>(codes.data[i])];
    absmax[i] = value * scales[i / static_cast<size_t>(nested.block)] + nested.offset;
    if (!std::isfinite(absmax[i])) {
      return EntryError(codes, "gives ", absmax[i], " as scale ", i, ", expected a finite number");
    }
  }
  return absmax;
}

absl::StatusOr<std::string_view> TypeOf(const QuantizedParts& parts,
                                        const SafetensorsEntry& weight) {
  for (const std::string_view type : kTypes) {
    if (parts.Find(StateName(weight, type)) != nullptr) return type;
  }
  return EntryError(weight, "has 4-bit codes but no ",
                    Quoted(weight.name + ".quant_state.bitsandbytes__nf4"),
                    " or __fp4 beside it (files from before bitsandbytes 0.41.3 have none and are "
                    "not read)");
}

absl::StatusOr<StoredTensor> Read4Bit(QuantizedParts& parts, const SafetensorsEntry& weight,
                                      const HfQuantization&) {
  TREADLE_ASSIGN_OR_RETURN(const std::string_view type, TypeOf(parts, weight));
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* state,
                           parts.Require(StateName(weight, type), "U8", -1));
  TREADLE_ASSIGN_OR_RETURN(const MatrixDescription matrix, ReadDescription(*state, "blocksize"));
  if (matrix.json.value("quant_type", nlohmann::json()) != type) {
    return EntryError(*state, "has a quant_type that is not ", type);
  }
  StoredTensor tensor = TensorOf(weight, FindWeightFormat(type), {matrix.n, matrix.k});
  const int64_t bytes = tensor.format->MatrixBytes(matrix.n, matrix.k);
  if (static_cast<int64_t>(weight.data.size()) != bytes) {
    return EntryError(weight, "has ", weight.data.size(), " bytes of codes, expected ", bytes,
                      " for a matrix ", ShapeText(tensor.shape));
  }
  const int64_t blocks = (matrix.n * matrix.k + matrix.block - 1) / matrix.block;
  const std::string absmax_name = weight.name + ".absmax";
  const SafetensorsEntry* found = parts.Find(absmax_name);
  const bool double_quantized = found != nullptr && found->dtype == "U8";
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* absmax,
                           parts.Require(absmax_name, double_quantized ? "U8" : "F32", blocks));
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* map,
                           parts.Require(weight.name + ".quant_map", "F32", 16));
  tensor.constant_bytes = absmax->data.size() + map->data.size() + state->data.size();
  Nested nested;
  if (double_quantized) {
    TREADLE_ASSIGN_OR_RETURN(nested, ReadNested(parts, weight, *state, matrix.json, blocks));
    tensor.constant_bytes += nested.scales.data.size() + nested.map.data.size();
  }
  tensor.constants = [format = tensor.format, absmax = *absmax, map = *map, block = matrix.block,
                      double_quantized, nested]() -> absl::StatusOr<MatrixConstants> {
    MatrixConstants constants;
    constants.scale_block = block;
    TREADLE_ASSIGN_OR_RETURN(
        constants.scales, double_quantized ? DecodeNested(absmax, nested) : FiniteValues(absmax));
    TREADLE_ASSIGN_OR_RETURN(std::vector<float> codebook, FiniteValues(map));
    if (!std::ranges::equal(codebook, format->codebook)) constants.codebook = std::move(codebook);
    return constants;
  };
  return tensor;
}

bool ClaimsInt8(const QuantizedParts& parts, const SafetensorsEntry& weight,
                const HfQuantization& quantization) {
  const std::string layer = weight.name.substr(0, weight.name.rfind('.'));
  return weight.dtype == "I8" &&
         (quantization.method == "bitsandbytes" || parts.Find(layer + ".SCB") != nullptr);
}

absl::StatusOr<StoredTensor> ReadInt8(QuantizedParts& parts, const SafetensorsEntry& weight,
                                      const HfQuantization& quantization) {
  const std::string layer = weight.name.substr(0, weight.name.rfind('.'));
  if (weight.shape.size() != 2) {
    return EntryError(weight, "has shape ", ShapeText(weight.shape), ", expected a matrix");
  }
  const int64_t k = weight.shape[1];
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* absmax,
                           parts.Require(layer + ".SCB", "F32", weight.shape[0]));
  if (const SafetensorsEntry* order = parts.Take(layer + ".weight_format")) {
    const bool row_major =
        order->dtype == "U8" && order->Elements() == 1 && order->data[0] == std::byte{0};
    if (!row_major) {
      return EntryError(*order,
                        "is not u8 0 (row-major); the tiled layouts of older versions are "
                        "not read");
    }
  }
  StoredTensor tensor =
      TensorOf(weight, FindWeightFormat("int8"), weight.shape, absmax->data.size());
  tensor.constants = [absmax = *absmax, k,
                      threshold =
                          quantization.outlier_threshold]() -> absl::StatusOr<MatrixConstants> {
    MatrixConstants constants;
    constants.scale_block = k;
    constants.outlier_threshold = threshold;
    TREADLE_ASSIGN_OR_RETURN(constants.scales, FiniteValues(absmax, /*absolute=*/true));
    for (float& scale : constants.scales) scale /= 127;
    return constants;
  };
  return tensor;
}

}  // namespace

const QuantizedReader kBitsAndBytes4BitReader = {Claims4Bit, Read4Bit};
const QuantizedReader kBitsAndBytesInt8Reader = {ClaimsInt8, ReadInt8};

}  // namespace treadle
