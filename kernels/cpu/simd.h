// Sixteen float lanes with one meaning on every instruction set: one __m512, or two __m256.
//
// For sources that are compiled once per instruction set (TREADLE_ISA is avx2, avxvnni or avx512)
// and for nothing else. Every operation rounds lane by lane as IEEE 754 says and every horizontal
// one has one order, so AVX2 and AVX-512 give equal bits (docs/design.md, Numerics).
//
// Linkage: everything here, and everything in those sources that is not a named kernel, is
// internal, and they use no std templates: otherwise the linker could keep an AVX-512 copy of an
// inline function for a machine that has only AVX2.
#pragma once

// GCC 12 takes the deliberately undefined operands inside these intrinsics for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace treadle::TREADLE_ISA {
namespace {

inline constexpr int64_t kLanes = 16;
inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kMaxHalf = 65504.0f;

#define TREADLE_SIMD inline __attribute__((always_inline))
// For functions around one hot loop: inlined into each other they run out of registers.
#define TREADLE_LOOP __attribute__((noinline))

// Fetch the 64 bytes around p: into the L1 cache for what is read next, into L2 for what is read
// later. More than L1 holds on its way would only push out what is read now, and loads wait behind.
TREADLE_SIMD void FetchSoon(const void* p) { __builtin_prefetch(p); }
TREADLE_SIMD void FetchLater(const void* p) { __builtin_prefetch(p, 0, 2); }

// Whether there are dots of bytes (VNNI).
#if defined(__AVX512F__) || defined(__AVXVNNI__)
#define TREADLE_BYTE_DOTS 1
#else
#define TREADLE_BYTE_DOTS 0
#endif

#ifdef __AVX512F__

inline constexpr bool kWideRegisters = true;  // 32 registers of 16 lanes

struct Vec {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

TREADLE_SIMD Vec Broadcast(float x) { return {_mm512_set1_ps(x)}; }
TREADLE_SIMD Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
TREADLE_SIMD void Store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
TREADLE_SIMD Vec Load(const uint16_t* p) {  // fp16
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TREADLE_SIMD Vec LoadUnsigned(const uint8_t* p) {  // bytes
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
}
// Nibbles of 16 bytes: the low ones, or those at bit 4.
template <int kShift>
TREADLE_SIMD Vec LoadNibblesAt(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i shifted = _mm_srli_epi16(bytes, kShift);
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(shifted, _mm_set1_epi8(15))))};
}
TREADLE_SIMD Vec LoadSigned(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
// Byte `which` of each of 16 fours, signed.
TREADLE_SIMD Vec LoadOfFours(const int8_t* p, int which) {
  const __m512i first = _mm512_sll_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(24 - 8 * which));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(first, 24))};
}
TREADLE_SIMD Vec Add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
TREADLE_SIMD Vec Sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
TREADLE_SIMD Vec Mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
TREADLE_SIMD Vec Div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// The second operand where either is NaN.
TREADLE_SIMD Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
TREADLE_SIMD Vec Min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
// a * b + c, and c - a * b.
TREADLE_SIMD Vec Fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TREADLE_SIMD Vec Fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// a * b - c.
TREADLE_SIMD Vec Fms(Vec a, Vec b, Vec c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
TREADLE_SIMD Vec Round(Vec a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// a * 2^n for integral n in [-252, 254], rounded once.
TREADLE_SIMD Vec Scale(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// Lanes below n (all of them from 16 on).
TREADLE_SIMD Mask FirstLanes(int64_t n) {
  return {static_cast<__mmask16>(n >= kLanes ? 0xffffu : (1u << (n < 0 ? 0 : n)) - 1u)};
}
TREADLE_SIMD Vec Select(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }
// Lanes where a is less than b, and neither is NaN.
TREADLE_SIMD Mask Less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
// Bit i of the result: lane i of a is at least that of b. False where either is NaN.
TREADLE_SIMD uint32_t AtLeastBits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// Lanes from n on are zero, and their memory is not touched.
TREADLE_SIMD Vec LoadFirst(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(FirstLanes(n).m, p)};
}
TREADLE_SIMD void StoreFirst(float* p, Vec x, int64_t n) {
  _mm512_mask_storeu_ps(p, FirstLanes(n).m, x.v);
}

// fp16: half to even; finite values saturate at 65504; infinities stay; NaN becomes the quiet one.
TREADLE_SIMD __m256i ToHalfLanes(Vec x) {
  const __m512 sign_bit = _mm512_set1_ps(-0.0f);
  const __m512 magnitude = _mm512_andnot_ps(sign_bit, x.v);
  const __mmask16 is_inf = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(kInfinity), _CMP_EQ_OQ);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  __m512 clamped = _mm512_min_ps(magnitude, _mm512_set1_ps(kMaxHalf));
  clamped = _mm512_mask_mov_ps(clamped, is_inf, magnitude);
  clamped = _mm512_mask_mov_ps(clamped, is_nan, _mm512_set1_ps(__builtin_nanf("")));
  return _mm512_cvtps_ph(_mm512_or_ps(clamped, _mm512_and_ps(x.v, sign_bit)), 8);
}
TREADLE_SIMD void Store(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ToHalfLanes(x));
}
TREADLE_SIMD void Store(int8_t* p, Vec x) {  // half to even; for values of [-128, 127]
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
TREADLE_SIMD Vec LoadBFloat16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// Lanes of a and b by turns: the first eight of each, and the last eight.
TREADLE_SIMD Vec InterleaveLow(Vec a, Vec b) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return {_mm512_permutex2var_ps(a.v, order, b.v)};
}
TREADLE_SIMD Vec InterleaveHigh(Vec a, Vec b) {
  const __m512i order =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return {_mm512_permutex2var_ps(a.v, order, b.v)};
}

// Lanes 0-7 and 8-15, where the one horizontal order begins.
TREADLE_SIMD __m256 LowHalf(Vec x) { return _mm512_castps512_ps256(x.v); }
TREADLE_SIMD __m256 HighHalf(Vec x) { return _mm512_extractf32x8_ps(x.v, 1); }

#else

inline constexpr bool kWideRegisters = false;  // 16 registers of 8 lanes

// sums + the products of each lane's two words.
TREADLE_SIMD __m256i AddWordPairs(__m256i sums, __m256i a, __m256i b) {
#ifdef __AVXVNNI__
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

struct Vec {
  __m256 lo, hi;
};
struct Mask {
  __m256 lo, hi;
};

TREADLE_SIMD Vec Broadcast(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
TREADLE_SIMD Vec Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TREADLE_SIMD void Store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
TREADLE_SIMD Vec Load(const uint16_t* p) {  // fp16
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
TREADLE_SIMD Vec LoadUnsigned(const uint8_t* p) {  // bytes
  const auto eight = [](const uint8_t* bytes) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x));
  };
  return {eight(p), eight(p + 8)};
}
template <int kShift>
TREADLE_SIMD Vec LoadNibblesAt(const uint8_t* p) {
  const auto eight = [](const uint8_t* bytes) {
    const __m128i x =
        _mm_srli_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)), kShift);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(x, _mm_set1_epi8(15))));
  };
  return {eight(p), eight(p + 8)};
}
TREADLE_SIMD Vec LoadSigned(const uint8_t* p) {
  const auto eight = [](const uint8_t* bytes) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
  };
  return {eight(p), eight(p + 8)};
}
TREADLE_SIMD Vec LoadOfFours(const int8_t* p, int which) {
  const auto eight = [which](const int8_t* fours) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(fours));
    const __m256i first = _mm256_sll_epi32(x, _mm_cvtsi32_si128(24 - 8 * which));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(first, 24));
  };
  return {eight(p), eight(p + 32)};
}
TREADLE_SIMD Vec Add(Vec a, Vec b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
TREADLE_SIMD Vec Sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
TREADLE_SIMD Vec Mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
TREADLE_SIMD Vec Div(Vec a, Vec b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// The second operand where either is NaN.
TREADLE_SIMD Vec Max(Vec a, Vec b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
TREADLE_SIMD Vec Min(Vec a, Vec b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
// a * b + c, and c - a * b.
TREADLE_SIMD Vec Fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TREADLE_SIMD Vec Fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
// a * b - c.
TREADLE_SIMD Vec Fms(Vec a, Vec b, Vec c) {
  return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)};
}
TREADLE_SIMD Vec Round(Vec a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
// a * 2^n for integral n in [-252, 254], rounded once: |a| near 1 stays normal under the first of
// the two factors 2^(n/2).
TREADLE_SIMD __m256 ScaleHalf(__m256 a, __m256 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i first = _mm256_srai_epi32(exponent, 1);
  const __m256i second = _mm256_sub_epi32(exponent, first);
  const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(first, bias), 23);
  const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(second, bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
}
TREADLE_SIMD Vec Scale(Vec a, Vec n) { return {ScaleHalf(a.lo, n.lo), ScaleHalf(a.hi, n.hi)}; }

// Lanes below n (all of them from 16 on).
TREADLE_SIMD Mask FirstLanes(int64_t n) {
  const int32_t clamped = static_cast<int32_t>(n > kLanes ? kLanes : n);
  const __m256i count = _mm256_set1_epi32(clamped);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high_lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high_lane))};
}
TREADLE_SIMD Vec Select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
// Lanes where a is less than b, and neither is NaN.
TREADLE_SIMD Mask Less(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
// Bit i of the result: lane i of a is at least that of b. False where either is NaN.
TREADLE_SIMD uint32_t AtLeastBits(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
// Lanes from n on are zero, and their memory is not touched.
TREADLE_SIMD Vec LoadFirst(const float* p, int64_t n) {
  const Mask m = FirstLanes(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
TREADLE_SIMD void StoreFirst(float* p, Vec x, int64_t n) {
  const Mask m = FirstLanes(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), x.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), x.hi);
}

// fp16: half to even; finite values saturate at 65504; infinities stay; NaN becomes the quiet one.
TREADLE_SIMD __m128i ToHalfLanes(__m256 x) {
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  const __m256 infinity = _mm256_set1_ps(kInfinity);
  const __m256 magnitude = _mm256_andnot_ps(sign_bit, x);
  __m256 clamped = _mm256_min_ps(magnitude, _mm256_set1_ps(kMaxHalf));
  clamped = _mm256_blendv_ps(clamped, infinity, _mm256_cmp_ps(magnitude, infinity, _CMP_EQ_OQ));
  clamped = _mm256_blendv_ps(clamped, _mm256_set1_ps(__builtin_nanf("")),
                             _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_cvtps_ph(_mm256_or_ps(clamped, _mm256_and_ps(x, sign_bit)), 8);
}
TREADLE_SIMD void Store(uint16_t* p, Vec x) {
  __m128i* halves = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(halves, ToHalfLanes(x.lo));
  _mm_storeu_si128(halves + 1, ToHalfLanes(x.hi));
}
TREADLE_SIMD void Store(int8_t* p, Vec x) {  // half to even; for values of [-128, 127]
  const auto words = [](__m256 v) {
    const __m256i q = _mm256_cvtps_epi32(v);
    return _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  };
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words(x.lo), words(x.hi)));
}
TREADLE_SIMD Vec LoadBFloat16(const uint16_t* p) {
  const auto eight = [](const uint16_t* bits) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  };
  return {eight(p), eight(p + 8)};
}

// Lanes of a and b by turns: the first eight of each, and the last eight.
TREADLE_SIMD Vec InterleaveEight(__m256 a, __m256 b) {
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
TREADLE_SIMD Vec InterleaveLow(Vec a, Vec b) { return InterleaveEight(a.lo, b.lo); }
TREADLE_SIMD Vec InterleaveHigh(Vec a, Vec b) { return InterleaveEight(a.hi, b.hi); }

// Lanes 0-7 and 8-15, where the one horizontal order begins.
TREADLE_SIMD __m256 LowHalf(Vec x) { return x.lo; }
TREADLE_SIMD __m256 HighHalf(Vec x) { return x.hi; }

#endif

TREADLE_SIMD Vec Zero() { return Broadcast(0.0f); }

// to[lane][row] = from[row][lane] of 16 rows, which are so many elements apart. Each of the four
// rounds moves the first bit of an element's row and lane, taken as one number, to its end.
TREADLE_SIMD void Transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec rows[kLanes], next[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = Load(from + i * from_stride);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = InterleaveLow(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = InterleaveHigh(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) Store(to + i * to_stride, rows[i]);
}

// Tails of fp16 and bytes go through a small buffer: rare, and no instruction below AVX-512 BW
// masks so few bits.
template <typename T>
TREADLE_SIMD Vec LoadFirst(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return Load(buffer);
}
template <typename T>
TREADLE_SIMD void StoreFirst(T* p, Vec x, int64_t n) {
  T buffer[kLanes];
  Store(buffer, x);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// The one order of 16 partial sums: i with i + 8, then i + 4, i + 2, i + 1.
TREADLE_SIMD float Sum(Vec x) {
  const __m256 eight = _mm256_add_ps(LowHalf(x), HighHalf(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TREADLE_SIMD float MaxLane(Vec x) {
  const __m256 eight = _mm256_max_ps(LowHalf(x), HighHalf(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Correctly rounded, so equal everywhere.
TREADLE_SIMD float Sqrt(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// Calls body(offset, valid lanes) for each group of up to 16 elements of [0, n); the tail is last.
template <typename Body>
TREADLE_SIMD void ForEachVec(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}
// Whole when `lanes` is known to be 16, else by mask.
template <typename T>
TREADLE_SIMD Vec LoadLanes(const T* p, int64_t lanes) {
  return lanes == kLanes ? Load(p) : LoadFirst(p, lanes);
}
template <typename T>
TREADLE_SIMD void StoreLanes(T* p, Vec x, int64_t lanes) {
  if (lanes == kLanes) {
    Store(p, x);
  } else {
    StoreFirst(p, x, lanes);
  }
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
