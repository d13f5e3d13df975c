// The outliers' part of a tile of results: for the columns of k that hold an outlier in one of the
// tile's rows, in ascending order, y = fma(scale * code, x, y) where (row, column) is one.
//
// The columns are gathered as bits in shared memory and taken from there in chunks, whose weights
// and activations are brought into shared memory as floats: a few columns in real models, one
// chunk; but any number is right. Device code.
#pragma once

#include "kernels/cuda/row_int8/row_int8_quantize.h"

namespace treadle::cuda {

inline constexpr int kOutlierChunk = 32;

// In shared memory. flags: [Int8FlagWords(k)] columns that are still to come.
template <int kFeatures, int kRows>
struct OutlierTile {
  static constexpr int kTileFeatures = kFeatures;
  static constexpr int kTileRows = kRows;

  float weights[kOutlierChunk][kFeatures];
  float x[kOutlierChunk][kRows];
  // Bit r % 32 of word r / 32: x of row r takes part. Of whole words of rows only.
  uint32_t taken[kOutlierChunk][kRows >= 32 ? kRows / 32 : 1];
  float row_scales[kRows];
  int32_t columns[kOutlierChunk];
  int32_t count;  // of columns in this chunk; fewer than kOutlierChunk: the last
  int32_t word;   // of flags; words before it are done
  uint32_t absmax_bits;
};

// Which rows and features a tile is of.
struct TilePlace {
  int feature0 = 0;
  int row0 = 0;
};

TREADLE_DEVICE int CountBits(uint32_t bits) {
  bits -= bits >> 1 & 0x55555555u;
  bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);
  return static_cast<int>(((bits + (bits >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24);
}

TREADLE_DEVICE void MarkColumn(uint32_t* flags, int column) {
  simt::AtomicOr(flags + column / 32, 1u << (column % 32));
}

// By `threads` threads, before MarkRows; a barrier between them.
TREADLE_DEVICE void InitFlags(const Int8Input& input, int thread, int threads, uint32_t* flags) {
  for (int i = thread; i < Int8FlagWords(input.k); i += threads) {
    flags[i] = input.of_call != 0 ? input.call_flags[i] : 0;
  }
}

// The outlier columns of rows [begin, end). One warp.
TREADLE_DEVICE void MarkRows(const Int8Input& input, int begin, int end, uint32_t* flags) {
  if (input.of_call != 0) return;  // they are there
  for (int first = begin; first < end; first += simt::kWarp) {
    const int row = first + simt::Lane();
    const int outliers = row < end ? input.row_info[row].outliers : 0;
    if (outliers <= kInt8Listed) {
      for (int i = 0; i < outliers; ++i) MarkColumn(flags, input.row_info[row].columns[i]);
    }
    const uint32_t unlisted = simt::Ballot(outliers > kInt8Listed);
    for (int i = 0; i < simt::kWarp; ++i) {
      if ((unlisted >> i & 1) == 0) continue;
      const float* x = input.x + (first + i) * input.x_stride;
      for (int column = simt::Lane(); column < input.k; column += simt::kWarp) {
        if ((simt::AsBits(x[column]) & kMagnitudeBits) >= input.threshold_bits) {
          MarkColumn(flags, column);
        }
      }
    }
  }
}

// The next columns of flags, which lose them. One warp; a barrier before and after it.
TREADLE_DEVICE void FindColumns(uint32_t* flags, int words, int32_t* columns, int32_t& found,
                                int32_t& next_word) {
  const int lane = simt::Lane();
  int word = next_word;
  int count = 0;
  while (word < words && count < kOutlierChunk) {
    uint32_t bits = word + lane < words ? flags[word + lane] : 0;
    if (simt::Ballot(bits != 0) != 0) {
      const int mine = CountBits(bits);
      int upto = mine;  // of lanes up to this one
      TREADLE_UNROLL
      for (int delta = 1; delta < simt::kWarp; delta *= 2) {
        const int before = simt::ShuffleUp(upto, delta);
        if (lane >= delta) upto += before;
      }
      int at = count + upto - mine;
      for (int bit = 0; bit < 32; ++bit) {
        if ((bits >> bit & 1) == 0 || at >= kOutlierChunk) continue;
        columns[at++] = (word + lane) * 32 + bit;
        bits &= ~(1u << bit);
      }
      if (word + lane < words) flags[word + lane] = bits;
      count += simt::Shuffle(upto, simt::kWarp - 1);
      if (count > kOutlierChunk) break;  // some of these words' are left
    }
    word += simt::kWarp;
  }
  if (lane == 0) {
    found = count < kOutlierChunk ? count : kOutlierChunk;
    next_word = word;
  }
}

// The bits of a magnitude from which an element of a marked column takes part.
TREADLE_DEVICE uint32_t TakenFrom(const Int8Input& input) {
  return input.of_call != 0 ? 0 : input.threshold_bits;
}
TREADLE_DEVICE bool IsTaken(float x, uint32_t taken_from) {
  return (simt::AsBits(x) & kMagnitudeBits) >= taken_from;
}

// The chunk's weights and activations, by `threads` threads; a barrier before and after it.
template <typename Tile>
TREADLE_DEVICE void GatherChunk(const Int8Input& input, const Int8Segment& segment,
                                const TilePlace& place, int thread, int threads, Tile& tile) {
  constexpr int kFeatures = Tile::kTileFeatures;
  constexpr int kRows = Tile::kTileRows;
  const int count = tile.count;
  for (int i = thread; i < count * kFeatures; i += threads) {
    const int column = static_cast<int>(static_cast<unsigned>(i) / kFeatures);
    const int feature = place.feature0 + i - column * kFeatures;
    float weight = 0;
    if (feature < segment.n) {
      const int64_t at = Int8WeightByte(feature, tile.columns[column], input.units);
      const auto code = static_cast<int8_t>(segment.codes[at]);
      weight = segment.scales[feature] * static_cast<float>(code);
    }
    tile.weights[column][i - column * kFeatures] = weight;
  }
  const uint32_t taken_from = TakenFrom(input);
  for (int i = thread; i < count * kRows; i += threads) {
    const int row = place.row0 + i % kRows;
    const int column = tile.columns[i / kRows];
    const float x = row < input.rows ? input.x[row * input.x_stride + column] : 0;
    tile.x[i / kRows][i % kRows] = x;
    if constexpr (kRows % simt::kWarp == 0) {
      const uint32_t taken = simt::Ballot(IsTaken(x, taken_from));
      if (simt::Lane() == 0) tile.taken[i / kRows][i % kRows / 32] = taken;
    }
  }
}

// Brings in the chunk after this one. The whole block.
template <typename Tile>
TREADLE_DEVICE void NextChunk(const Int8Input& input, const Int8Segment& segment,
                              const TilePlace& place, uint32_t* flags, Tile& tile) {
  simt::SyncThreads();  // the chunk before is used up
  if (simt::Warp() == 0) {
    FindColumns(flags, Int8FlagWords(input.k), tile.columns, tile.count, tile.word);
  }
  simt::SyncThreads();
  GatherChunk(input, segment, place, simt::Thread(), simt::Threads(), tile);
  simt::SyncThreads();
}

}  // namespace treadle::cuda
