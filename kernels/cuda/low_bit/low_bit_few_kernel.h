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
// What bounds it, by the machine code for sm_90a and an H200 (4.8 TB/s / 132 / 1.75 GHz = 20.7
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
#include "kernels/cuda/low_bit/low_bit_few_x.h"

namespace treadle::cuda::low_bit {

// What a warp reads of a step before it multiplies.
template <int kBits, int kGranule, bool kSecond>
struct Step {
  simt::Words4 codes[kBits / 4];
  simt::Words4 constants[kStepColumns / kGranule];  // as they are stored; f16: the first half
};

// What a warp needs of the band that it works on.
struct Band {
  const uint32_t* codes;  // of this lane, at step 0
  const std::byte* constants;
  const uint32_t* pairs;
  int run_shift;
  bool half;
  bool zero;
  int segment;
};

TREADLE_DEVICE int SegmentOf(const FewRowsParams& p, int band) {
  int segment = 0;
  for (int i = 1; i < p.segments; ++i) segment = band >= p.segment[i].first_band ? i : segment;
  return segment;
}

template <int kBits, bool kSecond>
TREADLE_DEVICE Band BandOf(const FewRowsParams& p, int band) {
  const int segment = SegmentOf(p, band);
  const LowBitView& w = p.segment[segment].w;
  const int64_t own = band - p.segment[segment].first_band;
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

template <bool kBf16>
TREADLE_DEVICE void Multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kBf16) {
    simt::MmaBf16(d, a, b);
  } else {
    simt::MmaF16(d, a, b);
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
      Multiply<kBf16>(run[tile], a, b[tile][j]);
      if constexpr (kSecond) Multiply<kBf16>(ones[tile], all_ones, b[tile][j]);
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
  const FewRowsSegment& s = p.segment[segment];
  const int first = (band - s.first_band) * kBandFeatures;
  for (int i = simt::Thread(); i < kTiles * kTileRows * kBandFeatures; i += kFewThreads) {
    const int row = i / kBandFeatures;
    const int feature = first + i % kBandFeatures;
    if (first_row + row >= p.rows || feature >= s.w.n) continue;
    const float* from = shared + row * kSumStride + i % kBandFeatures;
    float sum = from[0];
    TREADLE_UNROLL
    for (int warp = 1; warp < kFewWarps; ++warp) {
      sum += from[warp * kTiles * kTileRows * kSumStride];
    }
    if (s.bias != nullptr) sum += s.bias[feature];
    float* out = s.out + (first_row + row) * s.out_stride + feature;
    *out = s.accumulate != 0 ? *out + sum : sum;
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
  const int steps = p.segment[0].w.steps;

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

template <int kBits, int kGranule, bool kSecond, bool kBf16>
FewRowsFunction FindFewRows(bool one_tile) {
  return one_tile ? FewRowsKernel<kBits, kGranule, kSecond, 1, kBf16>
                  : FewRowsKernel<kBits, kGranule, kSecond, kFewTiles, kBf16>;
}

template <int kBits, int kGranule, bool kBf16>
FewRowsFunction FindFewRows(bool second, bool one_tile) {
  return second ? FindFewRows<kBits, kGranule, true, kBf16>(one_tile)
                : FindFewRows<kBits, kGranule, false, kBf16>(one_tile);
}

template <int kBits, bool kBf16>
FewRowsFunction FindFewRows(int granule, bool second, bool one_tile) {
  if (granule == 64) return FindFewRows<kBits, 64, kBf16>(second, one_tile);
  return granule == 32 ? FindFewRows<kBits, 32, kBf16>(second, one_tile)
                       : FindFewRows<kBits, 16, kBf16>(second, one_tile);
}

template <bool kBf16>
FewRowsFunction FindFewRows(const LowBitView& w, bool one_tile) {
  const bool second = w.second != Second::kNone;
  return w.bits == 4 ? FindFewRows<4, kBf16>(w.granule, second, one_tile)
                     : FindFewRows<8, kBf16>(w.granule, second, one_tile);
}

}  // namespace treadle::cuda::low_bit
