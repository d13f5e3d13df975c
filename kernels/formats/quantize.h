// Making a format from float weights: what `--weights` and `treadle quantize` do.
//
// Thread safety: pure functions. Quantize splits its work with the ParallelFor that it is given.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/matrix_source.h"

namespace treadle {

// The format to make, as the user names it:
//   int8                   LLM.int8(): absmax per output row (of the values as they are;
//                          bitsandbytes' modules round them to fp16 first)
//   nf4, fp4               bitsandbytes' 4-bit types; nf4:128 for blocks of 128 (default 64; powers
//                          of two from 32 to 4096); nf4-dq, nf4-dq:128 with double quantization
//   fp8                    E4M3, one scale per output row
//   q8_0, q5_0, q5_1, q4_0, q4_1, iq4_nl        GGUF's blocks of 32
//   q6_k, q5_k, q4_k, q3_k, iq4_xs              and of 256
//   f32, f16, bf16         dense
//   kbit-int4:64           k-bit inference (Dettmers, chapter 3): int, float, dynamic or quantile,
//   3 kbit-float4e2:128      to 8 bits, E exponent bits of a float; blocks of 32 to 1024 weights or
//   kbit-dynamic5:tensor   the whole tensor; scales are rounded to 16 bits (fp16)
//   kbit-quantile3:64
//   kbit-e2m1:64           the same with OCP's 4-bit float, which is not kbit-float4e2: 0, 0.5, 1,
//                          1.5, 2, 3, 4, 6
struct QuantizeSpec {
  enum class Codebook : uint8_t { kFormat, kInt, kFloat, kDynamic, kQuantile, kE2M1 };
  std::string name;  // canonical spelling of the above
  const WeightFormat* format = nullptr;
  int64_t block = 0;  // weights per scale of 4-bit and k-bit types; 0: the whole tensor
  bool double_quantized = false;
  Codebook codebook = Codebook::kFormat;
  int exponent_bits = 0;
};

// The error names the part that cannot be, and what could.
absl::StatusOr<QuantizeSpec> ParseQuantizeSpec(std::string_view text);

// Double quantization (QLoRA; Dettmers, chapter 5): scale i = map[codes[i]] * absmax[i / 256] +
// offset, with the 8-bit dynamic map.
struct NestedScales {
  std::vector<uint8_t> codes;
  std::vector<float> absmax;
  float offset = 0;
};
// The 8-bit dynamic map [256], ascending: of -1 to 1, or, with twice the precision, of 0 to 1.
std::span<const float> DynamicMap(bool has_sign = true);
std::vector<float> DecodeScales(const NestedScales& nested);

struct QuantizedMatrix : OwnedMatrix {
  std::optional<NestedScales> nested;  // what constants.scales were decoded from

  // Bits per weight with all constants, as a file keeps them; without codebooks, of which a matrix
  // has at most one.
  double BitsPerWeight() const;
};

// Calls body(begin, end) over pieces of [0, count), possibly from several threads.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

// values: [n, k]. importance: none, or of each column, 0 or more: how much a weight's error costs
// there (GGUF's blocks minimize the errors that it weighs; other formats do not look at it).
// Rounding is that of the format's own project (bitsandbytes, ggml), bit for bit. Errors: a shape
// that the format does not allow; values that are not finite (the error says where).
absl::StatusOr<QuantizedMatrix> Quantize(const QuantizeSpec& spec, std::span<const float> values,
                                         int64_t n, int64_t k, const ParallelFor& parallel_for,
                                         std::span<const float> importance = {});

}  // namespace treadle
