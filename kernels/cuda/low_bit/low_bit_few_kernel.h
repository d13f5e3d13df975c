// Products of few rows with 4- and 8-bit codes: bound by the bytes of the codes.
//
// A block takes bands of 16 features, one after the other; its eight warps deal out the steps of 64
// columns among them (step s to warp s % 8), so that a row's sum depends on the weight's k alone:
// within a warp ascending steps, then warps 0 to 7. A warp keeps kDepth steps of codes on their way
// in registers. A byte of codes becomes two 16-bit values with one read of a table in shared memory
// of which every lane has a copy in a bank of its own (256 x 32 words), so that lanes never
// collide. Products run in tensor cores, a run's sum is multiplied by its scale in f32. Where there
// are offsets, the sum of x over the run is a product with ones. The table and the first codes do
// not wait for earlier launches.
//
// Its bounds, by the machine code for sm_90a and an H200 (4.8 TB/s / 132 / 1.75 GHz = 20.7
// bytes a cycle for each multiprocessor; it issues 4 warp instructions and moves 128 bytes of
// shared memory or L1 a cycle). A step of a band, 1024 codes, takes
//                           instructions   cycles of bytes at full speed, and slots meanwhile
//   NF4, 1 to 8 rows             94                  28      111
//   NF4, 9 to 32 rows           115                  28      111
//   Q4_0, 1 to 8 rows           110                  28      111
//   Q4_K, 1 to 8 rows           145                  37      148
//   FP8, 1 to 8 rows            138                  52      210
//   Q6_K, 1 to 8 rows           170                  62      247
// of which 48 (4 bits: shift, mask, look up for every pair) or 112 (8 bits) unpack. Shared memory
// and L1 are busy for 16 cycles (8 bits: 32) with look-ups, 5 (9) with codes and constants, and 2
// to 8 with x of one tile, 32 of four.
#pragma once

#include "kernels/cuda/low_bit/low_bit_constants.h"
#include "kernels/cuda/low_bit/low_bit_few.h"

namespace treadle::cuda::low_bit {

// The words that a warp reads of a step before it multiplies.
template <int kBits, int kGranule, bool kSecond>
struct Step {
  simt::Words4 codes[kBits / 4];
  simt::Words4 constants[kStepColumns / kGranule];  // as they are stored; f16: the first half
};

// The band that a warp works on.
struct Band {
  const uint32_t* codes;  // of this lane, at step 0
  const std::byte* constants;
  const uint32_t* pairs;
  int run_shift;
  bool half;
  bool zero;
  int segment;
};

// -- activations ----------------------------------------------------------------------------------
// The B fragments of a step's four products.

// x of a lane's row at one step, as it lies in memory: words 2j and 2j + 1 are the B fragment of
// product j.
struct RawX {
  uint32_t words[8];
};

template <int kGranule>
TREADLE_DEVICE void LoadX(const uint16_t* x, RawX& raw) {
  constexpr bool kNarrow = kGranule == 16;  // four columns of a product at once, else of two
  TREADLE_UNROLL
  for (int j = 0; j < 4; j += kNarrow ? 1 : 2) {
    const uint16_t* from = x + ColumnOf(kGranule, j, 0, 0);
    if constexpr (kNarrow) {
      const auto words = *reinterpret_cast<const simt::Words2*>(from);
      raw.words[2 * j] = words.x;
      raw.words[2 * j + 1] = words.y;
    } else {
      const auto words = *reinterpret_cast<const simt::Words4*>(from);
      TREADLE_UNROLL
      for (int i = 0; i < 4; ++i) raw.words[2 * j + i] = WordOf(words, i);
    }
  }
}

// This lane's row of each tile of a block. Lanes of rows that do not exist read the last one, and
// nobody reads their sums.
template <int kGranule, int kTiles>
struct LaneX {
  const uint16_t* rows[kTiles];  // at this lane's first column
  RawX raw[kTiles];

  TREADLE_DEVICE LaneX(const FewRowsParams& p, int first_row) : raw{} {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = first_row + tile * kTileRows + simt::Lane() / 4;
      rows[tile] = p.x + (row < p.rows ? row : p.rows - 1) * p.stride +
                   ColumnOf(kGranule, 0, simt::Lane() % 4, 0);
    }
  }
  TREADLE_DEVICE void Load(int step) {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      LoadX<kGranule>(rows[tile] + step * kStepColumns, raw[tile]);
    }
  }
  // Takes what Load has loaded last.
  TREADLE_DEVICE void Fragments(uint32_t (&b)[kTiles][4][2]) const {
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      TREADLE_UNROLL
      for (int i = 0; i < 8; ++i) b[tile][i / 2][i % 2] = raw[tile].words[i];
    }
  }
};

// -- weights --------------------------------------------------------------------------------------

TREADLE_DEVICE int IndexOfSegment(const FewRowsParams& p, int band) {
  int segment = 0;
  for (int i = 1; i < p.num_segments; ++i) {
    segment = band >= p.segments[i].first_tile ? i : segment;
  }
  return segment;
}

template <int kBits, bool kSecond>
TREADLE_DEVICE Band BandOf(const FewRowsParams& p, int band) {
  const int segment = IndexOfSegment(p, band);
  const LowBitView& w = p.segments[segment].w;
  const int64_t own = band - p.segments[segment].first_tile;
  const int width = PairBytes<kSecond>(w.half_constants != 0);
  return {w.codes + own * w.steps * StepWords(kBits) + simt::Lane() * 4,
          w.constants + (own * w.runs * 8 + simt::Lane() / 4) * width,
          w.pairs,
          w.run_shift,
          w.half_constants != 0,
          w.second == Second::kZero,
          segment};
}

template <int kBits, int kGranule, bool kSecond>
TREADLE_DEVICE void LoadStep(const Band& band, int step, Step<kBits, kGranule, kSecond>& out) {
  const uint32_t* codes = band.codes + int64_t{step} * StepWords(kBits);
  TREADLE_UNROLL
  for (int plane = 0; plane < kBits / 4; ++plane) {
    out.codes[plane] = simt::LoadOnce16(codes + plane * 128);
  }
  constexpr int kGranules = kStepColumns / kGranule;
  TREADLE_UNROLL
  for (int i = 0; i < kGranules; ++i) {
    const int run = (step * kGranules + i) >> band.run_shift;
    out.constants[i] = LoadConstants<kSecond>(band.constants, run, band.half);
  }
}

// The table's word for byte `byte` of `word`. table: this lane's word of entry 0.
TREADLE_DEVICE uint32_t LookUp(const unsigned char* table, uint32_t word, int byte) {
  constexpr uint32_t kMask = 255u << 7;  // entries are 128 bytes apart
  const uint32_t at = (byte == 0 ? word << 7 : word >> (8 * byte - 7)) & kMask;
  return *reinterpret_cast<const uint32_t*>(table + at);
}

// The A fragment of product j.
template <int kBits>
TREADLE_DEVICE void Unpack(const unsigned char* table, const simt::Words4* codes, int j,
                           uint32_t (&a)[4]) {
  TREADLE_UNROLL
  for (int r = 0; r < 4; ++r) {
    if (kBits == 4) {
      a[r] = LookUp(table, WordOf(codes[0], j), r);
    } else {
      const uint32_t word = WordOf(codes[j / 2], j % 2 * 2 + r / 2);
      const uint32_t low = LookUp(table, word, r % 2 * 2);
      const uint32_t high = LookUp(table, word, r % 2 * 2 + 1);
      a[r] = simt::PickBytes(low, high, 0x7610);
    }
  }
}

// sums += scale * run (+ offset * the sum of x over the run); the run begins anew.
template <bool kSecond>
TREADLE_DEVICE void AddRun(const ConstantPair& pair, float (&run)[4], float (&ones)[4],
                           float (&sums)[4]) {
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    sums[i] = simt::Fma(pair.scale[i / 2], run[i], sums[i]);
    run[i] = 0;
    if (kSecond) {
      sums[i] = simt::Fma(pair.second[i / 2], ones[i], sums[i]);
      ones[i] = 0;
    }
  }
}

template <int kBits, int kGranule, bool kSecond, int kTiles, bool kBf16>
TREADLE_DEVICE void UseStep(const unsigned char* table, const Band& band,
                            const Step<kBits, kGranule, kSecond>& loaded,
                            const uint32_t (&b)[kTiles][4][2], float (&sums)[kTiles][4]) {
  constexpr uint32_t kOne = kBf16 ? 0x3f803f80u : 0x3c003c00u;
  const uint32_t all_ones[4] = {kOne, kOne, kOne, kOne};
  float run[kTiles][4] = {};
  float ones[kTiles][4] = {};
  TREADLE_UNROLL
  for (int j = 0; j < 4; ++j) {
    uint32_t a[4];
    Unpack<kBits>(table, loaded.codes, j, a);
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      simt::Mma16<kBf16>(run[tile], a, b[tile][j]);
      if constexpr (kSecond) simt::Mma16<kBf16>(ones[tile], all_ones, b[tile][j]);
    }
    if ((j + 1) * 16 % kGranule != 0) continue;
    ConstantPair pair = DecodeConstants<kSecond>(loaded.constants[j * 16 / kGranule], band.half);
    if (kSecond && band.zero) {
      pair.second[0] *= -pair.scale[0];
      pair.second[1] *= -pair.scale[1];
    }
    TREADLE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      AddRun<kSecond>(pair, run[tile], ones[tile], sums[tile]);
    }
  }
}

// Every lane's copy of the table. Thread e writes entry e; eight neighbours write other banks.
TREADLE_DEVICE void FillTable(const uint32_t* pairs, unsigned char* table) {
  const uint32_t word = pairs[simt::Thread()];
  TREADLE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int at = simt::Thread() * 128 + (simt::Thread() + i) % 8 * 16;
    *reinterpret_cast<simt::Words4*>(table + at) = {word, word, word, word};
  }
}

// Where a warp leaves its sums: [rows][kSumStride], rows of all tiles.
template <int kTiles>
TREADLE_DEVICE void StoreSums(const float (&sums)[kTiles][4], float* shared) {
  float* own = shared + simt::Warp() * kTiles * kTileRows * kSumStride;
  const int feature = simt::Lane() / 4;
  TREADLE_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    float* row = own + (tile * kTileRows + simt::Lane() % 4 * 2) * kSumStride + feature;
    row[0] = sums[tile][0];
    row[kSumStride] = sums[tile][1];
    row[8] = sums[tile][2];
    row[kSumStride + 8] = sums[tile][3];
  }
}

// Adds the warps' sums in their order, and what the projection adds.
template <int kTiles>
TREADLE_DEVICE void WriteBand(const FewRowsParams& p, int segment, int band, int first_row,
                              const float* shared) {
  const FewRowsSegment& s = p.segments[segment];
  const int first = (band - s.first_tile) * kBandFeatures;
  for (int i = simt::Thread(); i < kTiles * kTileRows * kBandFeatures; i += kFewThreads) {
    const int row = i / kBandFeatures;
    const int feature = first + i % kBandFeatures;
    if (first_row + row >= p.rows || feature >= s.n) continue;
    const float* from = shared + row * kSumStride + i % kBandFeatures;
    float sum = from[0];
    TREADLE_UNROLL
    for (int warp = 1; warp < kFewWarps; ++warp) {
      sum += from[warp * kTiles * kTileRows * kSumStride];
    }
    StoreResult(s, first_row + row, feature, sum);
  }
}

// Steps whose codes are on their way: as many as FewResident's registers allow.
template <int kBits, int kGranule, bool kSecond, int kTiles>
constexpr int Depth() {
  constexpr int kWords = kBits + 4 * (kStepColumns / kGranule) / (kSecond ? 1 : 2);
  if (kTiles > 1 && kSecond) return 2;
  return kWords <= 8 ? 4 : kWords <= 16 ? 3 : 2;
}

// Block: bands BlockX(), BlockX() + GridX(), ...; rows BlockY() * 8 * kTiles on.
template <int kBits, int kGranule, bool kSecond, int kTiles, bool kBf16>
TREADLE_KERNEL(kFewThreads, FewResident(kBits, kSecond, kTiles == 1))
void FewRowsKernel(FewRowsParams p) {
  constexpr int kDepth = Depth<kBits, kGranule, kSecond, kTiles>();
  constexpr bool kEarlyX = kTiles == 1;  // x of the next step is on its way, too
  auto* table = simt::DynamicShared<unsigned char>();
  auto* shared_sums = reinterpret_cast<float*>(table + kTableBytes);
  const unsigned char* own_table = table + simt::Lane() * 4;
  const int first_row = simt::BlockY() * kTiles * kTileRows;
  const int steps = p.segments[0].w.steps;

  int at = simt::BlockX();
  Band band = BandOf<kBits, kSecond>(p, at);
  Step<kBits, kGranule, kSecond> loaded[kDepth];
  LaneX<kGranule, kTiles> x(p, first_row);
  const auto load_first_codes = [&] {
    TREADLE_UNROLL
    for (int i = 0; i < kDepth; ++i) {
      const int step = simt::Warp() + i * kFewWarps;
      if (step < steps) LoadStep(band, step, loaded[i]);
    }
  };
  const auto load_first_x = [&] {
    if (kEarlyX && simt::Warp() < steps) x.Load(simt::Warp());
  };
  load_first_codes();
  FillTable(band.pairs, table);
  simt::AwaitEarlierLaunches();
  load_first_x();
  for (;;) {
    simt::SyncThreads();  // the table is complete, the last band's sums are read
    float sums[kTiles][4] = {};
    for (int begin = simt::Warp(); begin < steps; begin += kDepth * kFewWarps) {
      TREADLE_UNROLL
      for (int i = 0; i < kDepth; ++i) {
        const int step = begin + i * kFewWarps;
        if (step >= steps) break;
        if (!kEarlyX) x.Load(step);
        uint32_t b[kTiles][4][2];
        x.Fragments(b);
        if (kEarlyX && step + kFewWarps < steps) x.Load(step + kFewWarps);
        UseStep<kBits, kGranule, kSecond, kTiles, kBf16>(own_table, band, loaded[i], b, sums);
        const int next = step + kDepth * kFewWarps;
        if (next < steps) LoadStep(band, next, loaded[i]);
      }
    }
    StoreSums<kTiles>(sums, shared_sums);
    const int done = at;
    const Band done_band = band;
    at += simt::GridX();
    if (at < p.bands) {
      band = BandOf<kBits, kSecond>(p, at);
      load_first_codes();
      load_first_x();
    }
    simt::SyncThreads();  // all sums are there; nobody looks anything up
    WriteBand<kTiles>(p, done_band.segment, done, first_row, shared_sums);
    if (at >= p.bands) return;
    if (band.pairs != done_band.pairs) FillTable(band.pairs, table);
  }
}

template <bool kBf16, int... kLayouts>
FewRowsFunction FindFewRows(int layout, bool one_tile, std::integer_sequence<int, kLayouts...>) {
  static constexpr FewRowsFunction kFunctions[][2] = {
      {FewRowsKernel<LayoutAt(kLayouts).bits, LayoutAt(kLayouts).granule, LayoutAt(kLayouts).second,
                     kFewTiles, kBf16>,
       FewRowsKernel<LayoutAt(kLayouts).bits, LayoutAt(kLayouts).granule, LayoutAt(kLayouts).second,
                     1, kBf16>}...};
  return kFunctions[layout][one_tile ? 1 : 0];
}
template <bool kBf16>
FewRowsFunction FindFewRows(const LowBitView& w, bool one_tile) {
  return FindFewRows<kBf16>(LayoutOf(w), one_tile, kLowBitLayouts);
}

}  // namespace treadle::cuda::low_bit
