#include "kernels/formats/weight_format.h"

#include "kernels/formats/blocks.h"
#include "kernels/formats/codebooks.h"
#include "kernels/formats/i_quants.h"
#include "kernels/formats/k_quants.h"

namespace treadle {
namespace {

using Codes = void (*)(const std::byte* data, int64_t group, CodeGroup& out);

// The canonical decode of every format that has codes.
template <Codes kCodes, int64_t kBlock, int64_t kGroup>
void DecodeCodes(const std::byte* data, int64_t blocks, float* out) {
  CodeGroup group;
  for (int64_t g = 0; g < blocks * (kBlock / kGroup); ++g, out += kGroup) {
    kCodes(data, g, group);
    for (int64_t i = 0; i < kGroup; ++i) {
      out[i] = group.scale * static_cast<float>(group.codes[i]) + group.offset;
    }
  }
}

template <Codes kCodes, int64_t kBlock, int64_t kGroup>
constexpr WeightFormat Coded(std::string_view name, int32_t gguf_type, int64_t block_bytes,
                             std::span<const float> codebook = {}) {
  return {.name = name,
          .block = kBlock,
          .block_bytes = block_bytes,
          .gguf_type = gguf_type,
          .bits_per_weight = 8.0 * static_cast<double>(block_bytes) / kBlock,
          .decode = DecodeCodes<kCodes, kBlock, kGroup>,
          .group = kGroup,
          .codes = kCodes,
          .codebook = codebook};
}
constexpr WeightFormat WithOffsets(WeightFormat format) {
  format.offsets = true;
  return format;
}
constexpr WeightFormat Nibbles(WeightFormat format) {
  format.nibbles = true;
  return format;
}

// Every value is exact in float.
template <DType kType>
void DecodeDense(const std::byte* data, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = LoadElement(kType, data, i);
}

template <DType kType>
constexpr WeightFormat Dense(int32_t gguf_type, std::string_view safetensors) {
  return {.name = Name(kType),
          .block = 1,
          .block_bytes = SizeOf(kType),
          .gguf_type = gguf_type,
          .safetensors_dtype = safetensors,
          .bits_per_weight = 8.0 * SizeOf(kType),
          .decode = DecodeDense<kType>};
}

// Constants lie apart from the codes.
constexpr WeightFormat Apart(std::string_view name, int bits, std::span<const float> codebook) {
  return {.name = name,
          .block = 1,
          .block_bytes = 0,
          .gguf_type = -1,
          .bits_per_weight = static_cast<double>(bits),
          .code_bits = bits,
          .codebook = codebook};
}
constexpr WeightFormat HighFirst(WeightFormat format) {
  format.high_first = true;
  return format;
}
constexpr WeightFormat RowInt8(WeightFormat format) {
  format.activations = ActivationPolicy::kRowInt8;
  return format;
}

constexpr std::span<const float> kUnsigned4 = formats::kUnsigned4Codebook.values;

constexpr std::span<const float> kIntegers2 = formats::kQ2_KCodebook.values;
constexpr std::span<const float> kIntegers3 = formats::kQ3_KCodebook.values;

constexpr WeightFormat kFormats[] = {
    Dense<DType::kF32>(0, "F32"),
    Dense<DType::kF16>(1, "F16"),
    Dense<DType::kBF16>(30, "BF16"),
    Nibbles(Coded<formats::CodesQ4_0, 32, 32>("q4_0", 2, 18, formats::kQ4_0Codebook.values)),
    Nibbles(WithOffsets(Coded<formats::CodesQ4_1, 32, 32>("q4_1", 3, 20, kUnsigned4))),
    Coded<formats::CodesQ5_0, 32, 32>("q5_0", 6, 22),
    WithOffsets(Coded<formats::CodesQ5_1, 32, 32>("q5_1", 7, 24)),
    Coded<formats::CodesQ8_0, 32, 32>("q8_0", 8, 34),
    WithOffsets(Coded<formats::CodesQ2_K, 256, 16>("q2_k", 10, 84, kIntegers2)),
    Coded<formats::CodesQ3_K, 256, 16>("q3_k", 11, 110, kIntegers3),
    Nibbles(WithOffsets(Coded<formats::CodesQ4_K, 256, 32>("q4_k", 12, 144, kUnsigned4))),
    WithOffsets(Coded<formats::CodesQ5_K, 256, 32>("q5_k", 13, 176)),
    Coded<formats::CodesQ6_K, 256, 16>("q6_k", 14, 210),
    Coded<formats::CodesIQ4_NL, 32, 32>("iq4_nl", 20, 18, formats::kIQ4_NLCodebook.values),
    Coded<formats::CodesIQ4_XS, 256, 32>("iq4_xs", 23, 136, formats::kIQ4_NLCodebook.values),
    Coded<formats::CodesMXFP4, 32, 32>("mxfp4", 39, 17, formats::kMXFP4Codebook.values),
    Coded<formats::CodesNVFP4, 64, 16>("nvfp4", 40, 36, formats::kMXFP4Codebook.values),
    Coded<formats::CodesIQ2_XXS, 256, 32>("iq2_xxs", 16, 66, formats::kIq2Codebook.values),
    Coded<formats::CodesIQ2_XS, 256, 16>("iq2_xs", 17, 74, formats::kIq2Codebook.values),
    Coded<formats::CodesIQ2_S, 256, 16>("iq2_s", 22, 82, formats::kIq2Codebook.values),
    Coded<formats::CodesIQ3_XXS, 256, 32>("iq3_xxs", 18, 98, formats::kIq3XxsCodebook.values),
    Coded<formats::CodesIQ3_S, 256, 32>("iq3_s", 21, 110, formats::kIq3SCodebook.values),
    Coded<formats::CodesIQ1_S, 256, 32>("iq1_s", 19, 50, formats::kIq1Codebook.values),
    Coded<formats::CodesIQ1_M, 256, 16>("iq1_m", 29, 56, formats::kIq1Codebook.values),
    Coded<formats::CodesTQ1_0, 256, 32>("tq1_0", 34, 54, formats::kTq1Codebook.values),
    Coded<formats::CodesTQ2_0, 256, 32>("tq2_0", 35, 66, formats::kTq2Codebook.values),
    RowInt8(Apart("int8", 8, formats::kInt8Codebook.values)),
    HighFirst(Apart("nf4", 4, formats::kNf4Codebook.values)),
    HighFirst(Apart("fp4", 4, formats::kFp4Codebook.values)),
    Apart("fp8", 8, formats::kE4M3Codebook.values),
    Apart("gptq4", 4, kUnsigned4),
    Apart("gptq8", 8, formats::kUnsigned8Codebook.values),
    Apart("kbit3", 3, {}),
    Apart("kbit4", 4, {}),
    Apart("kbit5", 5, {}),
    Apart("kbit6", 6, {}),
    Apart("kbit7", 7, {}),
    Apart("kbit8", 8, {}),
};

template <typename Predicate>
const WeightFormat* Find(Predicate predicate) {
  for (const WeightFormat& format : kFormats) {
    if (predicate(format)) return &format;
  }
  return nullptr;
}

}  // namespace

std::span<const WeightFormat> WeightFormats() { return kFormats; }

const WeightFormat* FindWeightFormat(std::string_view name) {
  return Find([&](const WeightFormat& format) { return format.name == name; });
}

const WeightFormat* FindGgufFormat(uint32_t gguf_type) {
  return Find([&](const WeightFormat& format) {
    return format.gguf_type >= 0 && static_cast<uint32_t>(format.gguf_type) == gguf_type;
  });
}

const WeightFormat* FindSafetensorsFormat(std::string_view dtype) {
  return Find([&](const WeightFormat& format) {
    return !dtype.empty() && format.safetensors_dtype == dtype;
  });
}

}  // namespace treadle
