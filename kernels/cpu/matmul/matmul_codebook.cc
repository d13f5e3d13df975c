// ComputeMode::kInt16 for apart formats: codes as integers of 16 bits (code_words.h). Few rows take
// them from registers; more run over a tile.
#include "kernels/cpu/matmul/matmul_words.h"

namespace treadle::TREADLE_ISA {
namespace {

template <bool kZeros>
struct CodebookLayout {
  static constexpr int kZero = 0, kOffsets = kZeros ? 1 : 0;
  static constexpr bool kHalves = false;
};

constexpr int64_t kLinePrefetch = 2048;

// How a matrix lies in memory.
template <typename Decoder>
struct Units {
  int64_t header_bytes;
  int64_t blocks;  // of a unit
  int64_t bytes;

  TREADLE_SIMD explicit Units(const PackedView& weight)
      : header_bytes(4 * kLanes * (weight.zeros ? 2 : 1)),
        blocks(weight.unit / kBlockValues),
        bytes(header_bytes + blocks * Decoder::kBlockBytes) {}
};

// Applies a unit's scales and zeros to the integers.
struct UnitConstants {
  Vec scale, offset;
};
TREADLE_SIMD UnitConstants ConstantsOf(const uint8_t* unit, float step, bool zeros) {
  const Vec scale = Load(Floats(unit));
  UnitConstants constants = {Mul(scale, Broadcast(step)), Zero()};
  if (zeros) constants.offset = Sub(Zero(), Mul(scale, Load(Floats(unit) + kLanes)));
  return constants;
}

// Fetches the lines that step `step` of a later block needs.
template <typename Decoder>
TREADLE_SIMD void PrefetchStep(const uint8_t* block, int step) {
  constexpr int kLines = Decoder::kBlockBytes / kLineBytes;
  for (int line = step * kLines / Decoder::kSteps; line < (step + 1) * kLines / Decoder::kSteps;
       ++line) {
    FetchSoon(block + line * kLineBytes + kLinePrefetch);
  }
}

// Rows that are multiplied with words in registers.
constexpr int kRegisterRows = kWideRegisters ? 8 : 4;
// Chains of sums of one row: they wait for themselves.
template <int R>
constexpr int kChainsOf = R <= 4 && kWideRegisters ? 2 : 1;

// All of R rows.
template <typename Decoder, int R>
TREADLE_LOOP void RunRegisters(const MatMulInput& input, const MatMulShare& share, int64_t group) {
  constexpr int kChains = kChainsOf<R>;
  const PackedView& weight = share.weight;
  const Decoder decoder(weight);
  const Units<Decoder> units(weight);
  const float step = Decoder::Step(weight);
  const int64_t blocks = input.k / kBlockValues;
  const int64_t row_bytes = kInt16Bytes * input.k;
  const uint8_t* p = weight.data + group * weight.group_bytes;
  const int8_t* x = input.codes + kWordsAt;
  const ActivationBlock* block = input.blocks;
  UnitConstants constants = {};
  Vec sums[R][1], span[R][1];
  BeginSums<R, 1>(true, nullptr, sums);
  BeginSums<R, 1>(true, nullptr, span);
  int64_t left = 0;  // blocks of the unit
  int64_t span_end = SpanEnd(0, blocks);
  for (int64_t b = 0; b < blocks; ++b, ++block, --left) {
    if (left == 0) {
      left = units.blocks;
      constants = ConstantsOf(p, step, weight.zeros);
      for (int64_t at = 0; at < units.header_bytes; at += 64) {
        FetchSoon(p + at + kLinePrefetch);
      }
      p += units.header_bytes;
    }
    Integers dots[R][kChains];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kChains; ++i) dots[r][i] = BroadcastWords(0);
    }
#pragma GCC unroll 8
    for (int step = 0; step < Decoder::kSteps; ++step) {
      PrefetchStep<Decoder>(p, step);
      Words words[Decoder::kFours];
      decoder.Decode(p, step, words);
#pragma GCC unroll 2
      for (int i = 0; i < Decoder::kFours; ++i, x += 8) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          Integers& even = dots[r][0];
          Integers& odd = dots[r][kChains - 1];
          even = AddWords(even, words[i].even, x + r * row_bytes);
          odd = AddWords(odd, words[i].odd, x + r * row_bytes + 4);
        }
      }
    }
    p += Decoder::kBlockBytes;
    x += kInt16Bytes * kBlockValues - 64;
    for (int r = 0; r < R; ++r) {
      const Integers dot = kChains == 1 ? dots[r][0] : AddIntegers(dots[r][0], dots[r][1]);
      span[r][0] = Fma(ToFloat(dot), constants.scale, span[r][0]);
      if (!weight.zeros) continue;
      sums[r][0] = Fma(constants.offset, Broadcast(block[r * blocks].scaled_sum), sums[r][0]);
    }
    if (b + 1 < span_end) continue;
    AddSpan(block, blocks, span, sums);
    BeginSums<R, 1>(true, nullptr, span);
    span_end = SpanEnd(span_end, blocks);
  }
  EndSums<R, 1>(true, share, 0, group, nullptr, sums);
}

// Whether there are at most R rows; then they are done.
template <typename Decoder, int R>
bool RunRegisterRows(const MatMulInput& input, const MatMulShare& share) {
  if constexpr (R > 1) {
    if (RunRegisterRows<Decoder, R - 1>(input, share)) return true;
  }
  if (input.rows != R) return false;
  for (int64_t group = share.group_begin; group < share.group_end; ++group) {
    RunRegisters<Decoder, R>(input, share, group);
  }
  return true;
}

#ifndef __AVX512F__

// One row of nibbles. The bytes of their integers are joined by unpacking, which is quicker than by
// shifting: four consecutive k of a feature fill 64 bits, and its sum is that of two lanes.
// words: the activations, with k in their order. [k]
TREADLE_LOOP void RunNibbleRow(const MatMulInput& input, const MatMulShare& share,
                               const int16_t* words, int64_t group) {
  const PackedView& weight = share.weight;
  const NibbleWords tables(weight);
  const Units<NibbleWords> units(weight);
  const float step = NibbleWords::Step(weight);
  const uint8_t* p = weight.data + group * weight.group_bytes;
  UnitConstants constants = {};
  Vec sums[1][1] = {{Zero()}}, span[1][1] = {{Zero()}};
  const int64_t blocks = input.k / kBlockValues;
  int64_t span_end = SpanEnd(0, blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    if (b % units.blocks == 0) {
      constants = ConstantsOf(p, step, weight.zeros);
      p += units.header_bytes;
    }
    __m256i first[2], second[2];  // of features 0-7, 8-15: of two of every four each
    for (int half = 0; half < 2; ++half) first[half] = second[half] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line, p += kLineBytes) {
      FetchSoon(p + kLinePrefetch);
#pragma GCC unroll 2
      for (int upper = 0; upper < 2; ++upper, words += 4) {
        int64_t four;
        __builtin_memcpy(&four, words, sizeof(four));
        const __m256i x = _mm256_set1_epi64x(four);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256i packed = LoadBytes(p + 32 * half);
          const __m256i nibbles = upper == 0 ? LowNibbles(packed) : HighNibbles(packed);
          const __m256i low = _mm256_shuffle_epi8(tables.low, nibbles);
          const __m256i high = _mm256_shuffle_epi8(tables.high, nibbles);
          const auto add = [x](__m256i& sum, __m256i codes) { sum = AddWordPairs(sum, codes, x); };
          add(first[half], _mm256_unpacklo_epi8(low, high));
          add(second[half], _mm256_unpackhi_epi8(low, high));
        }
      }
    }
    const auto sum = [&](int half) {
      const __m256 a = _mm256_castsi256_ps(first[half]);
      const __m256 c = _mm256_castsi256_ps(second[half]);
      return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, c, 0x88)),
                              _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0xdd)));
    };
    span[0][0] = Fma(ToFloat(Integers{sum(0), sum(1)}), constants.scale, span[0][0]);
    if (weight.zeros) {
      sums[0][0] = Fma(constants.offset, Broadcast(input.blocks[b].scaled_sum), sums[0][0]);
    }
    if (b + 1 < span_end) continue;
    AddSpan(input.blocks + b, 1, span, sums);
    span[0][0] = Zero();
    span_end = SpanEnd(span_end, blocks);
  }
  EndSums<1, 1>(true, share, 0, group, nullptr, sums);
}

bool RunNibbleRow(const MatMulInput& input, const MatMulShare& share,
                  const MatMulScratch& scratch) {
  if (input.rows != 1 || 2 * input.k > kTileBytes) return false;
  auto* words = reinterpret_cast<__m256i*>(scratch.tile);
  for (int64_t b = 0; b < input.k / kBlockValues; ++b) {
    const auto* from =
        reinterpret_cast<const __m256i*>(input.codes + b * kInt16Bytes * 32 + kWordsAt);
    for (int i = 0; i < 2; ++i) {
      const __m256i mixed = _mm256_loadu_si256(from + i);
      *words++ = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(mixed, 0xd8), 0xd8);
    }
  }
  for (int64_t group = share.group_begin; group < share.group_end; ++group) {
    RunNibbleRow(input, share, reinterpret_cast<const int16_t*>(scratch.tile), group);
  }
  return true;
}

#endif

template <typename Decoder, bool kZeros>
void RunTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  const Decoder decoder(share.weight);
  const Units<Decoder> units(share.weight);
  const float step = Decoder::Step(share.weight);
  RunWords<CodebookLayout<kZeros>>(
      input, share, scratch, [&](const uint8_t* group, int64_t block, uint8_t* tile) {
        const uint8_t* unit = group + block / units.blocks * units.bytes;
        const UnitConstants constants = ConstantsOf(unit, step, kZeros);
        auto* floats = reinterpret_cast<float*>(tile + kWordBytes);
        Store(floats, constants.scale);
        if (kZeros) Store(floats + kLanes, constants.offset);
        const uint8_t* p = unit + units.header_bytes + block % units.blocks * Decoder::kBlockBytes;
#pragma GCC unroll 8
        for (int step = 0; step < Decoder::kSteps; ++step) {
          PrefetchStep<Decoder>(p, step);
          Words words[Decoder::kFours];
          decoder.Decode(p, step, words);
          for (int i = 0; i < Decoder::kFours; ++i, tile += 128) StoreWords(tile, words[i]);
        }
      });
}

template <typename Decoder>
void Run(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  if (RunRegisterRows<Decoder, kRegisterRows>(input, share)) return;
  if (share.weight.zeros) {
    RunTiles<Decoder, true>(input, share, scratch);
  } else {
    RunTiles<Decoder, false>(input, share, scratch);
  }
}

}  // namespace

void MatMulCodebook(const MatMulInput& input, const MatMulShare& share,
                    const MatMulScratch& scratch) {
  switch (share.weight.kind) {
    case PackKind::kCodes4:
#ifndef __AVX512F__
      if (RunNibbleRow(input, share, scratch)) return;
#endif
      return Run<NibbleWords>(input, share, scratch);
    case PackKind::kE4M3:
      return Run<E4M3Words>(input, share, scratch);
    case PackKind::kWords:
      return Run<PackedWords>(input, share, scratch);
    default:  // kCodes8
      break;
  }
  switch (share.weight.format->code_bits) {
#ifdef __AVX512F__
    case 6:
      return Run<TableWords<6>>(input, share, scratch);
    case 7:
      return Run<TableWords<7>>(input, share, scratch);
    case 8:  // with VBMI only
      return Run<ByteTables>(input, share, scratch);
#endif
    default:  // 5: those of more bits are packed as words (PackTargetOf in matmul.h)
      return Run<TableWords<5>>(input, share, scratch);
  }
}

}  // namespace treadle::TREADLE_ISA
