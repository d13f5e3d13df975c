#include "models/checkpoints/huggingface/hf_quantization.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/huggingface/quantized_parts.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
constexpr int64_t kMaxInteger = int64_t{1} << 30;

constexpr const char* kMethods[] = {"bitsandbytes", "fp8",  "fbgemm_fp8", "compressed-tensors",
                                    "modelopt",     "gptq", "awq",        "mxfp4",
                                    "treadle"};
// Names of compressed-tensors for the layouts that are read. Entries say which one a matrix has.
constexpr const char* kCompressedFormats[] = {"float-quantized",      "naive-quantized",
                                              "int-quantized",        "pack-quantized",
                                              "nvfp4-pack-quantized", "mixed-precision"};
constexpr const char* kModeloptAlgorithms[] = {"NVFP4", "FP8"};
// Endings of entries for those who round activations, or the K/V cache, to fewer bits.
constexpr std::string_view kActivationScales[] = {".input_scale",      ".input_global_scale",
                                                  ".input_zero_point", ".output_scale",
                                                  ".k_scale",          ".v_scale",
                                                  ".q_scale"};

// Names of gptq and awq ("version") for theirs.
constexpr const char* kGptqFormats[] = {"gptq", "gptq_v2"};
constexpr const char* kAwqVersions[] = {"gemm", "GEMM"};

const QuantizedReader* const kReaders[] = {
    &kKBitReader,  &kBitsAndBytes4BitReader, &kBitsAndBytesInt8Reader, &kFp8Reader,
    &kGroupReader, &kPackedReader,           &kCompressedInt8Reader,   &kNvfp4Reader};

template <size_t kCount>
absl::Status CheckOneOf(const Json& value, const char* const (&known)[kCount], const char* name,
                        const std::string& where) {
  std::string names;
  for (const char* one : known) {
    if (value == one) return absl::OkStatus();
    names += Str(names.empty() ? "" : ", ", one);
  }
  const std::string found = value.is_string() ? Quoted(value.get<std::string>()) : "missing";
  return Unimplemented(where, ": ", name, " is ", found, ", expected one of ", names);
}

absl::Status ReadBlockSize(const Json& size, const char* name, const std::string& where,
                           HfQuantization& out) {
  if (size.is_null()) return absl::OkStatus();
  const auto good = [](const Json& value) { return IntegerIn(value, 1, kMaxInteger).has_value(); };
  if (!size.is_array() || size.size() != 2 || !good(size[0]) || !good(size[1])) {
    return InvalidArgument(where, ": ", name, " is not two integers from 1");
  }
  out.block_rows = size[0].get<int64_t>();
  out.block_columns = size[1].get<int64_t>();
  return absl::OkStatus();
}

// Reads what compressed-tensors says of the blocks of each group of matrices.
absl::Status ReadGroupBlocks(const Json& groups, const std::string& where, HfQuantization& out) {
  Json all;
  for (const Json& group : groups) {
    const Json::json_pointer path("/weights/block_structure");
    if (!group.is_object() || !group.contains(path) || group[path].is_null()) continue;
    if (!all.is_null() && all != group[path]) {
      return Unimplemented(where, ": block_structure is ", all.dump(), " and ", group[path].dump(),
                           ", expected one for all groups");
    }
    all = group[path];
  }
  return ReadBlockSize(all, "block_structure", where, out);
}

// `dynamic` (GPTQModel): a pattern of names, and what is different of the matrices it matches.
// Modules that "-:" exempts are plain entries; bits and groups show in the shapes of the others.
absl::Status ReadRules(const Json& rules, const Json& format, const std::string& where,
                       HfQuantization& out) {
  if (rules.is_null()) return absl::OkStatus();
  if (!rules.is_object()) return InvalidArgument(where, ": dynamic is not an object");
  for (const auto& [pattern, rule] : rules.items()) {
    if (!rule.is_object()) {
      return InvalidArgument(where, ": dynamic's ", Quoted(pattern), " is not an object");
    }
    const Json own = rule.value("format", rule.value("checkpoint_format", format));
    if (own != format) {
      return Unimplemented(where, ": dynamic's ", Quoted(pattern), " has a format of its own, ",
                           own.dump(), ", expected ", format.dump(), " as elsewhere");
    }
    if (rule.value("sym", Json(true)) != true) out.symmetric = false;
  }
  out.mixed = !rules.empty();
  return absl::OkStatus();
}

// A rotated model's weights are right only for activations that are rotated too.
absl::Status CheckRotation(const Json& section, const std::string& where) {
  const Json rotation = section.value("rotation", Json());
  if (rotation.is_null() || rotation == "") return absl::OkStatus();
  return Unimplemented(where, ": rotation is ", rotation.dump(),
                       ", whose rotation of activations is not done; expected none");
}

// Settings of compressed-tensors by which entries mean something else.
absl::Status CheckCompressed(const Json& section, const std::string& where) {
  const Json transform = section.value("transform_config", Json());
  if (!transform.is_null() && !transform.empty()) {
    return Unimplemented(where, ": transform_config is set, whose rotation of activations is not ",
                         "done; expected none");
  }
  const Json sparsity = section.value("sparsity_config", Json());
  const Json format =
      sparsity.is_object() ? sparsity.value("format", Json("dense")) : Json("dense");
  if (format == "dense") return absl::OkStatus();
  return Unimplemented(where, ": sparsity_config.format is ", format.dump(), ", expected dense");
}

// Reads what gptq and awq say of their groups.
absl::Status ReadGroups(const Json& section, const std::string& where, HfQuantization& out) {
  const bool awq = out.method == "awq";
  const Json bits = section.value("bits", section.value("w_bit", Json(4)));
  if (bits != 4 && (awq || bits != 8)) {
    return Unimplemented(where, ": bits is ", bits.dump(), ", expected 4", awq ? "" : " or 8");
  }
  out.bits = bits.get<int>();
  const Json size = section.value("group_size", section.value("q_group_size", Json(128)));
  if (!IntegerIn(size, -1, kMaxInteger) || size == 0) {
    return InvalidArgument(where, ": group_size is ", size.dump(), ", expected -1 or 1 to 2^30");
  }
  out.group_size = size.get<int64_t>();
  TREADLE_RETURN_IF_ERROR(CheckRotation(section, where));
  const Json format =
      section.value("checkpoint_format", section.value("format", Json(awq ? "gemm" : "gptq")));
  if (awq) {
    TREADLE_RETURN_IF_ERROR(
        CheckOneOf(section.value("version", format), kAwqVersions, "version", where));
  } else {
    out.symmetric = section.value("sym", Json(false)) == true;
    out.second_version = format == "gptq_v2";
    TREADLE_RETURN_IF_ERROR(CheckOneOf(format, kGptqFormats, "checkpoint_format", where));
  }
  return ReadRules(section.value("dynamic", Json()), format, where, out);
}

}  // namespace

absl::StatusOr<HfQuantization> ReadHfQuantization(const Json& config, const std::string& path) {
  HfQuantization out;
  const Json section = config.value("quantization_config", Json());
  if (section.is_null()) return out;
  const std::string where = path + ": quantization_config";
  if (!section.is_object()) return InvalidArgument(where, " is not an object");
  Json method = section.value("quant_method", Json());
  // Files of transformers' first versions with bitsandbytes name no method.
  if (method.is_null() && (section.contains("load_in_8bit") || section.contains("load_in_4bit"))) {
    method = "bitsandbytes";
  }
  TREADLE_RETURN_IF_ERROR(CheckOneOf(method, kMethods, "quant_method", where));
  out.method = method.get<std::string>();
  if (out.method == "compressed-tensors") {
    TREADLE_RETURN_IF_ERROR(
        CheckOneOf(section.value("format", Json()), kCompressedFormats, "format", where));
    TREADLE_RETURN_IF_ERROR(CheckCompressed(section, where));
    TREADLE_RETURN_IF_ERROR(ReadGroupBlocks(section.value("config_groups", Json()), where, out));
  }
  if (out.method == "modelopt") {
    TREADLE_RETURN_IF_ERROR(
        CheckOneOf(section.value("quant_algo", Json()), kModeloptAlgorithms, "quant_algo", where));
  }
  if (out.method == "gptq" || out.method == "awq") {
    TREADLE_RETURN_IF_ERROR(ReadGroups(section, where, out));
  }
  const Json threshold = section.value("llm_int8_threshold", Json(6.0));
  if (!threshold.is_number() || !(threshold.get<float>() >= 0) ||
      !std::isfinite(threshold.get<float>())) {
    return InvalidArgument(where, ": llm_int8_threshold is not a finite number >= 0");
  }
  out.outlier_threshold = threshold.get<float>();
  TREADLE_RETURN_IF_ERROR(
      ReadBlockSize(section.value("weight_block_size", Json()), "weight_block_size", where, out));
  return out;
}

absl::StatusOr<MergedTensors> MergeQuantized(std::vector<SafetensorsEntry> entries,
                                             const HfQuantization& quantization) {
  QuantizedParts parts(std::move(entries));
  MergedTensors merged;
  for (const auto& [name, entry] : parts.entries()) {
    if (!name.ends_with(".weight") && !name.ends_with(".qweight") &&
        !name.ends_with(".weight_packed")) {
      continue;
    }
    const auto claims = [&, &entry = entry](const QuantizedReader* candidate) {
      return candidate->claims(parts, entry, quantization);
    };
    const auto* reader = std::ranges::find_if(kReaders, claims);
    if (reader == std::end(kReaders)) continue;
    parts.Take(name);
    TREADLE_ASSIGN_OR_RETURN(StoredTensor tensor, (*reader)->read(parts, entry, quantization));
    merged.tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, entry] : parts.entries()) {
    const auto ends = [&name = name](std::string_view ending) { return name.ends_with(ending); };
    if (parts.Taken(name) || std::ranges::any_of(kActivationScales, ends)) continue;
    const WeightFormat* format = FindSafetensorsFormat(entry.dtype);
    if (format == nullptr) {
      merged.unread.emplace(name, entry.dtype);
      continue;
    }
    merged.tensors.push_back(TensorOf(entry, format, entry.shape));
  }
  return merged;
}

}  // namespace treadle
