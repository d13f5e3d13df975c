// LLM.int8() (Dettmers, chapter 2): products of whole rows of 8-bit codes, summed exactly over all
// of k in 32 bits, and the outlier columns in float.
//
// AVX2 without VNNI multiplies bytes into pairs of 16 bits, which saturate. So both factors are
// words there. Few rows make them of codes as they go; more run over a tile of them, in L1. AMX
// multiplies the codes where they lie, 16 rows of 64 at a time.
#include "kernels/cpu/matmul/activation_codes.h"
#include "kernels/cpu/matmul/code_words.h"
#include "kernels/cpu/matmul/matmul_lanes.h"
#include "kernels/cpu/matmul/tile_registers.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kBlockBytes = 512;
constexpr int64_t kPrefetchBytes = 4096;
constexpr int kZero = 128;  // codes are stored as code + kZero

constexpr int kRowsAtOnce = kWideRegisters ? 8 : 4;

#if TREADLE_BYTE_DOTS

// sums += one block's products.
template <int R, int G>
TREADLE_SIMD void AddBlock(const uint8_t* const (&w)[G], const int8_t* x, int64_t row_bytes,
                           Integers (&sums)[R][G]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    Codes<true> codes[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) codes[g] = LoadCodes<true>(w[g] + 64 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Quad quad = LoadQuad(x + r * row_bytes + 4 * i);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[r][g] = AddDots(sums[r][g], codes[g], quad);
    }
  }
}

#else

// The products of four k; codes: of them, as AddWords takes them.
template <int R, typename Even, typename Odd>
TREADLE_SIMD void AddFour(const Even& even, const Odd& odd, const int8_t* x, int64_t row_bytes,
                          Integers (&sums)[R][1]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const int8_t* activations = x + r * row_bytes;
    sums[r][0] = AddWords(sums[r][0], even, LoadQuad(activations));
    sums[r][0] = AddWords(sums[r][0], odd, LoadQuad(activations + 4));
  }
}

template <int R, int G>
TREADLE_SIMD void AddBlock(const uint8_t* const (&w)[G], const int8_t* x, int64_t row_bytes,
                           Integers (&sums)[R][G]) {
  static_assert(G == 1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Words words = LoadWords(w[0] + 64 * i);
    AddFour<R>(words.even, words.odd, x + 8 * i, row_bytes, sums);
  }
}

#endif

#ifdef __AVX512F__
// Lane f: code `column` of feature f.
TREADLE_SIMD Vec CodeAt(const uint8_t* group, int64_t column) {
  const __m512i dwords = _mm512_loadu_si512(group + column / 4 * 64);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(column % 4 * 8));
  const __m512i code = _mm512_and_si512(_mm512_srl_epi32(dwords, shift), _mm512_set1_epi32(255));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(kZero)))};
}
#else
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

// The value that a product of rows begins with: what codes stored as code + kZero have too much.
// Unsigned, because the sum of a row that is not finite may be anything.
template <int R, int G>
TREADLE_SIMD void BeginRows(const ActivationRow* rows, Integers (&sums)[R][G]) {
  for (int r = 0; r < R; ++r) {
    const uint32_t correction = 0u - uint32_t{kZero} * static_cast<uint32_t>(rows[r].sum);
    for (int g = 0; g < G; ++g) sums[r][g] = BroadcastWords(static_cast<int32_t>(correction));
  }
}

// The results of the sums over all of k.
template <int R, int G>
TREADLE_SIMD void EndRows(const MatMulInput& input, const MatMulShare& share, int64_t row,
                          int64_t group, const Integers (&sums)[R][G]) {
  const RowInt8Input& quantized = input.row_int8;
  const ActivationRow* rows = quantized.rows + row;
  const int64_t group_bytes = share.weight.group_bytes;
  Vec values[R][G];
  for (int g = 0; g < G; ++g) {
    const uint8_t* codes = share.weight.data + (group + g) * group_bytes;
    const Vec scale = Load(reinterpret_cast<const float*>(codes + group_bytes) - kGroupFeatures);
    for (int r = 0; r < R; ++r) {
      Vec value = Mul(ToFloat(sums[r][g]), Mul(scale, Broadcast(rows[r].scale)));
      const int32_t* columns = quantized.columns + (row + r) * input.k;
      const float* outliers = input.x + (row + r) * input.x_stride;
      for (int64_t i = 0; i < rows[r].outliers; ++i) {
        const Vec weight = Mul(scale, CodeAt(codes, columns[i]));
        value = Fma(weight, Broadcast(outliers[columns[i]]), value);
      }
      values[r][g] = value;
    }
  }
  EndSums<R, G>(true, share, row, group, nullptr, values);
}

int64_t BlocksOf(const MatMulInput& input) { return (input.k + kBlockValues - 1) / kBlockValues; }

template <int R, int G>
TREADLE_LOOP void RunRows(const MatMulInput& input, const MatMulShare& share, int64_t row,
                          int64_t group) {
  const int64_t blocks = BlocksOf(input);
  const int64_t row_bytes = blocks * kRowBytes * kBlockValues;
  const int8_t* x = input.row_int8.codes + row * row_bytes;
  const int64_t group_bytes = share.weight.group_bytes;
  // With several groups side by side: the next set, which lies a whole set on.
  const int64_t ahead = G > 1 ? G * group_bytes : kPrefetchBytes;
  const uint8_t* w[G];
  for (int g = 0; g < G; ++g) w[g] = share.weight.data + (group + g) * group_bytes;
  Integers sums[R][G];
  BeginRows<R, G>(input.row_int8.rows + row, sums);
  for (int64_t b = 0; b < blocks; ++b) {
    if (row == 0) {  // later rows find the weights in the cache
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < kBlockBytes; line += 64) {
          G > 1 ? FetchLater(w[g] + ahead + line) : FetchSoon(w[g] + ahead + line);
        }
      }
    }
    AddBlock<R, G>(w, x, row_bytes, sums);
    x += kRowBytes * kBlockValues;
    for (int g = 0; g < G; ++g) w[g] += kBlockBytes;
  }
  EndRows<R, G>(input, share, row, group, sums);
}

template <int G>
void RunGroups(const MatMulInput& input, const MatMulShare& share, int64_t group) {
  ForRows<kRowsAtOnce>(input.rows,
                       [&]<int R>(int64_t row) { RunRows<R, G>(input, share, row, group); });
}

#ifdef __AVX512F__

// Rows [known, 16 * T) of 16 * T from `row` on. Two blocks at a time; the last of an odd number by
// vectors.
template <int T, int G>
TREADLE_LOOP void RunTileRows(const MatMulInput& input, const MatMulShare& share, int64_t row,
                              int64_t known, int64_t group) {
  const int64_t blocks = BlocksOf(input);
  const int64_t row_bytes = blocks * kRowBytes * kBlockValues;
  const int8_t* x = input.row_int8.codes + row * row_bytes;
  const uint8_t* w[G];
  for (int g = 0; g < G; ++g) w[g] = share.weight.data + (group + g) * share.weight.group_bytes;
  ZeroTile<0>();
  ZeroTile<1>();
  ZeroTile<2>();
  ZeroTile<3>();
  for (int64_t b = 0; b + 2 <= blocks; b += 2, x += 2 * kBlockValues) {
    LoadTile<4>(x, row_bytes);
    LoadTile<6>(w[0], kTileLine);
    AddUnsigned<0, 4, 6>();
    if constexpr (G == 2) {
      LoadTile<7>(w[1], kTileLine);
      AddUnsigned<1, 4, 7>();
    }
    if constexpr (T == 2) {
      LoadTile<5>(x + kTileRows * row_bytes, row_bytes);
      AddUnsigned<2, 5, 6>();
      if constexpr (G == 2) AddUnsigned<3, 5, 7>();
    }
    for (int g = 0; g < G; ++g) w[g] += 2 * kBlockBytes;
  }
  alignas(64) int32_t dots[2][2][kTileRows][kLanes];  // of rows by groups
  StoreTile<0>(dots[0][0]);
  StoreTile<1>(dots[0][1]);
  StoreTile<2>(dots[1][0]);
  StoreTile<3>(dots[1][1]);
  ForRows<kRowsAtOnce>(T * kTileRows - known, [&]<int R>(int64_t from) {
    from += known;
    Integers sums[R][G];
    BeginRows<R, G>(input.row_int8.rows + row + from, sums);
    for (int r = 0; r < R; ++r) {
      for (int g = 0; g < G; ++g) {
        const int32_t* dot = dots[(from + r) / kTileRows][g][(from + r) % kTileRows];
        sums[r][g] = AddIntegers(sums[r][g], {_mm512_load_si512(dot)});
      }
    }
    if (blocks % 2 != 0) AddBlock<R, G>(w, x + from * row_bytes, row_bytes, sums);
    EndRows<R, G>(input, share, row + from, group, sums);
  });
}

// The last rows begin early, if need be.
template <int G>
void RunTileGroups(const MatMulInput& input, const MatMulShare& share, int64_t group) {
  int64_t row = 0;
  for (; row + 2 * kTileRows <= input.rows; row += 2 * kTileRows) {
    RunTileRows<2, G>(input, share, row, 0, group);
  }
  while (row < input.rows) {
    const int64_t last = input.rows - kTileRows;
    const int64_t from = row < last ? row : last;
    RunTileRows<1, G>(input, share, from, row - from, group);
    row = from + kTileRows;
  }
}

#elif !TREADLE_BYTE_DOTS

constexpr int64_t kTiledRows = 12;  // below, making the words once does not pay
constexpr int64_t kTileBlocks = 24;
constexpr int64_t kTileBlockBytes = 2 * kBlockBytes;
static_assert(kTileBlocks * kTileBlockBytes <= kTileBytes);

// R rows over the blocks of a tile, which begin at x; the sums go on in `waiting` [R][16].
template <int R>
TREADLE_LOOP void RunTileRows(const uint8_t* tile, int64_t blocks, const int8_t* x,
                              int64_t row_bytes, int32_t* waiting) {
  Integers sums[R][1];
  auto* lanes = reinterpret_cast<__m256i*>(waiting);
  for (int r = 0; r < R; ++r) sums[r][0] = {lanes[2 * r], lanes[2 * r + 1]};
  for (int64_t b = 0; b < blocks; ++b, x += kRowBytes * kBlockValues) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i, tile += 128) {
      AddFour<R>(tile, tile + 64, x + 8 * i, row_bytes, sums);
    }
  }
  for (int r = 0; r < R; ++r) {
    lanes[2 * r] = sums[r][0].lo;
    lanes[2 * r + 1] = sums[r][0].hi;
  }
}

void RunTiles(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
              int64_t group) {
  const RowInt8Input& quantized = input.row_int8;
  const int64_t blocks = BlocksOf(input);
  const int64_t row_bytes = blocks * kRowBytes * kBlockValues;
  auto* waiting = reinterpret_cast<int32_t*>(scratch.sums);
  for (int64_t row = 0; row < input.rows; ++row) {
    for (int64_t i = 0; i < kLanes; ++i) {
      waiting[row * kLanes + i] = -kZero * quantized.rows[row].sum;
    }
  }
  const uint8_t* packed = share.weight.data + group * share.weight.group_bytes;
  for (int64_t begin = 0; begin < blocks; begin += kTileBlocks) {
    const int64_t count = blocks - begin < kTileBlocks ? blocks - begin : kTileBlocks;
    for (int64_t line = 0; line < 8 * count; ++line, packed += 64) {
      FetchSoon(packed + kPrefetchBytes);
      StoreWords(scratch.tile + 128 * line, LoadWords(packed));
    }
    const int8_t* x = quantized.codes + begin * kRowBytes * kBlockValues;
    int64_t row = 0;
    for (; row + 4 <= input.rows; row += 4) {
      RunTileRows<4>(scratch.tile, count, x + row * row_bytes, row_bytes, waiting + row * kLanes);
    }
    for (; row < input.rows; ++row) {
      RunTileRows<1>(scratch.tile, count, x + row * row_bytes, row_bytes, waiting + row * kLanes);
    }
  }
  for (int64_t row = 0; row < input.rows; ++row) {
    const auto* lanes = reinterpret_cast<const __m256i*>(waiting + row * kLanes);
    const Integers sums[1][1] = {{{lanes[0], lanes[1]}}};
    EndRows<1, 1>(input, share, row, group, sums);
  }
}

#endif

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

// Codes of 32 values from `column` on; of those from k on, 0. kAll: there are none of those.
template <bool kAll>
TREADLE_SIMD void CodesOf(const float* x, int64_t k, int64_t column, bool outliers, __m256 inverse,
                          const RowInt8Input& out, __m256i (&q)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i, column += 8) {
    q[i] = _mm256_setzero_si256();
    if (!kAll && column >= k) continue;
    const __m256 values = kAll ? _mm256_loadu_ps(x + column) : Values(x + column, k - column);
    // NaN and infinities may give anything, as the scale is not finite then.
    q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse));
    if (outliers) q[i] = _mm256_andnot_si256(OutlierLanes(Magnitudes(values), column, out), q[i]);
  }
}

}  // namespace

void MatMulRowInt8(const MatMulInput& input, const MatMulShare& share,
                   [[maybe_unused]] const MatMulScratch& scratch) {
  int64_t group = share.group_begin;
#ifdef __AVX512F__
  for (; input.rows > 1 && group + 2 <= share.group_end; group += 2) {
    RunGroups<2>(input, share, group);
  }
#elif !TREADLE_BYTE_DOTS
  for (; input.rows >= kTiledRows && group < share.group_end; ++group) {
    RunTiles(input, share, scratch, group);
  }
#endif
  for (; group < share.group_end; ++group) RunGroups<1>(input, share, group);
}

#ifdef __AVX512F__
void MatMulTilesRowInt8(const MatMulInput& input, const MatMulShare& share, const MatMulScratch&) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.Set(tile, kTileRows, kTileLine);
  const ScopedTiles registers(shapes);
  int64_t group = share.group_begin;
  for (; group + 2 <= share.group_end; group += 2) RunTileGroups<2>(input, share, group);
  for (; group < share.group_end; ++group) RunTileGroups<1>(input, share, group);
}
#endif

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
  int8_t* codes = out.codes + row * padded * kRowBytes;
  __m256i sum = _mm256_setzero_si256();
  for (int64_t column = 0; column < padded; column += kBlockValues) {
    __m256i q[4];
    if (column + kBlockValues <= k) {
      CodesOf<true>(x, k, column, result.outliers > 0, inverse, out, q);
    } else {
      CodesOf<false>(x, k, column, result.outliers > 0, inverse, out, q);
    }
    sum = _mm256_add_epi32(
        sum, _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
    if constexpr (kRowBytes == 2) {
      StoreWordCodes(codes, q);
    } else {
      StoreByteCodes(codes, q);
    }
    codes += kRowBytes * kBlockValues;
  }
  result.sum = SumLanes(sum);
}

}  // namespace treadle::TREADLE_ISA
