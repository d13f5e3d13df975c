// ComputeMode::kInt16 for codebooks of up to 16 floats: the codebook rounded to 16-bit integers,
// which two byte shuffles look up (IntegerCodebook in matmul_kernels.h).
//
// Many rows run over a tile. Few take codes from registers: there the bytes of a code are joined by
// unpacking, so four consecutive k of a feature fill 64 bits, and its sum is that of two lanes.
#include "kernels/cpu/matmul_words.h"

namespace treadle::TREADLE_ISA {
namespace {

template <bool kZeros>
struct CodebookLayout {
  static constexpr int kZero = 0;
  static constexpr bool kHalves = false, kOffset = kZeros;
};

// What a unit's scales and zeros make of the integers.
struct UnitConstants {
  Vec scale, offset;
};
TREADLE_SIMD UnitConstants ConstantsOf(const PackedView& weight, const uint8_t* unit) {
  const Vec scale = Load(Floats(unit));
  UnitConstants constants = {Mul(scale, Broadcast(weight.integers->step)), Zero()};
  if (weight.zeros) constants.offset = Sub(Zero(), Mul(scale, Load(Floats(unit) + kLanes)));
  return constants;
}
TREADLE_SIMD int64_t HeaderBytes(const PackedView& weight) {
  return 4 * kLanes * (weight.zeros ? 2 : 1);
}

constexpr int64_t kPrefetchBytes = 2048;

#ifdef __AVX512F__
struct Tables {
  __m512i low, high;
};
TREADLE_SIMD Tables LoadTables(const IntegerCodebook& codebook) {
  const auto load = [](const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  };
  return {load(codebook.low), load(codebook.high)};
}
// Four consecutive k, from a nibble in every byte.
TREADLE_SIMD void StoreFour(const Tables& tables, __m512i nibbles, uint8_t* tile) {
  const __m512i low = _mm512_shuffle_epi8(tables.low, nibbles);
  const __m512i high = _mm512_shuffle_epi8(tables.high, nibbles);
  const __m512i low_bytes = _mm512_set1_epi16(255);
  // Bit by bit: low_bytes ? a : b.
  const auto pick = [low_bytes](__m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(low_bytes, a, b, 0xca);
  };
  _mm512_storeu_si512(tile, pick(low, _mm512_slli_epi16(high, 8)));
  _mm512_storeu_si512(tile + 64, pick(_mm512_srli_epi16(low, 8), high));
}

struct QuadSums {
  __m512i first, second;  // of two features of every four each, two lanes a feature
};
TREADLE_SIMD QuadSums NoSums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
// sums[r] += the products of four k: the low nibbles of 64 bytes, or the high ones. x: of row 0.
template <int R>
TREADLE_SIMD void AddFour(const Tables& tables, const uint8_t* p, bool high_nibbles,
                          const int16_t* x, int64_t k, QuadSums (&sums)[R]) {
  __m512i nibbles = _mm512_loadu_si512(p);
  if (high_nibbles) nibbles = _mm512_srli_epi16(nibbles, 4);
  nibbles = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
  const __m512i low = _mm512_shuffle_epi8(tables.low, nibbles);
  const __m512i high = _mm512_shuffle_epi8(tables.high, nibbles);
  const __m512i first = _mm512_unpacklo_epi8(low, high);
  const __m512i second = _mm512_unpackhi_epi8(low, high);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    int64_t four;
    __builtin_memcpy(&four, x + r * k, 8);
    const __m512i activations = _mm512_set1_epi64(four);
    sums[r].first = _mm512_dpwssd_epi32(sums[r].first, first, activations);
    sums[r].second = _mm512_dpwssd_epi32(sums[r].second, second, activations);
  }
}
TREADLE_SIMD Integers SumOf(QuadSums a, QuadSums b) {
  const __m512 first = _mm512_castsi512_ps(_mm512_add_epi32(a.first, b.first));
  const __m512 second = _mm512_castsi512_ps(_mm512_add_epi32(a.second, b.second));
  return {_mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88)),
                           _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd)))};
}
constexpr int64_t kRegisterRows = 4;
constexpr bool kSplitSums = true;  // shorter chains of dependent sums

TREADLE_SIMD void UnpackDword(const Tables& tables, const uint8_t* p, uint8_t* tile) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i packed = _mm512_loadu_si512(p);
  StoreFour(tables, _mm512_and_si512(packed, nibble), tile);
  StoreFour(tables, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble), tile + 128);
}
#else
struct Tables {
  __m256i low, high;
};
TREADLE_SIMD Tables LoadTables(const IntegerCodebook& codebook) {
  const auto load = [](const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  };
  return {load(codebook.low), load(codebook.high)};
}
TREADLE_SIMD void StoreFour(const Tables& tables, __m256i nibbles, uint8_t* tile) {
  const __m256i low = _mm256_shuffle_epi8(tables.low, nibbles);
  const __m256i high = _mm256_shuffle_epi8(tables.high, nibbles);
  StoreBytes(tile, _mm256_blendv_epi8(_mm256_slli_epi16(high, 8), low, _mm256_set1_epi16(255)));
  StoreBytes(tile + 64,
             _mm256_blendv_epi8(high, _mm256_srli_epi16(low, 8), _mm256_set1_epi16(255)));
}

struct QuadSums {
  __m256i first[2], second[2];  // of features 0-7, 8-15
};
TREADLE_SIMD QuadSums NoSums() {
  const __m256i zero = _mm256_setzero_si256();
  return {{zero, zero}, {zero, zero}};
}
template <int R>
TREADLE_SIMD void AddFour(const Tables& tables, const uint8_t* p, bool high_nibbles,
                          const int16_t* x, int64_t k, QuadSums (&sums)[R]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i packed = LoadBytes(p + 32 * half);
    const __m256i nibbles = high_nibbles ? HighNibbles(packed) : LowNibbles(packed);
    const __m256i low = _mm256_shuffle_epi8(tables.low, nibbles);
    const __m256i high = _mm256_shuffle_epi8(tables.high, nibbles);
    const __m256i first = _mm256_unpacklo_epi8(low, high);
    const __m256i second = _mm256_unpackhi_epi8(low, high);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int64_t four;
      __builtin_memcpy(&four, x + r * k, 8);
      const __m256i activations = _mm256_set1_epi64x(four);
      const auto add = [activations](__m256i& sum, __m256i codes) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, activations));
      };
      add(sums[r].first[half], first);
      add(sums[r].second[half], second);
    }
  }
}
TREADLE_SIMD Integers SumOf(QuadSums a, QuadSums b) {
  const auto sum = [&](int half) {
    const __m256 first = _mm256_castsi256_ps(_mm256_add_epi32(a.first[half], b.first[half]));
    const __m256 second = _mm256_castsi256_ps(_mm256_add_epi32(a.second[half], b.second[half]));
    return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)));
  };
  return {sum(0), sum(1)};
}
constexpr int64_t kRegisterRows = 2;
constexpr bool kSplitSums = false;

TREADLE_SIMD void UnpackDword(const Tables& tables, const uint8_t* p, uint8_t* tile) {
  for (int half = 0; half < 64; half += 32) {
    const __m256i packed = LoadBytes(p + half);
    StoreFour(tables, LowNibbles(packed), tile + half);
    StoreFour(tables, HighNibbles(packed), tile + 128 + half);
  }
}
#endif

// Rows of 16-bit activations, with k in their order. words: [rows, k]
void PutWords(const MatMulInput& input, int16_t* words) {
  const int64_t blocks = input.rows * (input.k / kBlockValues);
  for (int64_t b = 0; b < blocks; ++b) {
    const int8_t* from = input.codes + b * kInt16Bytes * kBlockValues + kWordsAt;
    for (int64_t i = 0; i < 2 * kBlockValues; i += 32) {
      const __m256i mixed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      const __m256i ordered = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(mixed, 0xd8), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), ordered);
      words += 16;
    }
  }
}

// All of R rows.
template <int R>
TREADLE_LOOP void RunRegisters(const MatMulInput& input, const MatMulShare& share,
                               const int16_t* words, int64_t group) {
  const PackedView& weight = share.weight;
  const Tables tables = LoadTables(*weight.integers);
  const int64_t blocks = input.k / kBlockValues;
  const uint8_t* p = weight.data + group * weight.group_bytes;
  const ActivationBlock* block = input.blocks;
  UnitConstants constants = {};
  Vec sums[R][1];
  BeginSums<R, 1>(true, nullptr, sums);
  int64_t left = 0;  // blocks of the unit
  for (int64_t b = 0; b < blocks; ++b, ++block, --left) {
    if (left == 0) {
      left = weight.unit / kBlockValues;
      constants = ConstantsOf(weight, p);
      p += HeaderBytes(weight);
    }
    QuadSums low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = NoSums();
#pragma GCC unroll 4
    for (int dword = 0; dword < 4; ++dword, p += 64, words += 8) {
      __builtin_prefetch(p + kPrefetchBytes);
      AddFour<R>(tables, p, false, words, input.k, low);
      AddFour<R>(tables, p, true, words + 4, input.k, kSplitSums ? high : low);
    }
    for (int r = 0; r < R; ++r) {
      const Vec factor = Mul(constants.scale, Broadcast(block[r * blocks].scale));
      sums[r][0] = Fma(ToFloat(SumOf(low[r], high[r])), factor, sums[r][0]);
      if (!weight.zeros) continue;
      sums[r][0] = Fma(constants.offset, Broadcast(block[r * blocks].scaled_sum), sums[r][0]);
    }
  }
  EndSums<R, 1>(true, share, 0, group, nullptr, sums);
}

bool RunRegisters(const MatMulInput& input, const MatMulShare& share,
                  const MatMulScratch& scratch) {
  if (input.rows > kRegisterRows || 2 * input.rows * input.k > kTileBytes) return false;
  auto* words = reinterpret_cast<int16_t*>(scratch.tile);
  PutWords(input, words);
  for (int64_t group = share.group_begin; group < share.group_end; ++group) {
    switch (input.rows) {
      case 1:
        RunRegisters<1>(input, share, words, group);
        break;
      case 2:
        RunRegisters<2>(input, share, words, group);
        break;
#ifdef __AVX512F__
      case 3:
        RunRegisters<3>(input, share, words, group);
        break;
      case 4:
        RunRegisters<4>(input, share, words, group);
        break;
#endif
    }
  }
  return true;
}

template <bool kZeros>
void RunTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  const PackedView& weight = share.weight;
  const int64_t unit_blocks = weight.unit / kBlockValues;
  const int64_t unit_bytes = HeaderBytes(weight) + unit_blocks * 256;
  const Tables tables = LoadTables(*weight.integers);
  RunWords<CodebookLayout<kZeros>>(
      input, share, scratch, [&](const uint8_t* group, int64_t block, uint8_t* tile) {
        const uint8_t* unit = group + block / unit_blocks * unit_bytes;
        const uint8_t* codes = unit + HeaderBytes(weight) + block % unit_blocks * 256;
        for (int dword = 0; dword < 4; ++dword) {
          __builtin_prefetch(codes + 64 * dword + kPrefetchBytes);
          UnpackDword(tables, codes + 64 * dword, tile + 256 * dword);
        }
        const UnitConstants constants = ConstantsOf(weight, unit);
        auto* floats = reinterpret_cast<float*>(tile + kWordBytes);
        Store(floats, constants.scale);
        if (kZeros) Store(floats + kLanes, constants.offset);
      });
}

}  // namespace

void MatMulCodebook(const MatMulInput& input, const MatMulShare& share,
                    const MatMulScratch& scratch) {
  if (RunRegisters(input, share, scratch)) return;
  if (share.weight.zeros) {
    RunTiles<true>(input, share, scratch);
  } else {
    RunTiles<false>(input, share, scratch);
  }
}

}  // namespace treadle::TREADLE_ISA
