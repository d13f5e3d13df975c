// GPTQ's and AWQ's matrices; hf_quantization.h lists their entries.
#include <cstring>
#include <utility>

#include "kernels/formats/gptq.h"
#include "models/parallel_split.h"
#include "models/quantized_parts.h"

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
  const auto scales = Values<uint16_t>(entries.scales);
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

absl::StatusOr<StoredTensor> ReadGroups(QuantizedParts& parts, const SafetensorsEntry& weight,
                                        const HfQuantization& quantization) {
  if (quantization.method != "gptq" && quantization.method != "awq") {
    return EntryError(weight,
                      "is of GPTQ or AWQ, which config.json's quantization_config does not "
                      "say (quant_method, bits, group_size)");
  }
  const bool awq = quantization.method == "awq";
  const std::string layer = weight.name.substr(0, weight.name.rfind('.'));
  GroupEntries entries = {.qweight = weight, .qzeros = {}, .scales = {}, .g_idx = {}};
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scales,
                           parts.Require(layer + ".scales", "F16", -1));
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* qzeros,
                           parts.Require(layer + ".qzeros", "I32", -1));
  if (weight.dtype != "I32" || weight.shape.size() != 2 || scales->shape.size() != 2) {
    return EntryError(weight, "is ", weight.dtype, " ", ShapeText(weight.shape), " with scales ",
                      ShapeText(scales->shape), ", expected an I32 matrix with a matrix of scales");
  }
  entries.scales = *scales;
  entries.qzeros = *qzeros;
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
  StoredTensor tensor = {
      .name = layer + ".weight",
      .format = FindWeightFormat(quantization.bits == 4 ? "gptq4" : "gptq8"),
      .shape = {tensors.n, tensors.k},
      .data = weight.data.data(),
      .bytes = weight.data.size(),
      .constant_bytes = scales->data.size() + qzeros->data.size() + entries.g_idx.data.size()};
  tensor.constants = [entries, tensors] { return ReadGroupConstants(entries, tensors); };
  return tensor;
}

}  // namespace

const QuantizedReader kGroupReader = {ClaimsGroups, ReadGroups};

}  // namespace treadle
