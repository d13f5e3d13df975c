// The parts of quantize.cc. Private to this folder and its tests.
//
// Thread safety: pure functions; the classes are constant once made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/formats/quantize.h"

namespace treadle::formats {

// quantize_blocks.cc: formats that keep constants among their codes.
struct BlockEncoder {
  std::string_view format;
  // `blocks` blocks of format->block values to blocks of format->block_bytes. importance: null, or
  // as many as values, which then are a whole row.
  void (*encode)(const float* values, const float* importance, int64_t blocks, std::byte* out);
  // Values of a larger magnitude have no representation.
  float largest;
};
// Null if the format cannot be made.
const BlockEncoder* FindBlockEncoder(std::string_view format);

// quantize_k.cc
std::span<const BlockEncoder> SearchingEncoders();
void EncodeImportantQ4_0(const float* values, const float* importance, int64_t blocks,
                         std::byte* out);
void EncodeImportantQ4_1(const float* values, const float* importance, int64_t blocks,
                         std::byte* out);

// 8-bit codes with one scale per row. absmax: the row's largest magnitude.
// Returns the scale.
float EncodeRowInt8(const float* values, int64_t count, float absmax, std::byte* codes);
float EncodeRowE4M3(const float* values, int64_t count, float absmax, std::byte* codes);

// quantize_codebook.cc
// The nearest code of a codebook; of two at the same distance the one with the smaller value.
class CodebookEncoder {
 public:
  explicit CodebookEncoder(std::span<const float> codebook);  // up to 256 values
  void Encode(const float* values, int64_t count, uint8_t* codes) const;

 private:
  int bits_ = 0;
  std::vector<float> bounds_;    // [2^bits - 1], ascending: between neighbours
  std::vector<uint8_t> ranked_;  // codes by ascending value
};
// Codes in WeightFormat's order; `count` fills whole bytes, or ends a matrix. It is even where high
// nibbles come first.
void PackCodes(const WeightFormat& format, const uint8_t* codes, int64_t count, std::byte* out);

// nested_scales.cc. The offset is an argument so that a test can take another's.
NestedScales NestScales(std::span<const float> scales, float offset);
float MeanOf(std::span<const float> scales);

// kbit_codebooks.cc: [2^bits], ascending, the largest magnitude 1. bits: 3 to 8.
std::vector<float> IntCodebook(int bits);
std::vector<float> FloatCodebook(int bits, int exponent_bits);
std::vector<float> E2M1Codebook();  // 4 bits
std::vector<float> DynamicCodebook(int bits, bool has_sign = true);
// scales: of blocks of `scale_block` values.
std::vector<float> QuantileCodebook(int bits, std::span<const float> values,
                                    std::span<const float> scales, int64_t scale_block);

}  // namespace treadle::formats
