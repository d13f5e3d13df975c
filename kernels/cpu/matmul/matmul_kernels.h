// The matrix kernels, and the packed layouts they read.
//
// A packed matrix is a sequence of groups of 16 output features (the last one padded with zeros),
// each group contiguous over all of k, so that one thread streams its groups. "Dword i" of a block
// is four consecutive values of k of one feature; those of the 16 features lie side by side, as
// vector lanes.
//   kF32, kF16, kBF16   [k][16] values of their own width.
//   kQ4_0, kQ4_1        per 32 k: 4 x 16 dwords of nibbles (dword i: the low ones are k = 4i.., the
//                       high ones k = 16 + 4i..), f16 d[16], and for kQ4_1 f16 m[16]: 288 or 320
//                       bytes.
//   kQ5_0, kQ5_1        as these, with 64 bytes of fifth bits behind the nibbles (bit i of a byte
//                       belongs to dword i of the eight unpacked ones): 352 or 384 bytes.
//   kQ8_0               per 32 k: 8 x 16 dwords of code + 128, f16 d[16]: 544 bytes.
//   kQ4_K, kQ5_K, kQ6_K per 256 k: the codes of eight blocks of 32 as above (kQ6_K: 128 bytes of
//                       upper pairs; bits 2i.. of a byte belong to dword i, of the second 64 to
//                       dword 4 + i), 32 bytes for each of the eight (scale[16] and minimum[16], or
//                       the scale[16] of both halves), then f16 d[16] and -dmin[16], or d[16] and
//                       32 bytes of nothing: 2368, 2880 or 3392 bytes.
//   kQ2_K, kQ3_K        as these: 128 bytes of a block's bit pairs (bits 2i.. of a byte belong to
//                       dword i, of the second 64 to dword 4 + i), of kQ3_K 64 bytes of third bits
//                       (as kQ5_0's fifth); 32 bytes of scale | minimum << 4 or of scales, for both
//                       halves; d[16] and -dmin[16] or nothing: 1344 or 1856 bytes.
//   kIq4Nl, kIq4Xs      nibbles as kQ4_0's and kQ4_K's, of IQ4_NL's codes; kIq4Xs has signed
//                       scale[16] for each block and d[16]: 288 and 2208 bytes.
//   kTable              inline formats without a layout of their own, which have sixteen integers
//   and
//                       no offsets, where kCodes4 does not take them. Per 32 k: nibbles as kQ4_0's,
//                       f32 scale[16] of the first 16 k, scale[16] of the others, and the integers
//                       plus 128 in 16 bytes: 400 bytes.
//   kBytes              other inline formats. Per 32 k: 8 x 16 dwords of code + 128, f32 scale[16]
//   of
//                       the first 16 k, scale[16] of the others, and offsets likewise: 768 bytes.
//   kRun32Int4, kRun128Int4, kRun32Int8, kRun128Int8
//                       apart formats with integers (HasIntegers), under integer modes. Per 32 or
//                       128 k: the codes of its blocks as kQ4_0's, or kQ8_0's without the 128, f32
//                       scale[16], and zero[16] in bytes.
//   kRowInt8            dwords of code + 128 (k padded to whole blocks of 32), f32 scale[16].
//   kCodes4, kCodes8    per unit (so many k of each row share a scale): f32 scale[16], f32 zero[16]
//                       if the matrix has zeros, then dwords of 8 nibbles (the low ones are four
//                       consecutive k, the high ones the next four) or of 4 bytes. kCodes4 also of
//                       inline formats with a codebook and without offsets, but under kInt8.
//   kIntegers8          as kCodes8, for the codebook 0, 1, ..., where products are of floats.
//   kE4M3               as kCodes8, with f32 256 * scale[16].
//   kWords              as kCodes8, with the codebook's integers (IntegerCodebook) instead of the
//                       codes, 13 bits each, where looking them up would take longer than reading
//                       them. Per 32 k: 8 x 64 low bytes (line i: k = 4i..), 4 x 64 bytes of
//                       nibbles above them (the low ones of line 2i, the high ones of line 2i + 1),
//                       and 64 bytes of signs (bit i: of line i): 832 bytes. WordByte says where in
//                       a line. Behind the units, unless MatrixSource::of_layer: the codes,
//                       [k][16].
//   kTiles4, kTiles8, kTilesBf16
//                       for kBf16 on AMX, per 32 k (the last ones padded with zeros), a row of a
//                       tile for each feature. Codes of four bits, 16 bytes a feature, and what
//                       they stand for in codebook[16]; signed bytes; or bf16 values. Behind codes
//                       f32 scale[16] (if halves, of the first 16 k and of the others), and if
//                       seconds, f32 zero[16] if the matrix has zeros, or else offset[16].
//
// Only plain pointers and numbers cross this line (simd.h says why). Thread safety: kernels are
// stateless; distinct shares may run at the same time with distinct scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/isa_kernel.h"
#include "kernels/formats/weight_format.h"

namespace treadle {

inline constexpr int64_t kGroupFeatures = 16;
inline constexpr int64_t kBlockValues = 32;

// A row of activations has one scale for each span of kSpanBlocks blocks in kInt16 and kInt12; the
// last span may be shorter, or longer by what would be too little for one of its own.
inline constexpr int64_t kSpanBlocks = 8, kMaxSpanBlocks = 10;
constexpr int64_t SpanEnd(int64_t begin, int64_t blocks) {
  return blocks - begin <= kMaxSpanBlocks ? blocks : begin + kSpanBlocks;
}

enum class PackKind : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ2_K,
  kQ3_K,
  kIq4Nl,
  kIq4Xs,
  kTable,
  kBytes,
  kRun32Int4,
  kRun128Int4,
  kRun32Int8,
  kRun128Int8,
  kRowInt8,
  kCodes4,
  kCodes8,
  kIntegers8,
  kE4M3,
  kWords,
  kTiles4,
  kTiles8,
  kTilesBf16,
};

// Layouts of apart formats' integers: k that share constants, and bits of a code.
struct IntegerRun {
  int64_t values = 0;
  int bits = 0;

  constexpr explicit operator bool() const { return values > 0; }
  constexpr int64_t block_bytes() const { return kBlockValues * kGroupFeatures * bits / 8; }
  constexpr int64_t code_bytes() const { return values / kBlockValues * block_bytes(); }
  constexpr int64_t bytes() const { return code_bytes() + kGroupFeatures * 5; }
};
constexpr IntegerRun IntegerRunOf(PackKind kind) {
  switch (kind) {
    case PackKind::kRun32Int4:
      return {32, 4};
    case PackKind::kRun128Int4:
      return {128, 4};
    case PackKind::kRun32Int8:
      return {32, 8};
    case PackKind::kRun128Int8:
      return {128, 8};
    default:
      return {};
  }
}

// Apart formats that integer modes multiply as codebooks.
constexpr bool HasCodes(PackKind kind) {
  return kind == PackKind::kCodes4 || kind == PackKind::kCodes8 || kind == PackKind::kE4M3 ||
         kind == PackKind::kWords;
}

// Blocks of 32 k that share a scale: MatMulTilesInt8 and MatMulTilesInt16 take these.
constexpr bool HasTiles(PackKind kind) {
  return kind == PackKind::kQ4_0 || kind == PackKind::kQ4_1 || kind == PackKind::kQ5_0 ||
         kind == PackKind::kQ5_1 || kind == PackKind::kQ8_0 || kind == PackKind::kQ4_K ||
         kind == PackKind::kQ5_K || kind == PackKind::kIq4Nl || kind == PackKind::kIq4Xs ||
         IntegerRunOf(kind);
}

inline constexpr int64_t kBytesBlock = 768;
inline constexpr int64_t kTableBlock = 400, kTableAt = 384;

// The integers of IQ4_NL's and IQ4_XS's codes, plus 128.
inline constexpr uint8_t kIq4Bytes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};

// Places of a block of kWords.
inline constexpr int64_t kPackedNibblesAt = 512;
inline constexpr int64_t kPackedSignsAt = 768;
inline constexpr int64_t kPackedWordBytes = 832;
// The byte of a line that belongs to k = i of four and feature `lane` of 16: unpacking bytes of two
// lines makes words, of each four features the even two k of their four before the odd two.
constexpr int64_t WordByte(int64_t i, int64_t lane) {
  return lane / 4 * 16 + i % 2 * 8 + lane % 4 * 2 + i / 2;
}

// A codebook of floats in integers, for ComputeMode::kInt16: code c stands for step * codes[c].
// step = largest magnitude / 4095, and the integers are the floats * (4095 / largest magnitude),
// rounded half to even: sums of 32 products with 16-bit activations fit in 32 bits (4095 * 16256 *
// 32 < 2^31). A scale d is then scale * step. The codebooks of inline formats are integers, with
// step 1.
struct IntegerCodebook {
  float step;
  int16_t codes[256];  // of kCodes4 only 16 are in memory; others behind the codebook are 0
};

struct PackedView {
  PackKind kind;
  const uint8_t* data;
  int64_t n;
  int64_t k;
  int64_t group_bytes;  // from group to group
  const WeightFormat* format;
  // Formats with a codebook.
  int64_t unit = 0;                           // a multiple of 32
  bool zeros = false;                         // whether units have zeros
  const float* codebook = nullptr;            // [16] (kCodes4) or [256] (kCodes8, kWords)
  const IntegerCodebook* integers = nullptr;  // of it
  // MatrixConstants' field of this name, [k]; null: features in order. Kernels are handed
  // activations in this order.
  const int32_t* input_order = nullptr;
  bool bf16 = false;  // products round their factors: ComputeMode::kBf16
  // kTiles4 and kTiles8.
  bool halves = false;
  bool seconds = false;
  // LLM.int8(): MatrixConstants' fields of these names.
  float outlier_threshold = 0;
  bool outliers_of_call = false;  // OutlierRule::kPerCall
};

// One block of 32 quantized activations besides its codes. The blocks of a span have one scale. The
// codes are q in one plane of bytes (kInt8), or two one after the other and the q themselves
// (kInt16, kInt12): low, then high, with q = 128 * high + low.
struct ActivationBlock {
  float scale;
  float scaled_sum;  // scale * (sum of q)
  int32_t low_sum;   // of the first 16 q
  int32_t high_sum;
};

// One row of activations as LLM.int8() takes it (ComputeMode in backend.h), besides its codes.
struct ActivationRow {
  float scale;       // dx
  int32_t sum;       // of the codes
  int64_t outliers;  // how many
};

// Rows of a call, quantized whole, for one threshold and rule.
struct RowInt8Input {
  int8_t* codes;           // [rows, blocks of 32 k, code_bytes, 32]; the last block zero-padded
  ActivationRow* rows;     // [rows]
  int32_t* columns;        // [rows, k]: the outliers of each row, ascending
  uint8_t* call_flags;     // [blocks of 32 k, 32]: not 0 for an outlier of every row; or null
  int32_t threshold_bits;  // as a float's bits; INT32_MAX: no outliers
};

struct MatMulInput {
  const float* x;  // [rows, k]
  int64_t x_stride;
  const int8_t* codes;            // [rows, k / 32, code_bytes, 32]; of integer kernels
  const ActivationBlock* blocks;  // [rows, k / 32]; of integer kernels
  RowInt8Input row_int8;          // of kRowInt8
  int64_t rows;
  int64_t k;
  // For kernels that take rows in tiles: the tile that row 0 lies in, and its place there. Tiles
  // follow each other.
  const uint8_t* tiles = nullptr;
  int64_t first_lane = 0;
};

// Groups [group_begin, group_end) of one projection.
struct MatMulShare {
  PackedView weight;
  int64_t group_begin;
  int64_t group_end;
  const float* bias;  // [n] or null
  float* out;         // [rows, n]
  int64_t out_stride;
  bool accumulate;
};

// One thread's memory, 64-byte aligned.
inline constexpr int64_t kTileBytes = 96 << 10;
inline constexpr int64_t kMaxGroupsAtOnce = 4;
struct MatMulScratch {
  uint8_t* tile;  // [kTileBytes]
  float* sums;    // [rows, kMaxGroupsAtOnce * 16]: sums between the tiles along k
};

// Values [from, from + count) of all features of a group as floats [count][16]: at `tile`, or where
// they lie already. Both are multiples of 32 but for dense formats, whose count may be any. Not of
// kRowInt8, kWords and those of IntegerRunOf. Canonical but for the signs of zeros of inline
// formats.
TREADLE_ISA_KERNEL(DecodeTile, const float*(const PackedView& weight, int64_t group, int64_t from,
                                            int64_t count, float* tile));

// Products of each compute mode, and how the integer ones quantize a row x [k], to kInt8Bytes or
// kInt16Bytes for each activation.
using MatMulFunction = void(const MatMulInput& input, const MatMulShare& share,
                            const MatMulScratch& scratch);
using QuantizeFunction = void(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks);
TREADLE_ISA_KERNEL(MatMulExact, MatMulFunction);
TREADLE_ISA_KERNEL(MatMulInt8, MatMulFunction);
TREADLE_ISA_KERNEL(MatMulInt16, MatMulFunction);
TREADLE_ISA_KERNEL(QuantizeInt8, QuantizeFunction);
TREADLE_ISA_KERNEL(QuantizeInt16, QuantizeFunction);
TREADLE_ISA_KERNEL(QuantizeInt12, QuantizeFunction);  // for MatMulInt16
inline constexpr int64_t kInt8Bytes = 1;
inline constexpr int64_t kInt16Bytes = 4;
// Products of kBf16, whose rows RoundRowToBf16 has rounded, out to whole blocks of 32 k.
TREADLE_ISA_KERNEL(MatMulBf16, MatMulFunction);
TREADLE_ISA_KERNEL(RoundRowToBf16, void(const float* x, int64_t k, float* out));

// Products by AMX: of many rows with the bits of MatMulInt8 and MatMulInt16 (layouts with HasTiles;
// kInt12's with nibbles), of 16 rows at least with kRowInt8's, and of any with MatMulBf16's
// (kTiles4, kTiles8, kTilesBf16). The first and the last take activations in tiles of 16 rows,
// whose blocks of 32 k are: codes [planes][16][32], or of kInt12 [16][high, low][32], f32
// scale[16], f32 scaled_sum[16]; or bf16 [16 pairs of k][16][2]. QuantizeTileFunction fills lanes
// [lane, lane + rows) of one, and writes scales of 0 for the `empty` lanes behind them (which are
// multiplied, too: by numbers that are quick, not by what was there); RoundTileToBf16 fills all
// others with zeros.
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileBlockInt8 = kTileRows * (kBlockValues + 8);
inline constexpr int64_t kTileBlockInt16 = kTileRows * (2 * kBlockValues + 8);
inline constexpr int64_t kTileBlockInt12 = kTileBlockInt16;
inline constexpr int64_t kTileBlockBf16 = kTileRows * 2 * kBlockValues;
// Bytes of 16 features and 32 k of kTiles4, kTiles8 and kTilesBf16.
constexpr int64_t TileBlockBytes(const PackedView& view) {
  if (view.kind == PackKind::kTilesBf16) return kTileBlockBf16;
  const int64_t constants = 1 + (view.halves ? 1 : 0) + (view.seconds ? 1 : 0);
  return (view.kind == PackKind::kTiles4 ? 256 : 512) + 64 * constants;
}
using QuantizeTileFunction = void(const float* x, int64_t stride, int64_t lane, int64_t rows,
                                  int64_t empty, int64_t k, uint8_t* tile);
namespace avx512 {
MatMulFunction MatMulTilesInt8, MatMulTilesInt12, MatMulTilesInt16, MatMulTilesRowInt8,
    MatMulTilesBf16;
QuantizeTileFunction QuantizeTileInt8, QuantizeTileInt12, QuantizeTileInt16, RoundTileToBf16;
}  // namespace avx512

// LLM.int8()'s activations. Sets flags[begin, end) to whether any of `rows` rows of x has an
// outlier in that column.
TREADLE_ISA_KERNEL(FlagOutliers, void(const float* x, int64_t stride, int64_t rows, int64_t begin,
                                      int64_t end, int32_t threshold_bits, uint8_t* flags));
// Row `row` of x.
TREADLE_ISA_KERNEL(QuantizeRow,
                   void(const float* x, int64_t k, int64_t row, const RowInt8Input& out));
// Bytes of one activation there: AVX2 wants words.
inline constexpr int kRowBytesAvx2 = 2;
inline constexpr int kRowBytesVnni = 1;

}  // namespace treadle
