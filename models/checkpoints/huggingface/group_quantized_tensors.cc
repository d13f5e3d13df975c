// GPTQ's and AWQ's matrices; hf_quantization.h lists their entries.
#include <cstring>
#include <utility>

#include "kernels/formats/gptq.h"
#include "models/checkpoints/huggingface/quantized_parts.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

// An entry's elements. Nothing aligns them in a file.
template <typename T>
std::vector<T> Values(const SafetensorsEntry& entry) {
  std::vector<T> values(entry.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), entry.data.data(), values.size() * sizeof(T));
  return values;
}

bool ClaimsGroups(const QuantizedParts&, const SafetensorsEntry& weight, const HfQuantization&) {
  return weight.name.ends_with(".qweight");
}

struct GroupEntries {
  SafetensorsEntry qweight, qzeros, scales;
  SafetensorsEntry g_idx;  // may be empty
};

absl::StatusOr<MatrixConstants> ReadGroupConstants(const GroupEntries& entries,
                                                   GroupQuantizedTensors tensors) {
  const auto qweight = Values<int32_t>(entries.qweight);
  const auto qzeros = Values<int32_t>(entries.qzeros);
  const std::vector<float> scales = EntryValues(entries.scales);
  const auto g_idx = Values<int32_t>(entries.g_idx);
  tensors.qweight = qweight;
  tensors.qzeros = qzeros;
  tensors.scales = scales;
  tensors.g_idx = g_idx;
  auto matrix = ConvertGroupQuantized(tensors, SplitOverThreads(0));
  if (!matrix.ok()) {
    return absl::Status(matrix.status().code(),
                        Str(entries.qweight.file, ": tensor ", Quoted(entries.qweight.name), ": ",
                            std::string(matrix.status().message())));
  }
  matrix->constants.codes = std::move(matrix->data);
  return std::move(matrix->constants);
}

// In the type of the model that was quantized: F16, with GPTQModel's AWQ also BF16.
absl::StatusOr<const SafetensorsEntry*> TakeScales(QuantizedParts& parts, const std::string& name) {
  const SafetensorsEntry* scales = parts.Find(name);
  if (scales == nullptr || FindSafetensorsFormat(scales->dtype) == nullptr) {
    return parts.Require(name, "F16", -1);
  }
  return parts.Take(name);
}

// Bits and groups of a matrix that `dynamic` rules may have changed, as its entries show them.
// Where several group sizes would give as many groups, the configuration's is meant, if it is one
// of them.
absl::Status ReadOwnGroups(const SafetensorsEntry& weight, const SafetensorsEntry& scales,
                           const SafetensorsEntry& qzeros, bool awq, HfQuantization& quantization) {
  const int64_t n = scales.shape[1], groups = scales.shape[0];
  if (qzeros.shape.size() != 2 || qzeros.data.empty()) {
    return EntryError(qzeros, "has shape ", ShapeText(qzeros.shape), ", expected a matrix");
  }
  const int64_t bits = qzeros.shape[1] * 32 / n;
  if (bits != 4 && (bits != 8 || awq)) {
    return EntryError(weight, "is of ", bits, " bits by its shapes, expected 4",
                      awq ? "" : " or 8");
  }
  quantization.bits = static_cast<int>(bits);
  const int64_t k = awq ? weight.shape[0] : weight.shape[0] * 32 / bits;
  const int64_t size = quantization.group_size == -1 ? k : quantization.group_size;
  if ((k + size - 1) / size == groups) return absl::OkStatus();
  if (k % groups != 0) {
    return EntryError(weight, "has ", groups, " groups of scales for ", k,
                      " columns, expected a number that divides them");
  }
  quantization.group_size = k / groups;
  return absl::OkStatus();
}

absl::StatusOr<StoredTensor> ReadGroups(QuantizedParts& parts, const SafetensorsEntry& weight,
                                        const HfQuantization& general) {
  HfQuantization quantization = general;
  if (quantization.method != "gptq" && quantization.method != "awq") {
    return EntryError(weight,
                      "is of GPTQ or AWQ, which config.json's quantization_config does not "
                      "say (quant_method, bits, group_size)");
  }
  const bool awq = quantization.method == "awq";
  const std::string layer = weight.name.substr(0, weight.name.rfind('.'));
  GroupEntries entries = {.qweight = weight, .qzeros = {}, .scales = {}, .g_idx = {}};
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scales, TakeScales(parts, layer + ".scales"));
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* qzeros,
                           parts.Require(layer + ".qzeros", "I32", -1));
  if (weight.dtype != "I32" || weight.shape.size() != 2 || scales->shape.size() != 2 ||
      weight.data.empty() || scales->data.empty()) {
    return EntryError(weight, "is ", weight.dtype, " ", ShapeText(weight.shape), " with scales ",
                      ShapeText(scales->shape), ", expected an I32 matrix with a matrix of scales");
  }
  entries.scales = *scales;
  entries.qzeros = *qzeros;
  if (quantization.mixed) {
    TREADLE_RETURN_IF_ERROR(ReadOwnGroups(weight, *scales, *qzeros, awq, quantization));
  }
  if (parts.Find(layer + ".g_idx") != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* g_idx,
                             parts.Require(layer + ".g_idx", "I32", -1));
    entries.g_idx = *g_idx;
  }
  GroupQuantizedTensors tensors;
  tensors.packing = awq                           ? GroupPacking::kAwq
                    : quantization.second_version ? GroupPacking::kGptqV2
                                                  : GroupPacking::kGptqV1;
  tensors.bits = quantization.bits;
  tensors.n = scales->shape[1];
  tensors.k = awq ? weight.shape[0] : weight.shape[0] * 32 / quantization.bits;
  tensors.group_size = quantization.group_size;
  tensors.symmetric = quantization.symmetric;
  StoredTensor tensor = TensorOf(
      weight, FindWeightFormat(quantization.bits == 4 ? "gptq4" : "gptq8"), {tensors.n, tensors.k},
      scales->data.size() + qzeros->data.size() + entries.g_idx.data.size());
  tensor.name = layer + ".weight";
  tensor.constants = [entries, tensors] { return ReadGroupConstants(entries, tensors); };
  return tensor;
}

}  // namespace

const QuantizedReader kGroupReader = {ClaimsGroups, ReadGroups};

}  // namespace treadle
