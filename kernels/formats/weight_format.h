// Weight formats: how a matrix is stored in a checkpoint, and its canonical meaning.
//
// A function or a codebook in a header of this folder, and a row in the table of weight_format.cc,
// for each format. A row says how the format is named, which checkpoint type it claims, its
// geometry, and how its codes become floats. What a backend makes of it (packing, tiles, integer
// dots) is the backend's: any format is multiplied by its codes (CodedRows in coded_rows.h) without
// a word about it there, and one that matters has a layout of its own.
//
// Two kinds. *Inline* formats (dense types, GGUF's blocks) keep a block's constants next to its
// codes; a run of bytes is all they need. *Apart* formats (LLM.int8(), bitsandbytes' 4-bit types,
// FP8, GPTQ and AWQ, k-bit) keep codes flat and their constants elsewhere: w = scale *
// (codebook[code] - zero), all from matrix_source.h's MatrixConstants.
// Sources: ggml's block layouts, as in GGUF v3; bitsandbytes' checkpoints; Dettmers, chapters 2, 3
// and 5.
//
// Thread safety: the table is constant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace treadle {

// Integer view of one group of `group` consecutive weights: w[i] = scale * code[i] + offset.
// Codes are small integers, so integer kernels can use them as they are: what
// WeightFormat::codebook says, or -16..15 (Q5_0), 0..31 (Q5_1, Q5_K), -128..127 (Q8_0), -32..31
// (Q6_K); formats without a minimum have offset 0. scale = d * sc and offset = -(dmin * m) of the K
// types are exact in float.
//
// scale * code is exact too (at most 24 significant bits in every format here), so fma(scale, code,
// offset) and a product followed by a sum give the same bits: one rounding, ggml's values exactly
// (but for the sign of a zero, which is + here).
struct CodeGroup {
  int8_t codes[32];  // the first `group` are set
  float scale;
  float offset;
};

// The form that a product gives the activations.
enum class ActivationPolicy : uint8_t {
  kFloat,    // as ComputeMode says
  kRowInt8,  // LLM.int8(): see ComputeMode in kernels/backend.h
};

struct WeightFormat {
  std::string_view name;  // "q4_1"; what --weights, inspect and errors say
  int64_t block;          // inline: weights per block, along k; 1: k may be anything
  int64_t block_bytes;    // inline: bytes per block
  int32_t gguf_type;      // ggml type id; -1: not in GGUF
  std::string_view safetensors_dtype = {};  // "F16"; empty: not in safetensors
  double bits_per_weight;                   // inline: constants included; apart: the codes alone

  // Inline. Canonical decode: `blocks` consecutive blocks to float [blocks * block].
  void (*decode)(const std::byte* data, int64_t blocks, float* out) = nullptr;

  // Inline. Integer view, null for dense float types: group g (of `group` weights, group divides
  // block) of the run that begins at `data`. decode() equals scale * code + offset with one
  // rounding of fma.
  int64_t group = 0;  // 32 or 16; 0 for dense types and for apart formats
  void (*codes)(const std::byte* data, int64_t group_index, CodeGroup& out) = nullptr;

  // Apart: bits of a code, 3 to 8; 0 for inline formats.
  int code_bits = 0;
  // Apart, 4 bits: the high nibble of a byte is the earlier code. Otherwise codes are a stream of
  // bits: code i is bits [i * code_bits, (i + 1) * code_bits), least significant first.
  bool high_first = false;
  // Apart: the value of each code [2^code_bits]; empty: every matrix brings its own. Inline: the
  // integers that CodeGroup::codes may be, if sixteen are enough [16]; empty: they are not.
  std::span<const float> codebook = {};
  bool offsets = false;  // inline: CodeGroup::offset may be other than 0
  // Inline, groups of 32: codes are nibbles, 0 to 15, or these less 8.
  bool nibbles = false;
  ActivationPolicy activations = ActivationPolicy::kFloat;

  bool apart() const { return code_bits > 0; }
  // Bytes of codes of n rows of k; the rows of apart formats follow each other without padding.
  int64_t MatrixBytes(int64_t n, int64_t k) const {
    return apart() ? (n * k * code_bits + 7) / 8 : n * (k / block * block_bytes);
  }
  // Inline only.
  int64_t RowBytes(int64_t k) const { return k / block * block_bytes; }
};

// All formats, in a fixed order.
std::span<const WeightFormat> WeightFormats();
// Null if unknown.
const WeightFormat* FindWeightFormat(std::string_view name);
const WeightFormat* FindGgufFormat(uint32_t gguf_type);
const WeightFormat* FindSafetensorsFormat(std::string_view dtype);

}  // namespace treadle
