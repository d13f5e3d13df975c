// Attention's shares of work: the index maps between rows, tiles, blocks and splits. Plain
// functions of numbers, for kernels, launches and tests alike.
//
// A row at position p sees positions 0 ..= p, or with a window FirstSeen(p) ..= p; blocks before
// these are left out, and what they would add is nothing. Positions are cut three times, always at
// fixed absolute positions, so that a row's order of operations depends on p alone (N1, N2):
//   block   kAttentionBlock positions: one step of the online softmax (Milakov and Gimelshein 2018)
//   split   SplitLength(p) positions: the blocks of a split follow one another in registers
//   row     its splits, of which there are at most kMaxSplits, folded in ascending order by Fold
//           (attention_fold.h), in whichever kernel
//
// Tiles: a sequence with one row in the batch (decoding) gets a tile to itself; one with more
// (a prompt chunk) is cut into tiles of `tile_rows` rows.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

inline constexpr int kBlockPositions = 64;      // kAttentionBlock
inline constexpr int kMinSplitPositions = 256;  // shortest split
inline constexpr int kMaxSplits = 16;           // of a row
// Decoding rows whose splits run side by side; with more, the splits of the others follow one
// another. The bits are the same.
inline constexpr int64_t kMaxSplitSequences = 256;
inline constexpr int kMmaRows = 16;  // of a matrix instruction: (row, head) pairs
inline constexpr int kAttentionWarps = 4;
inline constexpr int kAttentionThreads = 32 * kAttentionWarps;
// A team: four warps that share a tile, mostly a whole block. Its barrier is SyncWarpgroup.
TREADLE_DEVICE int TeamWarp() { return simt::Warp() % kAttentionWarps; }
TREADLE_DEVICE int Team() { return simt::Warp() / kAttentionWarps; }

TREADLE_HOST_DEVICE int32_t CeilDivide(int32_t a, int32_t b) { return (a + b - 1) / b; }

TREADLE_HOST_DEVICE int32_t FirstSeen(int32_t position, int32_t window) {
  return position < window ? 0 : position - window + 1;
}

// Positions in a split of a row at `position`: the least power of two, from kMinSplitPositions on,
// that gives at most kMaxSplits splits.
TREADLE_HOST_DEVICE int32_t SplitLength(int32_t position) {
  int32_t length = kMinSplitPositions;
  while (position / kMaxSplits >= length) length *= 2;
  return length;
}
TREADLE_HOST_DEVICE int32_t SplitsOf(int32_t position) {
  return position / SplitLength(position) + 1;
}
// Whether a row whose blocks begin with `first_block` has several splits that are not empty.
TREADLE_HOST_DEVICE bool HasEarlierSplits(int32_t position, int32_t first_block) {
  const int32_t length = SplitLength(position);
  return first_block * kBlockPositions < position / length * length;
}
// The most splits of any row below `context` (rows above 16 splits' worth of the shortest length
// have fewer than those right below it).
TREADLE_HOST_DEVICE int32_t MaxSplitsBelow(int32_t context) {
  const int32_t splits = CeilDivide(context, kMinSplitPositions);
  return splits < 1 ? 1 : splits > kMaxSplits ? kMaxSplits : splits;
}

// Rows [first_row, first_row + rows) of the batch, all of one sequence. rows 0: nothing to do.
struct AttentionTile {
  int32_t sequence = 0;
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t first_position = 0;
  int32_t first_page = 0;
  bool decoding = false;  // the only row of its sequence
};

// Tiles of sequence s have numbers TileStart(s) .. TileStart(s) + ceil(num_rows / tile_rows) - 1.
// Sequences lie in ascending order of their rows, those without rows last, so numbers are not given
// twice, and stay below TileBound; some belong to nobody.
TREADLE_HOST_DEVICE int32_t TileStart(const DeviceSequence& sequence, int32_t s,
                                      int32_t tile_rows) {
  return sequence.first_row / tile_rows + s;
}
TREADLE_HOST_DEVICE int32_t TileBound(int32_t rows, int32_t num_sequences, int32_t tile_rows) {
  return rows / tile_rows + num_sequences;
}

// The tile of a sequence that begins `offset` rows into it.
TREADLE_HOST_DEVICE AttentionTile TileAt(const DeviceSequence& sequence, int32_t s, int32_t offset,
                                         int32_t tile_rows) {
  AttentionTile tile;
  if (offset < 0 || offset >= sequence.num_rows) return tile;
  const int32_t left = sequence.num_rows - offset;
  tile.sequence = s;
  tile.first_row = sequence.first_row + offset;
  tile.rows = left < tile_rows ? left : tile_rows;
  tile.first_position = sequence.first_position + offset;
  tile.first_page = sequence.first_page;
  tile.decoding = sequence.num_rows == 1;
  return tile;
}

TREADLE_HOST_DEVICE AttentionTile FindTile(const DeviceSequence* sequences, int32_t num_sequences,
                                           int32_t tile_rows, int32_t number) {
  // The last sequence with rows whose tiles start at or before `number`.
  int32_t low = 0;
  int32_t high = num_sequences;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const DeviceSequence at = sequences[middle];
    const bool before = at.num_rows > 0 && TileStart(at, middle, tile_rows) <= number;
    low = before ? middle : low;
    high = before ? high : middle;
  }
  if (num_sequences == 0) return {};
  const DeviceSequence found = sequences[low];
  return TileAt(found, low, (number - TileStart(found, low, tile_rows)) * tile_rows, tile_rows);
}

}  // namespace treadle::cuda
