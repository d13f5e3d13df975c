// Weight formats: how a matrix is stored in a checkpoint, and its canonical meaning.
//
// One file per family in this folder, one row per format in the table of weight_format.cc. A format
// says how it is named, which checkpoint type it claims, its block geometry, and how a run of
// blocks decodes to float. What a backend makes of it (packing, tiles, integer dots) is the
// backend's. Source: ggml's block layouts, as in GGUF v3.
//
// Thread safety: the table is constant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace treadle {

// Integer view of one group of `group` consecutive weights: w[i] = scale * code[i] + offset.
// Codes are small integers, so integer kernels can use them as they are: -8..7 (Q4_0), 0..15 (Q4_1,
// Q4_K), -16..15 (Q5_0), 0..31 (Q5_1, Q5_K), -128..127 (Q8_0), -32..31 (Q6_K); formats without a
// minimum have offset 0. scale = d * sc and offset = -(dmin * m) of the K types are exact in float.
//
// scale * code is exact too (at most 24 significant bits in every format here), so fma(scale, code,
// offset) and a product followed by a sum give the same bits: one rounding, ggml's values exactly
// (but for the sign of a zero, which is + here).
struct CodeGroup {
  int8_t codes[32];  // the first `group` are set
  float scale;
  float offset;
};

struct WeightFormat {
  std::string_view name;               // "q4_1"; what --weights, inspect and errors say
  int64_t block;                       // weights per block, along k; 1 for dense types
  int64_t block_bytes;                 // bytes per block
  int32_t gguf_type;                   // ggml type id; -1: not in GGUF
  std::string_view safetensors_dtype;  // "F16"; empty: not in safetensors
  double bits_per_weight;              // constants included

  // Canonical decode: `blocks` consecutive blocks to float [blocks * block].
  void (*decode)(const std::byte* data, int64_t blocks, float* out);

  // Integer view, null for dense float types: group g (of `group` weights, group divides block) of
  // the run that begins at `data`. decode() equals scale * code + offset with one rounding of fma.
  int64_t group;  // 32 or 16; 0 for dense types
  void (*codes)(const std::byte* data, int64_t group_index, CodeGroup& out);

  int64_t RowBytes(int64_t k) const { return k / block * block_bytes; }
};

// All formats, in a fixed order.
std::span<const WeightFormat> WeightFormats();
// Null if unknown.
const WeightFormat* FindWeightFormat(std::string_view name);
const WeightFormat* FindGgufFormat(uint32_t gguf_type);
const WeightFormat* FindSafetensorsFormat(std::string_view dtype);

}  // namespace treadle
