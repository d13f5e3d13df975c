// How matrices are packed: one Packing per family of layouts (matmul_kernels.h), one file each.
// Private to pack*.cc.
//
// Thread safety: everything here is a pure function of its arguments.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/cpu/matmul/pack.h"
#include "kernels/formats/matrix_source.h"

namespace treadle {

inline constexpr int64_t kDecodeChunk = 256;

struct Packing {
  // Whether the layout that the family has for the source's format can hold this matrix. Sets kind,
  // group_bytes and what else the layout needs in `view`, whose n, k and format are set.
  bool (*plan)(const MatrixSource& source, const PackTarget& target, PackedView& view);
  // Writes row `from` of the source to lane `lane` of a group, which is all zeros before its first.
  void (*pack_row)(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
                   uint8_t* group);
  // Values [begin, begin + count) of a lane, decoded canonically; null: DecodeTile does it. begin
  // is a multiple of kDecodeChunk and count at most that.
  void (*decode)(const PackedView& view, const uint8_t* group, int64_t lane, int64_t begin,
                 int64_t count, float* out);
};

extern const Packing kHalfPacking;      // kF16, kBF16
extern const Packing kBlockPacking;     // kQ4_0 to kIq4Xs
extern const Packing kTablePacking;     // kTable
extern const Packing kBytesPacking;     // kBytes
extern const Packing kRowInt8Packing;   // kRowInt8
extern const Packing kIntegerPacking;   // kRun32Int4 to kRun128Int8
extern const Packing kCodebookPacking;  // kCodes4 to kWords
// kF32: the floats that any matrix decodes to.
extern const Packing kFloatPacking;

// kTiles4, kTiles8 and kTilesBf16. PlanTiles turns the plan of another layout for the same matrix
// into one of these.
extern const Packing kTilePacking;
void PlanTiles(const MatrixSource& source, PackedView& view);
// The values that codes of kTiles4 stand for; at most 16.
std::vector<float> TileCodebook(const MatrixSource& source, const PackedView& view);

inline float FloatAt(const uint8_t* data, int64_t index) {
  float value;
  std::memcpy(&value, data + 4 * index, 4);
  return value;
}
inline void PutFloat(float value, int64_t index, uint8_t* data) {
  std::memcpy(data + 4 * index, &value, 4);
}

}  // namespace treadle
