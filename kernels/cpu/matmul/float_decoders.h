// Decoding of dense weights and of those with a codebook to floats: w = scale * codebook[code], or
// scale * (codebook[code] - zero), every operation rounded once.
//
// For sources that are compiled once per instruction set (see simd.h). Each decoder takes kStep
// values of k of 16 features from kStepBytes bytes of the layouts of matmul_kernels.h. Ones with
// scales (kScaled) work in units that share them.
#pragma once

#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// The constants that the values of a unit share.
struct Constants {
  Vec scale, zero;
};
template <bool kZeros>
TREADLE_SIMD Vec Scaled(const Constants& constants, Vec value) {
  return Mul(constants.scale, kZeros ? Sub(value, constants.zero) : value);
}

// Common parts of decoders of codes with scales.
template <int kValues, bool kHasZeros>
struct ScaledDecoder {
  static constexpr bool kScaled = true, kZeros = kHasZeros;
  static constexpr int kStep = kValues;
  static constexpr int64_t kStepBytes = 64;
};

// Where the nibble of value i of 8 begins in its dword.
TREADLE_SIMD constexpr int NibbleShift(int i) { return i % 4 * 8 + i / 4 * 4; }

#ifdef __AVX512F__

// Lane f: byte `byte` of dword f, as a float.
TREADLE_SIMD Vec ByteLane(const uint8_t* dwords, int byte) {
  const auto v = reinterpret_cast<__v16su>(_mm512_loadu_si512(dwords));
  return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>((v >> (8 * byte)) & 255u))};
}

template <bool kHasZeros>
struct Codes4 : ScaledDecoder<8, kHasZeros> {
  __m512 table;

  TREADLE_SIMD explicit Codes4(const float* codebook) : table(_mm512_loadu_ps(codebook)) {}
  // The permutation looks at the low four bits of a lane only.
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[8]) const {
    const auto dwords = reinterpret_cast<__v16su>(_mm512_loadu_si512(p));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const auto code = reinterpret_cast<__m512i>(dwords >> NibbleShift(i));
      w[i] = Scaled<kHasZeros>(constants, {_mm512_permutexvar_ps(code, table)});
    }
  }
};

template <bool kHasZeros>
struct Codes8 : ScaledDecoder<4, kHasZeros> {
  const float* table;

  TREADLE_SIMD explicit Codes8(const float* codebook) : table(codebook) {}
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[4]) const {
    const auto dwords = reinterpret_cast<__v16su>(_mm512_loadu_si512(p));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto code = reinterpret_cast<__m512i>((dwords >> (8 * i)) & 255u);
      w[i] = Scaled<kHasZeros>(constants, {_mm512_i32gather_ps(code, table, 4)});
    }
  }
};

// E4M3 / 256 of four consecutive k. The fp16 numbers of even k, and those of odd k, lie in pairs.
TREADLE_SIMD void FromE4M3(const uint8_t* p, Vec (&w)[4]) {
  const __m512i bytes = _mm512_loadu_si512(p);
  const __m512i first = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(1));
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i upper = odd == 0 ? _mm512_slli_epi16(bytes, 8) : bytes;
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(upper, 1),
                                            _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    w[odd] = {_mm512_permutex2var_ps(low, first, high)};
    w[odd + 2] = {_mm512_permutex2var_ps(low, second, high)};
  }
}

#else

TREADLE_SIMD Vec ByteLane(const uint8_t* dwords, int byte) {
  const auto lane = [byte](const uint8_t* p) {
    const auto v =
        reinterpret_cast<__v8su>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>((v >> (8 * byte)) & 255u));
  };
  return {lane(dwords), lane(dwords + 32)};
}

template <bool kHasZeros>
struct Codes4 : ScaledDecoder<8, kHasZeros> {
  __m256 low, high;

  TREADLE_SIMD explicit Codes4(const float* codebook)
      : low(_mm256_loadu_ps(codebook)), high(_mm256_loadu_ps(codebook + 8)) {}
  // The permutations look at the low three bits of a lane; the fourth, as its sign, picks one.
  TREADLE_SIMD __m256 Look(__v8su dwords, int shift) const {
    const auto code = reinterpret_cast<__m256i>(dwords >> shift);
    const auto pick = reinterpret_cast<__m256>(dwords << (28 - shift));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                            _mm256_permutevar8x32_ps(high, code), pick);
  }
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[8]) const {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    const auto lo = reinterpret_cast<__v8su>(_mm256_loadu_si256(halves));
    const auto hi = reinterpret_cast<__v8su>(_mm256_loadu_si256(halves + 1));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      w[i] = Scaled<kHasZeros>(constants, {Look(lo, NibbleShift(i)), Look(hi, NibbleShift(i))});
    }
  }
};

template <bool kHasZeros>
struct Codes8 : ScaledDecoder<4, kHasZeros> {
  const float* table;

  TREADLE_SIMD explicit Codes8(const float* codebook) : table(codebook) {}
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[4]) const {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    const auto lo = reinterpret_cast<__v8su>(_mm256_loadu_si256(halves));
    const auto hi = reinterpret_cast<__v8su>(_mm256_loadu_si256(halves + 1));
    const auto look = [this](__v8su dwords, int shift) {
      const auto code = reinterpret_cast<__m256i>((dwords >> shift) & 255u);
      return _mm256_i32gather_ps(table, code, 4);
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      w[i] = Scaled<kHasZeros>(constants, {look(lo, 8 * i), look(hi, 8 * i)});
  }
};

// E4M3 / 256 of four consecutive k. The fp16 numbers of even k, and those of odd k, lie in pairs.
TREADLE_SIMD void FromE4M3(const uint8_t* p, Vec (&w)[4]) {
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    __m256 first[2], second[2];  // of features 0-7, 8-15
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
      const __m256i upper = odd == 0 ? _mm256_slli_epi16(bytes, 8) : bytes;
      const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(upper, 1),
                                              _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
      const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
      const auto ordered = [](__m256 x) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
      };
      first[half] = ordered(_mm256_shuffle_ps(low, high, 0x88));
      second[half] = ordered(_mm256_shuffle_ps(low, high, 0xdd));
    }
    w[odd] = {first[0], first[1]};
    w[odd + 2] = {second[0], second[1]};
  }
}

#endif

// A codebook whose values are the codes: no need to look them up.
template <bool kHasZeros>
struct Integers8 : ScaledDecoder<4, kHasZeros> {
  TREADLE_SIMD explicit Integers8(const float*) {}
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[4]) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) w[i] = Scaled<kHasZeros>(constants, ByteLane(p, i));
  }
};

// E4M3's bits are those of an fp16 number that is 256 times smaller, subnormal numbers included:
// the conversion is exact and their cost is that of others. The scale holds the 256.
struct E4M3 : ScaledDecoder<4, false> {
  TREADLE_SIMD explicit E4M3(const float*) {}
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants& constants, Vec (&w)[4]) const {
    FromE4M3(p, w);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) w[i] = Mul(constants.scale, w[i]);
  }
};

// kF32, kF16 or kBF16.
template <PackKind kKind>
struct Dense {
  static constexpr bool kScaled = false, kZeros = false;
  static constexpr int kStep = 1;
  static constexpr int64_t kStepBytes = kKind == PackKind::kF32 ? 64 : 32;
  TREADLE_SIMD explicit Dense(const float*) {}
  TREADLE_SIMD void Decode(const uint8_t* p, const Constants&, Vec (&w)[1]) const {
    const auto* halves = reinterpret_cast<const uint16_t*>(p);
    if constexpr (kKind == PackKind::kF32) {
      w[0] = Load(reinterpret_cast<const float*>(p));
    } else {
      w[0] = kKind == PackKind::kF16 ? Load(halves) : LoadBFloat16(halves);
    }
  }
};

// Bytes of a unit: its scales and zeros, and all of it.
template <typename Decoder>
constexpr int64_t kUnitHeader = Decoder::kScaled ? 4 * kLanes*(Decoder::kZeros ? 2 : 1) : 0;
template <typename Decoder>
TREADLE_SIMD int64_t UnitBytes(int64_t values) {
  return kUnitHeader<Decoder> + values / Decoder::kStep * Decoder::kStepBytes;
}
template <typename Decoder>
TREADLE_SIMD Constants LoadConstants(const uint8_t* unit) {
  const auto* floats = reinterpret_cast<const float*>(unit);
  return {Load(floats), Decoder::kZeros ? Load(floats + kLanes) : Zero()};
}

// w[from, from + count) of a group as [count][16] floats. For weights with scales, from and count
// are multiples of 32.
template <typename Decoder>
inline void DecodeUnits(const PackedView& weight, const uint8_t* group, int64_t from, int64_t count,
                        float* tile) {
  const Decoder decoder(weight.codebook);
  const int64_t values = Decoder::kScaled ? weight.unit : weight.k;
  const int64_t end = from + count;
  for (int64_t k = from; k < end;) {
    const int64_t unit = k / values;
    const int64_t unit_end = (unit + 1) * values;
    const uint8_t* p = group + unit * UnitBytes<Decoder>(values);
    Constants constants = {};
    if constexpr (Decoder::kScaled) constants = LoadConstants<Decoder>(p);
    p += kUnitHeader<Decoder> + (k - unit * values) / Decoder::kStep * Decoder::kStepBytes;
    const int64_t stop = unit_end < end ? unit_end : end;
    for (; k < stop; k += Decoder::kStep, p += Decoder::kStepBytes) {
      Vec w[Decoder::kStep];
      decoder.Decode(p, constants, w);
#pragma GCC unroll 8
      for (int i = 0; i < Decoder::kStep; ++i) Store(tile + i * kLanes, w[i]);
      tile += Decoder::kStep * kLanes;
    }
  }
}

// Calls body.template operator()<Decoder>() with the decoder of `weight`; false if it has none.
template <typename Body>
inline bool WithDecoder(const PackedView& weight, Body body) {
  const auto with_zeros = [&]<template <bool> typename Decoder>() {
    weight.zeros ? body.template operator()<Decoder<true>>()
                 : body.template operator()<Decoder<false>>();
    return true;
  };
  switch (weight.kind) {
    case PackKind::kF32:
      return body.template operator()<Dense<PackKind::kF32>>(), true;
    case PackKind::kF16:
      return body.template operator()<Dense<PackKind::kF16>>(), true;
    case PackKind::kBF16:
      return body.template operator()<Dense<PackKind::kBF16>>(), true;
    case PackKind::kCodes4:
      return with_zeros.template operator()<Codes4>();
    case PackKind::kCodes8:
      return with_zeros.template operator()<Codes8>();
    case PackKind::kIntegers8:
      return with_zeros.template operator()<Integers8>();
    case PackKind::kE4M3:
      return body.template operator()<E4M3>(), true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
