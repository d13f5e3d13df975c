// Integer dots of 16 features: dword f of a vector is four unsigned codes of feature f, times four
// signed activations that all features share, summed exactly.
//
// VNNI does that in one instruction. AVX2 without it multiplies to pairs of 16 bits, which
// saturate, so codes are split into nibbles where they are wider: a pair of nibble products is at
// most 2 * 15
// * 127, and the eight of a block of 32 values make 30,480. Activations must lie within +-127.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

#ifdef __AVX512F__

// 64 codes. kWide: up to 255, else up to 15.
template <bool kWide>
struct Codes {
  __m512i v;
};
// Four activations, for every feature.
struct Quad {
  __m512i v;
};
// One 32-bit number per feature.
struct Integers {
  __m512i v;
};
// Running sums.
template <bool kWide>
using Dots = Integers;

TREADLE_SIMD Quad LoadQuad(const int8_t* x) {
  int32_t dword;
  __builtin_memcpy(&dword, x, 4);
  return {_mm512_set1_epi32(dword)};
}
template <bool kWide>
TREADLE_SIMD Codes<kWide> LoadCodes(const uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
// The low and the high nibbles of 64 bytes.
TREADLE_SIMD void LoadNibbles(const uint8_t* p, Codes<false>& low, Codes<false>& high) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i packed = _mm512_loadu_si512(p);
  low = {_mm512_and_si512(packed, mask)};
  high = {_mm512_and_si512(_mm512_srli_epi16(packed, 4), mask)};
}
template <bool kWide>
TREADLE_SIMD void StoreCodes(uint8_t* p, Codes<kWide> codes) {
  _mm512_storeu_si512(p, codes.v);
}
// kBits bits of every byte at `plane`, from bit kFrom on, moved to bit kTo; the other bits are 0.
template <int kBits, int kFrom, int kTo>
TREADLE_SIMD Codes<false> LoadBits(const uint8_t* plane) {
  __m512i bits = _mm512_loadu_si512(plane);
  if constexpr (kFrom < kTo) bits = _mm512_slli_epi16(bits, kTo - kFrom);
  if constexpr (kFrom > kTo) bits = _mm512_srli_epi16(bits, kFrom - kTo);
  return {_mm512_and_si512(bits, _mm512_set1_epi8(((1 << kBits) - 1) << kTo))};
}
TREADLE_SIMD Codes<false> Or(Codes<false> a, Codes<false> b) { return {_mm512_or_si512(a.v, b.v)}; }
// Nibbles with kBits more bits on top of each: bit kShift.. of every byte at `plane`.
template <int kBits, int kShift>
TREADLE_SIMD Codes<true> AddUpperBits(Codes<false> nibbles, const uint8_t* plane) {
  return {Or(nibbles, LoadBits<kBits, kShift, 4>(plane)).v};
}
// The bytes of a table of 16 that nibbles choose.
TREADLE_SIMD Codes<true> LookUp(const uint8_t* table, Codes<false> nibbles) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), nibbles.v)};
}
// Dots that begin at -zero * sum: what codes that are stored as code + zero have too much.
template <bool kWide, int kZero>
TREADLE_SIMD Dots<kWide> BeginDots(int32_t sum) {
  if constexpr (kZero == 0) return {_mm512_setzero_si512()};
  return {_mm512_set1_epi32(-kZero * sum)};
}
// sums += unsigned bytes times signed ones, by fours: one instruction, where the compiler adds
// copies to its own name for it.
TREADLE_SIMD void AddBytes(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}
template <bool kWide>
TREADLE_SIMD Integers AddDots(Integers dots, Codes<kWide> codes, Quad x) {
  AddBytes(dots.v, codes.v, x.v);
  return dots;
}
template <bool kWide, int kZero>
TREADLE_SIMD Integers EndDots(Integers dots, int32_t) {
  return dots;
}
// 128 * high + low.
TREADLE_SIMD Integers Join(Integers high, Integers low) {
  return {_mm512_add_epi32(_mm512_slli_epi32(high.v, 7), low.v)};
}
TREADLE_SIMD Vec ToFloat(Integers x) { return {_mm512_cvtepi32_ps(x.v)}; }

#else

template <bool kWide>
struct Codes {
  __m256i lo, hi;  // of features 0-7, 8-15
};
struct Quad {
  __m256i v;
};
struct Integers {
  __m256i lo, hi;
};
#ifdef __AVXVNNI__
template <bool kWide>
using Dots = Integers;
#else
template <bool kWide>
struct Dots {
  __m256i lo, hi;  // pairs of 16-bit sums
};
template <>
struct Codes<true> {
  __m256i lo, hi;              // low nibbles
  __m256i upper_lo, upper_hi;  // high nibbles
};
template <>
struct Dots<true> {
  __m256i lo, hi;
  __m256i upper_lo, upper_hi;
};
#endif

TREADLE_SIMD __m256i LoadBytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
TREADLE_SIMD void StoreBytes(uint8_t* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
TREADLE_SIMD __m256i LowNibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
TREADLE_SIMD __m256i HighNibbles(__m256i x) { return LowNibbles(_mm256_srli_epi16(x, 4)); }

TREADLE_SIMD Quad LoadQuad(const int8_t* x) {
  int32_t dword;
  __builtin_memcpy(&dword, x, 4);
  return {_mm256_set1_epi32(dword)};
}
template <bool kWide>
TREADLE_SIMD Codes<kWide> LoadCodes(const uint8_t* p) {
  const __m256i lo = LoadBytes(p);
  const __m256i hi = LoadBytes(p + 32);
  if constexpr (kWide && !TREADLE_BYTE_DOTS) {
    return {LowNibbles(lo), LowNibbles(hi), HighNibbles(lo), HighNibbles(hi)};
  } else {
    return {lo, hi};
  }
}
TREADLE_SIMD void LoadNibbles(const uint8_t* p, Codes<false>& low, Codes<false>& high) {
  const __m256i lo = LoadBytes(p);
  const __m256i hi = LoadBytes(p + 32);
  low = {LowNibbles(lo), LowNibbles(hi)};
  high = {HighNibbles(lo), HighNibbles(hi)};
}
// Codes as bytes.
template <bool kWide>
TREADLE_SIMD Codes<false> BytesOf(Codes<kWide> codes) {
  if constexpr (kWide && !TREADLE_BYTE_DOTS) {
    return {_mm256_or_si256(codes.lo, _mm256_slli_epi16(codes.upper_lo, 4)),
            _mm256_or_si256(codes.hi, _mm256_slli_epi16(codes.upper_hi, 4))};
  } else {
    return {codes.lo, codes.hi};
  }
}
template <bool kWide>
TREADLE_SIMD void StoreCodes(uint8_t* p, Codes<kWide> codes) {
  const Codes<false> bytes = BytesOf(codes);
  StoreBytes(p, bytes.lo);
  StoreBytes(p + 32, bytes.hi);
}
template <int kBits, int kFrom, int kTo>
TREADLE_SIMD Codes<false> LoadBits(const uint8_t* plane) {
  const auto bits = [](const uint8_t* p) {
    __m256i moved = LoadBytes(p);
    if constexpr (kFrom < kTo) moved = _mm256_slli_epi16(moved, kTo - kFrom);
    if constexpr (kFrom > kTo) moved = _mm256_srli_epi16(moved, kFrom - kTo);
    return _mm256_and_si256(moved, _mm256_set1_epi8(((1 << kBits) - 1) << kTo));
  };
  return {bits(plane), bits(plane + 32)};
}
TREADLE_SIMD Codes<false> Or(Codes<false> a, Codes<false> b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
TREADLE_SIMD Codes<false> ShuffleCodes(__m256i table, Codes<false> nibbles) {
  return {_mm256_shuffle_epi8(table, nibbles.lo), _mm256_shuffle_epi8(table, nibbles.hi)};
}
TREADLE_SIMD __m256i BroadcastTable(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

#ifdef __AVXVNNI__

template <int kBits, int kShift>
TREADLE_SIMD Codes<true> AddUpperBits(Codes<false> nibbles, const uint8_t* plane) {
  const Codes<false> codes = Or(nibbles, LoadBits<kBits, kShift, 4>(plane));
  return {codes.lo, codes.hi};
}
TREADLE_SIMD Codes<true> LookUp(const uint8_t* table, Codes<false> nibbles) {
  const Codes<false> codes = ShuffleCodes(BroadcastTable(table), nibbles);
  return {codes.lo, codes.hi};
}
template <bool kWide, int kZero>
TREADLE_SIMD Dots<kWide> BeginDots(int32_t sum) {
  const __m256i begin = _mm256_set1_epi32(-kZero * sum);
  return {begin, begin};
}
template <bool kWide>
TREADLE_SIMD Integers AddDots(Integers dots, Codes<kWide> codes, Quad x) {
  return {_mm256_dpbusd_avx_epi32(dots.lo, codes.lo, x.v),
          _mm256_dpbusd_avx_epi32(dots.hi, codes.hi, x.v)};
}
template <bool kWide, int kZero>
TREADLE_SIMD Integers EndDots(Integers dots, int32_t) {
  return dots;
}

#else

template <int kBits, int kShift>
TREADLE_SIMD Codes<true> AddUpperBits(Codes<false> nibbles, const uint8_t* plane) {
  const Codes<false> upper = LoadBits<kBits, kShift, 0>(plane);
  return {nibbles.lo, nibbles.hi, upper.lo, upper.hi};
}
TREADLE_SIMD Codes<true> LookUp(const uint8_t* table, Codes<false> nibbles) {
  const __m256i values = BroadcastTable(table);
  const Codes<false> low = ShuffleCodes(LowNibbles(values), nibbles);
  const Codes<false> high = ShuffleCodes(HighNibbles(values), nibbles);
  return {low.lo, low.hi, high.lo, high.hi};
}
template <bool kWide, int kZero>
TREADLE_SIMD Dots<kWide> BeginDots(int32_t) {
  Dots<kWide> dots;
  dots.lo = dots.hi = _mm256_setzero_si256();
  if constexpr (kWide) dots.upper_lo = dots.upper_hi = _mm256_setzero_si256();
  return dots;
}
TREADLE_SIMD __m256i AddPairs(__m256i sums, __m256i codes, Quad x) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x.v));
}
template <bool kWide>
TREADLE_SIMD Dots<kWide> AddDots(Dots<kWide> dots, Codes<kWide> codes, Quad x) {
  dots.lo = AddPairs(dots.lo, codes.lo, x);
  dots.hi = AddPairs(dots.hi, codes.hi, x);
  if constexpr (kWide) {
    dots.upper_lo = AddPairs(dots.upper_lo, codes.upper_lo, x);
    dots.upper_hi = AddPairs(dots.upper_hi, codes.upper_hi, x);
  }
  return dots;
}
template <bool kWide, int kZero>
TREADLE_SIMD Integers EndDots(Dots<kWide> dots, int32_t sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i lo = _mm256_madd_epi16(dots.lo, ones);
  __m256i hi = _mm256_madd_epi16(dots.hi, ones);
  if constexpr (kWide) {
    const __m256i sixteens = _mm256_set1_epi16(16);
    lo = _mm256_add_epi32(lo, _mm256_madd_epi16(dots.upper_lo, sixteens));
    hi = _mm256_add_epi32(hi, _mm256_madd_epi16(dots.upper_hi, sixteens));
  }
  if constexpr (kZero != 0) {
    const __m256i excess = _mm256_set1_epi32(kZero * sum);
    lo = _mm256_sub_epi32(lo, excess);
    hi = _mm256_sub_epi32(hi, excess);
  }
  return {lo, hi};
}

#endif

TREADLE_SIMD Integers Join(Integers high, Integers low) {
  return {_mm256_add_epi32(_mm256_slli_epi32(high.lo, 7), low.lo),
          _mm256_add_epi32(_mm256_slli_epi32(high.hi, 7), low.hi)};
}
TREADLE_SIMD Vec ToFloat(Integers x) {
  return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)};
}

#endif

}  // namespace
}  // namespace treadle::TREADLE_ISA
