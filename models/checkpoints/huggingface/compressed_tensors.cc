// Integers of compressed-tensors, and NVFP4 matrices of it and of Model Optimizer;
// hf_quantization.h lists their entries.
#include <array>
#include <cstring>
#include <utility>

#include "kernels/formats/gptq.h"
#include "models/checkpoints/huggingface/quantized_parts.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

constexpr std::string_view kPacked = "_packed";

// "P.weight", of an entry that may be called P.weight_packed.
std::string WeightName(const SafetensorsEntry& weight) {
  std::string name = weight.name;
  if (name.ends_with(kPacked)) name.resize(name.size() - kPacked.size());
  return name;
}

// An entry's elements. Nothing aligns them in a file.
std::vector<int32_t> Words(const SafetensorsEntry& entry) {
  std::vector<int32_t> words(entry.data.size() / sizeof(int32_t));
  if (!words.empty()) std::memcpy(words.data(), entry.data.data(), entry.data.size());
  return words;
}

absl::StatusOr<const SafetensorsEntry*> TakeFloats(QuantizedParts& parts, const std::string& name) {
  const SafetensorsEntry* const found = parts.Find(name);
  if (found == nullptr || FindSafetensorsFormat(found->dtype) == nullptr) {
    return parts.Require(name, "BF16", -1);
  }
  return parts.Take(name);
}

// The groups of a row that have a scale each, of scales that are [n, groups], or one of all.
absl::StatusOr<int64_t> GroupsOf(const SafetensorsEntry& scale, int64_t n) {
  if (scale.shape.size() == 2 && scale.shape[0] == n && scale.shape[1] > 0) return scale.shape[1];
  if (scale.shape.size() == 1 && scale.shape[0] == n) return 1;
  return EntryError(scale, "has shape ", ShapeText(scale.shape), ", expected [", n,
                    ", groups of a row]");
}

// -- integers -------------------------------------------------------------------------------------

bool ClaimsPacked(const QuantizedParts&, const SafetensorsEntry& weight, const HfQuantization&) {
  return weight.name.ends_with(kPacked) && weight.dtype == "I32";
}

struct PackedEntries {
  SafetensorsEntry weight, scale;
  SafetensorsEntry zeros, order;  // may be empty
};

absl::StatusOr<MatrixConstants> ReadPackedConstants(const PackedEntries& entries,
                                                    GroupQuantizedTensors tensors) {
  const auto weight = Words(entries.weight), zeros = Words(entries.zeros);
  const auto order = Words(entries.order);
  TREADLE_ASSIGN_OR_RETURN(const std::vector<float> scales, FiniteValues(entries.scale));
  tensors.qweight = weight;
  tensors.qzeros = zeros;
  tensors.scales = scales;
  tensors.g_idx = order;
  auto matrix = ConvertGroupQuantized(tensors, SplitOverThreads(0));
  if (!matrix.ok()) {
    return EntryError(entries.weight, std::string(matrix.status().message()));
  }
  matrix->constants.codes = std::move(matrix->data);
  return std::move(matrix->constants);
}

// [n, k], as P.weight_shape says.
absl::StatusOr<std::array<int64_t, 2>> ReadShape(QuantizedParts& parts, const std::string& name) {
  const SafetensorsEntry* shape = parts.Find(name);
  const bool wide = shape != nullptr && shape->dtype == "I64";
  TREADLE_ASSIGN_OR_RETURN(shape, parts.Require(name, wide ? "I64" : "I32", 2));
  std::array<int64_t, 2> sizes = {};
  for (size_t i = 0; i < 2; ++i) {
    if (wide) {
      std::memcpy(&sizes[i], shape->data.data() + 8 * i, 8);
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, shape->data.data() + 4 * i, 4);
      sizes[i] = narrow;
    }
    if (sizes[i] < 1 || sizes[i] > (int64_t{1} << 30)) {
      return EntryError(*shape, "says ", sizes[i], ", expected 1 to 2^30");
    }
  }
  return sizes;
}

absl::StatusOr<StoredTensor> ReadPacked(QuantizedParts& parts, const SafetensorsEntry& weight,
                                        const HfQuantization&) {
  const std::string name = WeightName(weight);
  TREADLE_ASSIGN_OR_RETURN(const auto sizes, ReadShape(parts, name + "_shape"));
  const auto [n, k] = sizes;
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scale, TakeFloats(parts, name + "_scale"));
  TREADLE_ASSIGN_OR_RETURN(const int64_t groups, GroupsOf(*scale, n));
  GroupQuantizedTensors tensors = {.packing = GroupPacking::kRows, .n = n, .k = k};
  const bool matrix = weight.shape.size() == 2 && weight.shape[0] == n;
  tensors.bits = matrix && weight.shape[1] * 8 == k ? 4 : 8;
  if (!matrix || weight.shape[1] * 32 != k * tensors.bits) {
    return EntryError(weight, "has shape ", ShapeText(weight.shape), ", expected [", n, ", ", k / 8,
                      "] or [", n, ", ", k / 4, "] words of 4 or 8 bits each");
  }
  if (k % groups != 0) {
    return EntryError(*scale, "has ", groups, " groups for ", k,
                      " columns, expected a number that divides them");
  }
  tensors.group_size = k / groups;
  PackedEntries entries = {.weight = weight, .scale = *scale, .zeros = {}, .order = {}};
  const std::pair<const char*, SafetensorsEntry*> optional[] = {{"_zero_point", &entries.zeros},
                                                                {"_g_idx", &entries.order}};
  for (const auto& [suffix, entry] : optional) {
    if (parts.Find(name + suffix) == nullptr) continue;
    TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* found,
                             parts.Require(name + suffix, "I32", -1));
    *entry = *found;
  }
  StoredTensor tensor =
      TensorOf(weight, FindWeightFormat(tensors.bits == 4 ? "gptq4" : "gptq8"), {n, k},
               scale->data.size() + entries.zeros.data.size() + entries.order.data.size());
  tensor.name = name;
  tensor.constants = [entries, tensors] { return ReadPackedConstants(entries, tensors); };
  return tensor;
}

bool ClaimsInt8(const QuantizedParts&, const SafetensorsEntry& weight,
                const HfQuantization& quantization) {
  return weight.dtype == "I8" && weight.shape.size() == 2 &&
         quantization.method == "compressed-tensors";
}

// Codes are the integers themselves.
absl::StatusOr<StoredTensor> ReadInt8(QuantizedParts& parts, const SafetensorsEntry& weight,
                                      const HfQuantization&) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scale,
                           TakeFloats(parts, weight.name + "_scale"));
  int64_t block = n * k;  // one scale of all
  if (scale->Elements() != 1) {
    TREADLE_ASSIGN_OR_RETURN(const int64_t groups, GroupsOf(*scale, n));
    if (k % groups != 0) {
      return EntryError(*scale, "has ", groups, " groups for ", k,
                        " columns, expected a number that divides them");
    }
    block = k / groups;
  }
  SafetensorsEntry zeros;
  if (const std::string name = weight.name + "_zero_point"; parts.Find(name) != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* found,
                             parts.Require(name, "I8", scale->Elements()));
    zeros = *found;
  }
  StoredTensor tensor = TensorOf(weight, FindWeightFormat("gptq8"), weight.shape,
                                 scale->data.size() + zeros.data.size());
  tensor.constants = [scale = *scale, zeros, block]() -> absl::StatusOr<MatrixConstants> {
    MatrixConstants constants;
    constants.scale_block = block;
    TREADLE_ASSIGN_OR_RETURN(constants.scales, FiniteValues(scale));
    for (const std::byte zero : zeros.data) {
      constants.zeros.push_back(static_cast<float>(static_cast<int8_t>(zero)));
    }
    for (int code = 0; code < 256; ++code) {
      constants.codebook.push_back(static_cast<float>(static_cast<int8_t>(code)));
    }
    return constants;
  };
  return tensor;
}

// -- NVFP4 ----------------------------------------------------------------------------------------

constexpr int64_t kGroup = 16;  // weights of a scale

bool ClaimsNvfp4(const QuantizedParts& parts, const SafetensorsEntry& weight,
                 const HfQuantization&) {
  const SafetensorsEntry* const scale = parts.Find(WeightName(weight) + "_scale");
  return weight.dtype == "U8" && weight.shape.size() == 2 && scale != nullptr &&
         scale->dtype == "F8_E4M3";
}

absl::StatusOr<MatrixConstants> ReadNvfp4Constants(const SafetensorsEntry& scale,
                                                   const SafetensorsEntry& whole, bool divides) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<float> factors, FiniteValues(whole));
  const float factor = factors[0];
  if (!(factor > 0)) return EntryError(whole, "is ", factor, ", expected more than 0");
  MatrixConstants constants;
  constants.scale_block = kGroup;
  const std::span<const float> e4m3 = FindWeightFormat("fp8")->codebook;
  for (size_t i = 0; i < scale.data.size(); ++i) {
    const auto code = std::to_integer<size_t>(scale.data[i]);
    if ((code & 127) == 127) {
      return EntryError(scale, "is NaN at element ", i, ", expected finite scales");
    }
    // The codebook has twice the values.
    const float own = divides ? e4m3[code] / factor : e4m3[code] * factor;
    constants.scales.push_back(own / 2);
  }
  const std::span<const float> doubled = FindWeightFormat("nvfp4")->codebook;
  constants.codebook.assign(doubled.begin(), doubled.end());
  return constants;
}

absl::StatusOr<StoredTensor> ReadNvfp4(QuantizedParts& parts, const SafetensorsEntry& weight,
                                       const HfQuantization&) {
  const std::string name = WeightName(weight);
  const int64_t n = weight.shape[0], k = 2 * weight.shape[1];
  TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* scale,
                           parts.Require(name + "_scale", "F8_E4M3", -1));
  if (k % kGroup != 0 || scale->shape.size() != 2 || scale->shape[0] != n ||
      scale->shape[1] != k / kGroup) {
    return EntryError(*scale, "has shape ", ShapeText(scale->shape), " beside codes of [", n, ", ",
                      k, "], expected [", n, ", ", k / kGroup, "], and columns a multiple of ",
                      kGroup);
  }
  // compressed-tensors' divides, Model Optimizer's multiplies.
  const bool divides = weight.name.ends_with(kPacked);
  TREADLE_ASSIGN_OR_RETURN(
      const SafetensorsEntry* whole,
      parts.Require(name + (divides ? "_global_scale" : "_scale_2"), "F32", 1));
  StoredTensor tensor =
      TensorOf(weight, FindWeightFormat("gptq4"), {n, k}, scale->data.size() + whole->data.size());
  tensor.name = name;
  tensor.constants = [scale = *scale, whole = *whole, divides] {
    return ReadNvfp4Constants(scale, whole, divides);
  };
  return tensor;
}

}  // namespace

const QuantizedReader kPackedReader = {ClaimsPacked, ReadPacked};
const QuantizedReader kCompressedInt8Reader = {ClaimsInt8, ReadInt8};
const QuantizedReader kNvfp4Reader = {ClaimsNvfp4, ReadNvfp4};

}  // namespace treadle
