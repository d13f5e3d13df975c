// Codes of apart formats as the 16-bit integers that ComputeMode::kInt16 multiplies
// (cpu_backend.h): the codebook rounded (IntegerCodebook in matmul_kernels.h).
//
// For sources that are compiled once per instruction set (see simd.h). A decoder unpacks a block of
// 32 k of 16 features, kBlockBytes, in kSteps steps: Decode(block, step, words) makes kFours times
// four consecutive k.
#pragma once

#include "kernels/cpu/matmul/int8_lanes.h"
#include "kernels/cpu/matmul/matmul_kernels.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kLineBytes = 64;

// E4M3 in eighths: c = floor(8 * value + 1/2) = (8 + m) * 2^(e - 7), rounded, where the code is
// sign, e, m; for no e below 3 is that anything but 0, so subnormal numbers need no other way. The
// factors are (8 + m) << 9 and +-2^(e - 1), of which the upper half is taken, rounded.
constexpr int kE4M3MantissaShift = 9;
constexpr int kE4M3Mantissa = 7 << kE4M3MantissaShift;
constexpr int kE4M3One = 8 << kE4M3MantissaShift;
constexpr float kE4M3Step = 0x1p-11f;  // an eighth of the packed scale's 256th

// Common parts of decoders of bytes, and of those of nibbles.
struct ByteDecoder {
  static constexpr int kSteps = 8, kFours = 1;
  static constexpr int64_t kBlockBytes = 512;
  TREADLE_SIMD static float Step(const PackedView& weight) { return weight.integers->step; }
};
struct NibbleDecoder {
  static constexpr int kSteps = 4, kFours = 2;
  static constexpr int64_t kBlockBytes = 256;
  TREADLE_SIMD static float Step(const PackedView& weight) { return weight.integers->step; }
};

#ifdef __AVX512F__

// Four consecutive k as dwords of two words each: the even two, the odd two.
struct Words {
  __m512i even, odd;
};
TREADLE_SIMD void StoreWords(uint8_t* tile, Words words) {
  _mm512_storeu_si512(tile, words.even);
  _mm512_storeu_si512(tile + 64, words.odd);
}
// The words of bytes.
TREADLE_SIMD Words WordsOf(Codes<true> codes) {
  return {_mm512_and_si512(codes.v, _mm512_set1_epi16(255)), _mm512_srli_epi16(codes.v, 8)};
}
TREADLE_SIMD Words WordsOf(Codes<false> codes) { return WordsOf(Codes<true>{codes.v}); }
TREADLE_SIMD Words LoadWords(const uint8_t* p) { return WordsOf(LoadCodes<true>(p)); }

TREADLE_SIMD Integers BroadcastWords(int32_t x) { return {_mm512_set1_epi32(x)}; }
// sums + the products of two words of every feature, all of `codes`, and two activations.
TREADLE_SIMD Integers AddWords(Integers sums, __m512i codes, Quad x) {
  return {_mm512_dpwssd_epi32(sums.v, codes, x.v)};
}
TREADLE_SIMD Integers AddWords(Integers sums, const uint8_t* codes, Quad x) {
  return AddWords(sums, _mm512_loadu_si512(codes), x);
}
// The same, of the two activations at x: one instruction, where the compiler would make two.
TREADLE_SIMD Integers AddWords(Integers sums, __m512i codes, const int8_t* x) {
  struct Two {
    int8_t bytes[4];
  };
  asm("vpdpwssd %2%{1to16%}, %1, %0"
      : "+v"(sums.v)
      : "v"(codes), "m"(*reinterpret_cast<const Two*>(x)));
  return sums;
}
TREADLE_SIMD Integers AddIntegers(Integers a, Integers b) { return {_mm512_add_epi32(a.v, b.v)}; }

// Permutations of words look at as many low bits of a word as they have to.

// Nibbles.
struct NibbleWords : NibbleDecoder {
  __m512i table;  // twice: the fifth bit is the next nibble's

  TREADLE_SIMD explicit NibbleWords(const PackedView& weight)
      : table(_mm512_broadcast_i64x4(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight.integers->codes)))) {}
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const __m512i packed = _mm512_loadu_si512(block + step * kLineBytes);
    const auto look = [&](int shift) {
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, shift), table);
    };
    words[0] = {_mm512_permutexvar_epi16(packed, table), look(8)};
    words[1] = {look(4), look(12)};
  }
};

// Codes of kBits bits, at most 7, in bytes.
template <int kBits>
struct TableWords : ByteDecoder {
  static constexpr int kTables = 1 << (kBits - 5);
  __m512i tables[kTables];

  TREADLE_SIMD explicit TableWords(const PackedView& weight) {
    for (int i = 0; i < kTables; ++i)
      tables[i] = _mm512_loadu_si512(weight.integers->codes + 32 * i);
  }
  // `words` hold codes in their low bits; those of bit `bit` of `all` lie in the upper tables.
  TREADLE_SIMD __m512i Look(__m512i words, __m512i all, int bit) const {
    if constexpr (kTables == 1) return _mm512_permutexvar_epi16(words, tables[0]);
    const auto pair = [&](int i) {
      return _mm512_permutex2var_epi16(tables[i], words, tables[i + 1]);
    };
    if constexpr (kTables == 2) return pair(0);
    const __mmask32 upper =
        _mm512_test_epi16_mask(all, _mm512_set1_epi16(static_cast<int16_t>(1 << bit)));
    return _mm512_mask_blend_epi16(upper, pair(0), pair(2));
  }
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const __m512i bytes = _mm512_loadu_si512(block + step * kLineBytes);
    words[0] = {Look(bytes, bytes, 6), Look(_mm512_srli_epi16(bytes, 8), bytes, 14)};
  }
};

// The same of 8 bits, where the processor permutes bytes (VBMI, which the rest of these sources do
// without): half the permutations.
struct ByteTables : ByteDecoder {
  __m512i low[4], high[4];  // bytes of 64 integers each

  TREADLE_SIMD explicit ByteTables(const PackedView& weight) {
    alignas(64) uint8_t bytes[2][256];
    for (int i = 0; i < 256; ++i) {
      bytes[0][i] = static_cast<uint8_t>(weight.integers->codes[i] & 255);
      bytes[1][i] = static_cast<uint8_t>(weight.integers->codes[i] >> 8 & 255);
    }
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm512_load_si512(bytes[0] + 64 * i);
      high[i] = _mm512_load_si512(bytes[1] + 64 * i);
    }
  }
  TREADLE_SIMD static __m512i Look(const __m512i (&tables)[4], __m512i bytes, __mmask64 upper) {
    const auto pair = [bytes](__m512i first, __m512i second) {
      __m512i looked = bytes;
      asm("vpermi2b %2, %1, %0" : "+v"(looked) : "v"(first), "v"(second));
      return looked;
    };
    return _mm512_mask_blend_epi8(upper, pair(tables[0], tables[1]), pair(tables[2], tables[3]));
  }
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const __m512i bytes = _mm512_loadu_si512(block + step * kLineBytes);
    const __mmask64 upper = _mm512_movepi8_mask(bytes);
    const __m512i low_bytes = Look(low, bytes, upper);
    const __m512i high_bytes = Look(high, bytes, upper);
    const __m512i pick = _mm512_set1_epi16(255);  // bit by bit: pick ? first : second
    words[0] = {_mm512_ternarylogic_epi32(pick, low_bytes, _mm512_slli_epi16(high_bytes, 8), 0xca),
                _mm512_ternarylogic_epi32(pick, _mm512_srli_epi16(low_bytes, 8), high_bytes, 0xca)};
  }
};

struct E4M3Words : ByteDecoder {
  __m512i powers;  // of sign and e

  TREADLE_SIMD static float Step(const PackedView&) { return kE4M3Step; }
  TREADLE_SIMD explicit E4M3Words(const PackedView&) {
    alignas(64) int16_t values[32];
    for (int e = 0; e < 16; ++e) {
      values[e] = static_cast<int16_t>(1 << (e > 0 ? e - 1 : 0));
      values[e + 16] = static_cast<int16_t>(-values[e]);
    }
    powers = _mm512_load_si512(values);
  }
  // mantissas: m in its place, and anything in other bits.
  TREADLE_SIMD static __m512i Product(__m512i mantissas, __m512i power) {
    // Bit by bit: (mantissas & first) | second.
    const __m512i mantissa = _mm512_ternarylogic_epi32(mantissas, _mm512_set1_epi16(kE4M3Mantissa),
                                                       _mm512_set1_epi16(kE4M3One), 0xea);
    return _mm512_mulhrs_epi16(mantissa, power);
  }
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const __m512i bytes = _mm512_loadu_si512(block + step * kLineBytes);
    const auto power = [&](int shift) {
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, shift), powers);
    };
    words[0] = {Product(_mm512_slli_epi16(bytes, kE4M3MantissaShift), power(3)),
                Product(_mm512_slli_epi16(bytes, kE4M3MantissaShift - 8), power(11))};
  }
};

// Integers of 13 bits (kWords): the thirteenth is the sign.
struct PackedWords : ByteDecoder {
  static constexpr int64_t kBlockBytes = kPackedWordBytes;
  TREADLE_SIMD explicit PackedWords(const PackedView&) {}
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const __m512i low = _mm512_loadu_si512(block + step * kLineBytes);
    __m512i nibbles = _mm512_loadu_si512(block + kPackedNibblesAt + step / 2 * kLineBytes);
    if (step % 2 == 1) nibbles = _mm512_srli_epi16(nibbles, 4);
    __m512i bits = _mm512_loadu_si512(block + kPackedSignsAt);
    bits = step < 4 ? _mm512_slli_epi16(bits, 4 - step) : _mm512_srli_epi16(bits, step - 4);
    const __m512i high = _mm512_sub_epi8(_mm512_and_si512(nibbles, _mm512_set1_epi8(15)),
                                         _mm512_and_si512(bits, _mm512_set1_epi8(16)));
    words[0] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }
};

#else

// Four consecutive k as dwords of two words each: the even two, the odd two; of features 0-7 and
// 8-15.
struct Words {
  __m256i even[2], odd[2];
};
TREADLE_SIMD void StoreWords(uint8_t* tile, const Words& words) {
  for (int half = 0; half < 2; ++half) {
    StoreBytes(tile + 32 * half, words.even[half]);
    StoreBytes(tile + 64 + 32 * half, words.odd[half]);
  }
}
// The words of bytes.
TREADLE_SIMD Words WordsOf(__m256i lo, __m256i hi) {
  const __m256i low_bytes = _mm256_set1_epi16(255);
  return {{_mm256_and_si256(lo, low_bytes), _mm256_and_si256(hi, low_bytes)},
          {_mm256_srli_epi16(lo, 8), _mm256_srli_epi16(hi, 8)}};
}
TREADLE_SIMD Words LoadWords(const uint8_t* p) { return WordsOf(LoadBytes(p), LoadBytes(p + 32)); }
template <bool kWide>
TREADLE_SIMD Words WordsOf(Codes<kWide> codes) {
  const Codes<false> bytes = BytesOf(codes);
  return WordsOf(bytes.lo, bytes.hi);
}

TREADLE_SIMD Integers BroadcastWords(int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
// sums + the products of two words of every feature, all of `codes`, and two activations.
TREADLE_SIMD Integers AddWords(Integers sums, const __m256i (&codes)[2], Quad x) {
  return {AddWordPairs(sums.lo, codes[0], x.v), AddWordPairs(sums.hi, codes[1], x.v)};
}
TREADLE_SIMD Integers AddWords(Integers sums, const uint8_t* codes, Quad x) {
  return {AddWordPairs(sums.lo, LoadBytes(codes), x.v),
          AddWordPairs(sums.hi, LoadBytes(codes + 32), x.v)};
}
TREADLE_SIMD Integers AddWords(Integers sums, const __m256i (&codes)[2], const int8_t* x) {
  return AddWords(sums, codes, LoadQuad(x));
}
TREADLE_SIMD Integers AddIntegers(Integers a, Integers b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
// Words of which `low` and `high` hold the bytes: those of the even k, or of the odd k.
TREADLE_SIMD __m256i JoinEven(__m256i low, __m256i high) {
  return _mm256_blendv_epi8(_mm256_slli_epi16(high, 8), low, _mm256_set1_epi16(255));
}
TREADLE_SIMD __m256i JoinOdd(__m256i low, __m256i high) {
  return _mm256_blendv_epi8(high, _mm256_srli_epi16(low, 8), _mm256_set1_epi16(255));
}

// The low or the high bytes of 16 integers, in both halves.
TREADLE_SIMD __m256i LoadTable(const int16_t* codes, bool high) {
  const auto eight = [=](const int16_t* p) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return high ? _mm_srli_epi16(words, 8) : _mm_and_si128(words, _mm_set1_epi16(255));
  };
  return _mm256_broadcastsi128_si256(_mm_packus_epi16(eight(codes), eight(codes + 8)));
}

struct NibbleWords : NibbleDecoder {
  __m256i low, high;

  TREADLE_SIMD explicit NibbleWords(const PackedView& weight)
      : low(LoadTable(weight.integers->codes, false)),
        high(LoadTable(weight.integers->codes, true)) {}
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const uint8_t* line = block + step * kLineBytes;
    for (int half = 0; half < 2; ++half) {
      const __m256i packed = LoadBytes(line + 32 * half);
      for (int i = 0; i < kFours; ++i) {
        const __m256i nibbles = i == 0 ? LowNibbles(packed) : HighNibbles(packed);
        const __m256i low_bytes = _mm256_shuffle_epi8(low, nibbles);
        const __m256i high_bytes = _mm256_shuffle_epi8(high, nibbles);
        words[i].even[half] = JoinEven(low_bytes, high_bytes);
        words[i].odd[half] = JoinOdd(low_bytes, high_bytes);
      }
    }
  }
};

// Codes of kBits bits, at most 6, in bytes. What lies between the tables of 16 codes is their
// difference, to be added (without carries) for codes that are not below the second: a shuffle by a
// negative index gives 0.
template <int kBits>
struct TableWords : ByteDecoder {
  static constexpr int kTables = 1 << (kBits - 4);
  __m256i low[kTables], high[kTables];

  TREADLE_SIMD explicit TableWords(const PackedView& weight) {
    const int16_t* codes = weight.integers->codes;
    for (int i = 0; i < kTables; ++i) {
      low[i] = LoadTable(codes + 16 * i, false);
      high[i] = LoadTable(codes + 16 * i, true);
    }
    for (int i = kTables - 1; i > 0; --i) {
      low[i] = _mm256_xor_si256(low[i], low[i - 1]);
      high[i] = _mm256_xor_si256(high[i], high[i - 1]);
    }
  }
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const uint8_t* line = block + step * kLineBytes;
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = LoadBytes(line + 32 * half);
      __m256i low_bytes = _mm256_shuffle_epi8(low[0], bytes);
      __m256i high_bytes = _mm256_shuffle_epi8(high[0], bytes);
#pragma GCC unroll 4
      for (int i = 1; i < kTables; ++i) {
        const __m256i index = _mm256_sub_epi8(bytes, _mm256_set1_epi8(static_cast<char>(16 * i)));
        low_bytes = _mm256_xor_si256(low_bytes, _mm256_shuffle_epi8(low[i], index));
        high_bytes = _mm256_xor_si256(high_bytes, _mm256_shuffle_epi8(high[i], index));
      }
      words[0].even[half] = JoinEven(low_bytes, high_bytes);
      words[0].odd[half] = JoinOdd(low_bytes, high_bytes);
    }
  }
};

struct E4M3Words : ByteDecoder {
  __m256i low, high;  // bytes of the powers of e

  TREADLE_SIMD static float Step(const PackedView&) { return kE4M3Step; }
  TREADLE_SIMD explicit E4M3Words(const PackedView&) {
    alignas(32) int16_t values[16];
    for (int e = 0; e < 16; ++e) values[e] = static_cast<int16_t>(1 << (e > 0 ? e - 1 : 0));
    low = LoadTable(values, false);
    high = LoadTable(values, true);
  }
  // Mantissas and signs lie in their places, and anything in other bits.
  TREADLE_SIMD static __m256i Product(__m256i mantissas, __m256i power, __m256i signs) {
    const __m256i mantissa = _mm256_or_si256(
        _mm256_and_si256(mantissas, _mm256_set1_epi16(kE4M3Mantissa)), _mm256_set1_epi16(kE4M3One));
    return _mm256_mulhrs_epi16(mantissa, _mm256_sign_epi16(power, signs));
  }
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    const uint8_t* line = block + step * kLineBytes;
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = LoadBytes(line + 32 * half);
      const __m256i e = LowNibbles(_mm256_srli_epi16(bytes, 3));
      const __m256i low_bytes = _mm256_shuffle_epi8(low, e);
      const __m256i high_bytes = _mm256_shuffle_epi8(high, e);
      words[0].even[half] = Product(_mm256_slli_epi16(bytes, kE4M3MantissaShift),
                                    JoinEven(low_bytes, high_bytes), _mm256_slli_epi16(bytes, 8));
      words[0].odd[half] = Product(_mm256_slli_epi16(bytes, kE4M3MantissaShift - 8),
                                   JoinOdd(low_bytes, high_bytes), bytes);
    }
  }
};

// Integers of 13 bits (kWords): the thirteenth is the sign.
struct PackedWords : ByteDecoder {
  static constexpr int64_t kBlockBytes = kPackedWordBytes;
  TREADLE_SIMD explicit PackedWords(const PackedView&) {}
  TREADLE_SIMD void Decode(const uint8_t* block, int step, Words (&words)[kFours]) const {
    for (int half = 0; half < 2; ++half, block += 32) {
      const __m256i low = LoadBytes(block + step * kLineBytes);
      const __m256i packed = LoadBytes(block + kPackedNibblesAt + step / 2 * kLineBytes);
      const __m256i nibbles = step % 2 == 0 ? LowNibbles(packed) : HighNibbles(packed);
      __m256i bits = LoadBytes(block + kPackedSignsAt);
      bits = step < 4 ? _mm256_slli_epi16(bits, 4 - step) : _mm256_srli_epi16(bits, step - 4);
      bits = _mm256_and_si256(bits, _mm256_set1_epi8(16));
      const __m256i high = _mm256_sub_epi8(nibbles, bits);
      words[0].even[half] = _mm256_unpacklo_epi8(low, high);
      words[0].odd[half] = _mm256_unpackhi_epi8(low, high);
    }
  }
};

#endif

}  // namespace
}  // namespace treadle::TREADLE_ISA
