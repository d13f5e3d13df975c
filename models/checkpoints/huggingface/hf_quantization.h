// Quantized Hugging Face checkpoints: what config.json's quantization_config says, and the entries
// of safetensors files that together are one matrix. P is a layer's name; shapes are [out, in].
//
//   bitsandbytes, 4 bits   P.weight (packed codes, high nibble first; blocks run flat over rows),
//                          P.weight.absmax f32, or u8 with P.weight.nested_absmax f32 and
//                          P.weight.nested_quant_map f32 [256]; P.weight.quant_map f32 [16];
//                          P.weight.quant_state.bitsandbytes__nf4 (fp4): u8, JSON with quant_type,
//                          blocksize, shape, and nested_blocksize, nested_offset
//   bitsandbytes, int8     P.weight i8, P.SCB f32 [out] (absmax), P.weight_format (u8, 0)
//   FP8                    P.weight F8_E4M3 with P.weight_scale or P.weight_scale_inv (both
//                          multiply): one number, [out], [out, 1], or one per block of
//                          weight_block_size rows and columns
//   GPTQ                   P.qweight i32 [in * bits / 32, out], P.qzeros i32 [groups,
//                          out * bits / 32], P.scales f16 or bf16 [groups, out], P.g_idx i32 [in]:
//                          the group of each column, in any order (missing, or all zeros: in order)
//   AWQ ("gemm")           P.qweight i32 [in, out / 8], P.qzeros i32 [groups, out / 8], P.scales
//   compressed-tensors     P.weight_packed i32 [out, in * bits / 32] (low first; codes are integers
//                          plus 2^(bits - 1)), P.weight_shape [2], P.weight_scale [out, groups] or
//                          [out, 1], P.weight_zero_point i32 [out * bits / 32, groups] (missing:
//                          2^(bits - 1)), P.weight_g_idx i32 [in] (as GPTQ's); or P.weight i8 [out,
//                          in] with P.weight_scale and P.weight_zero_point i8
//   NVFP4                  P.weight_packed (Model Optimizer: P.weight) u8 [out, in / 2], low nibble
//                          first, P.weight_scale F8_E4M3 [out, in / 16], which the number
//                          P.weight_global_scale divides (or P.weight_scale_2 multiplies)
//   MXFP4                  of all experts of a layer: fused_experts.h
//   k-bit (Treadle's own)  P.weight u8 (a stream of codes, first code in the lowest bits),
//                          P.weight.scales f16 [blocks], P.weight.codebook f32 [2^bits],
//                          P.weight.quant_state.treadle: u8, JSON with format (the name in
//                          weight_format.cc's table), spec (as --weights names it), shape, block
//                          (weights per scale, flat over rows)
//
// Thread safety: pure functions.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/huggingface/safetensors.h"

namespace treadle {

struct HfQuantization {
  std::string method;              // quant_method; empty: none
  float outlier_threshold = 6.0f;  // llm_int8_threshold
  int64_t block_rows = 128;        // weight_block_size, of FP8
  int64_t block_columns = 128;
  // Set for gptq and awq only:
  int bits = 4;
  int64_t group_size = 128;     // -1: all of a row
  bool symmetric = false;       // sym, or no zero_point
  bool second_version = false;  // checkpoint_format is gptq_v2
  // Has `dynamic` rules (GPTQModel), by which a matrix may have other bits and groups than these.
  // The shapes of its entries tell them.
  bool mixed = false;
};

// Errors: a quant_method that we do not read (named, with those that we do), or a field out of
// range. `path` is that of config.json.
absl::StatusOr<HfQuantization> ReadHfQuantization(const nlohmann::json& config,
                                                  const std::string& path);

// config.json of a folder, for the classes that architectures name. A setting beyond ours (another
// activation, a rope type) is an error that names the field.
struct HfConfig {
  ModelConfig config;
  HfQuantization quantization;
};

absl::StatusOr<HfConfig> ReadHfConfig(const MappedFile& config_json);

struct MergedTensors {
  std::vector<StoredTensor> tensors;
  // dtype of each entry that is no tensor of ours, by name: an error for whoever needs it.
  std::map<std::string, std::string, std::less<>> unread;
};

// Sizes, types and descriptions of all parts are checked here; the values of constants when a
// tensor's `constants` is called. The result points to the entries' data.
absl::StatusOr<MergedTensors> MergeQuantized(std::vector<SafetensorsEntry> entries,
                                             const HfQuantization& quantization);

}  // namespace treadle
