// LLM.int8() (Dettmers, chapter 2): products of whole rows of 8-bit codes, summed exactly over all
// of k in 32 bits, and the outlier columns in float.
//
// AVX2 multiplies unsigned by signed bytes into pairs of 16 bits, which saturate. So activations
// are split there: q = 16 * high + low, |high| and |low| at most 8; then a pair is at most 2 * 255
// * 8, and the eight of a block of 32 make 32,640. The exact sum is the same.
#include "kernels/cpu/int8_lanes.h"
#include "kernels/cpu/matmul_lanes.h"
#include "kernels/cpu/matmul_tables.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kBlockBytes = 512;
constexpr int64_t kPrefetchBytes = 4096;
constexpr int kZero = 128;  // codes are stored as code + kZero

#ifdef __AVX512F__

constexpr int kRowsAtOnce = 8;

TREADLE_SIMD Integers BroadcastInteger(int32_t x) { return {_mm512_set1_epi32(x)}; }

// sums += one block's products.
template <int R, int G>
TREADLE_SIMD void AddBlock(const uint8_t* const (&w)[G], const int8_t* x, int64_t row_bytes,
                           Integers (&sums)[R][G]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    __m512i codes[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) codes[g] = _mm512_loadu_si512(w[g] + 64 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Quad quad = LoadQuad(x + r * row_bytes + 4 * i);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        sums[r][g].v = _mm512_dpbusd_epi32(sums[r][g].v, codes[g], quad.v);
      }
    }
  }
}

// Lane f: code `column` of feature f.
TREADLE_SIMD Vec CodeAt(const uint8_t* group, int64_t column) {
  const __m512i dwords = _mm512_loadu_si512(group + column / 4 * 64);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(column % 4 * 8));
  const __m512i code = _mm512_and_si512(_mm512_srl_epi32(dwords, shift), _mm512_set1_epi32(255));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(kZero)))};
}

#else

constexpr int kRowsAtOnce = 3;

TREADLE_SIMD Integers BroadcastInteger(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}

// A sum of both planes' pairs.
TREADLE_SIMD __m256i FoldPlanes(__m256i sum, __m256i low, __m256i high) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
}

template <int R, int G>
TREADLE_SIMD void AddBlock(const uint8_t* const (&w)[G], const int8_t* x, int64_t row_bytes,
                           Integers (&sums)[R][G]) {
  static_assert(G == 1);
  Dots<false> dots[2][R];
  for (int p = 0; p < 2; ++p) {
    for (int r = 0; r < R; ++r) dots[p][r] = BeginDots<false, 0>(0);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Codes<false> codes = LoadCodes<false>(w[0] + 64 * i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        dots[p][r] = AddDots(dots[p][r], codes, LoadQuad(x + r * row_bytes + 32 * p + 4 * i));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    sums[r][0].lo = FoldPlanes(sums[r][0].lo, dots[0][r].lo, dots[1][r].lo);
    sums[r][0].hi = FoldPlanes(sums[r][0].hi, dots[0][r].hi, dots[1][r].hi);
  }
}

TREADLE_SIMD Vec CodeAt(const uint8_t* group, int64_t column) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(column % 4 * 8));
  const auto code = [shift](__m256i dwords) {
    const __m256i byte = _mm256_and_si256(_mm256_srl_epi32(dwords, shift), _mm256_set1_epi32(255));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(byte, _mm256_set1_epi32(kZero)));
  };
  const uint8_t* dwords = group + column / 4 * 64;
  return {code(LoadBytes(dwords)), code(LoadBytes(dwords + 32))};
}

#endif

template <int R, int G>
TREADLE_LOOP void RunRows(const MatMulInput& input, const MatMulShare& share, int64_t row,
                          int64_t group) {
  const RowInt8Input& quantized = input.row_int8;
  const int64_t blocks = (input.k + kBlockValues - 1) / kBlockValues;
  const int64_t row_bytes = blocks * kRowPlanes * kBlockValues;
  const int8_t* x = quantized.codes + row * row_bytes;
  const ActivationRow* rows = quantized.rows + row;
  const int64_t group_bytes = share.weight.group_bytes;
  const uint8_t* const first = share.weight.data + group * group_bytes;
  // Of several groups side by side: the next set, which lies a whole set on.
  const int64_t ahead = G > 1 ? G * group_bytes : kPrefetchBytes;
  const uint8_t* w[G];
  for (int g = 0; g < G; ++g) w[g] = first + g * group_bytes;
  Integers sums[R][G];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) sums[r][g] = BroadcastInteger(-kZero * rows[r].sum);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    if (row == 0) {  // later rows find the weights in the cache
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < kBlockBytes; line += 64) {
          __builtin_prefetch(w[g] + ahead + line);
        }
      }
    }
    AddBlock<R, G>(w, x, row_bytes, sums);
    x += kRowPlanes * kBlockValues;
    for (int g = 0; g < G; ++g) w[g] += kBlockBytes;
  }
  Vec values[R][G];
  for (int g = 0; g < G; ++g) {  // w is past the codes: at the scales
    const Vec scale = Load(reinterpret_cast<const float*>(w[g]));
    for (int r = 0; r < R; ++r) {
      Vec value = Mul(ToFloat(sums[r][g]), Mul(scale, Broadcast(rows[r].scale)));
      const int32_t* columns = quantized.columns + (row + r) * input.k;
      const float* outliers = input.x + (row + r) * input.x_stride;
      for (int64_t i = 0; i < rows[r].outliers; ++i) {
        const Vec weight = Mul(scale, CodeAt(first + g * group_bytes, columns[i]));
        value = Fma(weight, Broadcast(outliers[columns[i]]), value);
      }
      values[r][g] = value;
    }
  }
  EndSums<R, G>(true, share, row, group, nullptr, values);
}

template <int G>
void RunGroups(const MatMulInput& input, const MatMulShare& share, int64_t group) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= input.rows; row += kRowsAtOnce) {
    RunRows<kRowsAtOnce, G>(input, share, row, group);
  }
  if constexpr (kRowsAtOnce > 4) {
    for (; row + 4 <= input.rows; row += 4) RunRows<4, G>(input, share, row, group);
  }
  for (; row + 2 <= input.rows; row += 2) RunRows<2, G>(input, share, row, group);
  for (; row < input.rows; ++row) RunRows<1, G>(input, share, row, group);
}

// Eight lanes at a time on every instruction set: the work is small next to the product.

// Eight values, of the first `count` at least; other lanes are zero.
TREADLE_SIMD __m256 Values(const float* x, int64_t count) {
  if (count >= 8) return _mm256_loadu_ps(x);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(
      x, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(count)), lane));
}
TREADLE_SIMD __m256i Magnitudes(__m256 values) {
  return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7fffffff));
}

// Lanes that are outliers. As integers, NaN is larger than any number.
TREADLE_SIMD __m256i OutlierLanes(__m256i magnitudes, int32_t threshold_bits) {
  return threshold_bits == INT32_MAX
             ? _mm256_setzero_si256()
             : _mm256_cmpgt_epi32(magnitudes, _mm256_set1_epi32(threshold_bits - 1));
}
TREADLE_SIMD __m256i OutlierLanes(__m256i magnitudes, int64_t column, const RowInt8Input& out) {
  if (out.call_flags == nullptr) return OutlierLanes(magnitudes, out.threshold_bits);
  const __m128i flags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(out.call_flags + column));
  return _mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(flags), _mm256_setzero_si256());
}

TREADLE_SIMD uint32_t LaneBits(__m256i lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

TREADLE_SIMD int32_t SumLanes(__m256i x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
TREADLE_SIMD int32_t MaxLane(__m256i x) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

// Eight codes to where column `column` lies.
TREADLE_SIMD void StoreCodes(__m256i q, int8_t* row, int64_t column) {
  int8_t* codes = row + column / kBlockValues * kRowPlanes * kBlockValues + column % kBlockValues;
  const auto store = [](int8_t* to, __m256i x) {
    const __m256i words = _mm256_packs_epi32(x, x);
    const __m128i eight =
        _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(eight, eight));
  };
  if constexpr (kRowPlanes == 2) {
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(8)), 4);
    store(codes + kBlockValues, high);
    q = _mm256_sub_epi32(q, _mm256_slli_epi32(high, 4));
  }
  store(codes, q);
}

}  // namespace

void MatMulRowInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch&) {
  int64_t group = share.group_begin;
  if constexpr (kWideRegisters) {
    for (; input.rows > 1 && group + 2 <= share.group_end; group += 2) {
      RunGroups<2>(input, share, group);
    }
  }
  for (; group < share.group_end; ++group) RunGroups<1>(input, share, group);
}

void FlagOutliers(const float* x, int64_t stride, int64_t rows, int64_t begin, int64_t end,
                  int32_t threshold_bits, uint8_t* flags) {
  for (int64_t column = begin; column < end; ++column) flags[column] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = begin; column < end; column += 8) {
      const __m256i magnitudes = Magnitudes(Values(x + row * stride + column, end - column));
      for (uint32_t bits = LaneBits(OutlierLanes(magnitudes, threshold_bits)); bits != 0;
           bits &= bits - 1) {
        flags[column + __builtin_ctz(bits)] = 1;
      }
    }
  }
}

void QuantizeRow(const float* x, int64_t k, int64_t row, const RowInt8Input& out) {
  ActivationRow& result = out.rows[row];
  int32_t* const columns = out.columns + row * k;
  result.outliers = 0;
  __m256i largest = _mm256_setzero_si256();
  for (int64_t column = 0; column < k; column += 8) {
    const __m256i magnitudes = Magnitudes(Values(x + column, k - column));
    const __m256i outliers = OutlierLanes(magnitudes, column, out);
    largest = _mm256_max_epi32(largest, _mm256_andnot_si256(outliers, magnitudes));
    for (uint32_t bits = LaneBits(outliers); bits != 0; bits &= bits - 1) {
      columns[result.outliers++] = static_cast<int32_t>(column) + __builtin_ctz(bits);
    }
  }
  const int32_t bits = MaxLane(largest);
  float absmax;
  __builtin_memcpy(&absmax, &bits, 4);
  const bool zero = absmax < 0x1p-100f;
  result.scale = zero ? 0.0f : absmax / 127;
  const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : 127 / absmax);
  const int64_t padded = (k + kBlockValues - 1) / kBlockValues * kBlockValues;
  int8_t* const codes = out.codes + row * padded * kRowPlanes;
  __m256i sum = _mm256_setzero_si256();
  for (int64_t column = 0; column < padded; column += 8) {
    __m256i q = _mm256_setzero_si256();
    if (column < k) {
      const __m256 values = Values(x + column, k - column);
      // What NaN and infinities give does not matter, as the scale is not finite then.
      q = _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
      q = _mm256_max_epi32(_mm256_min_epi32(q, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
      q = _mm256_andnot_si256(OutlierLanes(Magnitudes(values), column, out), q);
    }
    sum = _mm256_add_epi32(sum, q);
    StoreCodes(q, codes, column);
  }
  result.sum = SumLanes(sum);
}

}  // namespace treadle::TREADLE_ISA
