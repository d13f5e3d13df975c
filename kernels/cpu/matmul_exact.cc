// Products with float activations: every output is one chain of fma(w, x, sum) over ascending k.
//
// A tile of w is decoded to floats in L1, then all rows run over it; the sums wait in scratch
// between tiles. Chains are latency-bound, so few rows take more groups at once.
#include "kernels/cpu/matmul_lanes.h"
#include "kernels/cpu/matmul_tables.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kTileFloats = 4096;

#ifdef __AVX512F__

// Lane f: ((dword f of `p`) >> shift) & mask, as a float.
struct Dwords {
  __m512i v;
};
TREADLE_SIMD Dwords LoadDwords(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TREADLE_SIMD Vec CodeLane(Dwords p, int shift, int mask) {
  const __m512i code = _mm512_and_si512(
      reinterpret_cast<__m512i>(reinterpret_cast<__v16su>(p.v) >> shift), _mm512_set1_epi32(mask));
  return {_mm512_cvtepi32_ps(code)};
}
TREADLE_SIMD Vec LoadBFloat16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}

#else

struct Dwords {
  __m256i lo, hi;
};
TREADLE_SIMD Dwords LoadDwords(const uint8_t* p) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
TREADLE_SIMD Vec CodeLane(Dwords p, int shift, int mask) {
  const __m256i bits = _mm256_set1_epi32(mask);
  const auto code = [&](__m256i x) {
    x = reinterpret_cast<__m256i>(reinterpret_cast<__v8su>(x) >> shift);
    return _mm256_cvtepi32_ps(_mm256_and_si256(x, bits));
  };
  return {code(p.lo), code(p.hi)};
}
TREADLE_SIMD Vec LoadBFloat16(const uint16_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const auto widen = [](__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  };
  return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}

#endif

TREADLE_SIMD const uint16_t* Halves(const uint8_t* p) {
  return reinterpret_cast<const uint16_t*>(p);
}

template <bool kMinimum>
void DecodeQ4(const uint8_t* unit, int64_t blocks, float* tile) {
  for (int64_t b = 0; b < blocks; ++b, unit += kMinimum ? 320 : 288, tile += 32 * kLanes) {
    const Vec scale = Load(Halves(unit + 256));
    const Vec offset = kMinimum ? Load(Halves(unit + 288)) : Zero();
    const Vec bias = Broadcast(kMinimum ? 0.0f : 8.0f);
    for (int dword = 0; dword < 4; ++dword) {
      const Dwords packed = LoadDwords(unit + 64 * dword);
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        const Vec low = Sub(CodeLane(packed, 8 * byte, 15), bias);
        const Vec high = Sub(CodeLane(packed, 8 * byte + 4, 15), bias);
        Store(tile + (4 * dword + byte) * kLanes, Fma(scale, low, offset));
        Store(tile + (16 + 4 * dword + byte) * kLanes, Fma(scale, high, offset));
      }
    }
  }
}

void DecodeQ8(const uint8_t* unit, int64_t blocks, float* tile) {
  const Vec bias = Broadcast(128.0f);
  for (int64_t b = 0; b < blocks; ++b, unit += 544, tile += 32 * kLanes) {
    const Vec scale = Load(Halves(unit + 512));
    for (int dword = 0; dword < 8; ++dword) {
      const Dwords packed = LoadDwords(unit + 64 * dword);
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        const Vec code = Sub(CodeLane(packed, 8 * byte, 255), bias);
        Store(tile + (4 * dword + byte) * kLanes, Fma(scale, code, Zero()));
      }
    }
  }
}

void DecodeStored(const PackedView& weight, const uint8_t* group, int64_t from, int64_t count,
                  float* tile) {
  const int64_t row_bytes = weight.group_bytes / kGroupFeatures;
  const int64_t width = weight.format->group;
  CodeGroup codes;
  for (int64_t lane = 0; lane < kGroupFeatures; ++lane) {
    const auto* row = reinterpret_cast<const std::byte*>(group + lane * row_bytes);
    for (int64_t k = 0; k < count; k += width) {
      weight.format->codes(row, (from + k) / width, codes);
      for (int64_t i = 0; i < width; ++i) {
        tile[(k + i) * kLanes + lane] =
            __builtin_fmaf(codes.scale, static_cast<float>(codes.codes[i]), codes.offset);
      }
    }
  }
}

// w[from, from + count) of a group as [count][16] floats: in `tile`, or where they lie already.
const float* DecodeTile(const PackedView& weight, int64_t group, int64_t from, int64_t count,
                        float* tile) {
  const uint8_t* data = weight.data + group * weight.group_bytes;
  const int64_t blocks = count / kBlockValues;
  switch (weight.kind) {
    case PackKind::kF32:
      return reinterpret_cast<const float*>(data) + from * kLanes;
    case PackKind::kF16:
      for (int64_t k = 0; k < count; ++k) {
        Store(tile + k * kLanes, Load(Halves(data) + (from + k) * kLanes));
      }
      break;
    case PackKind::kBF16:
      for (int64_t k = 0; k < count; ++k) {
        Store(tile + k * kLanes, LoadBFloat16(Halves(data) + (from + k) * kLanes));
      }
      break;
    case PackKind::kQ4_0:
      DecodeQ4<false>(data + from / kBlockValues * 288, blocks, tile);
      break;
    case PackKind::kQ4_1:
      DecodeQ4<true>(data + from / kBlockValues * 320, blocks, tile);
      break;
    case PackKind::kQ8_0:
      DecodeQ8(data + from / kBlockValues * 544, blocks, tile);
      break;
    case PackKind::kStored:
      DecodeStored(weight, data, from, count, tile);
      break;
  }
  return tile;
}

// Where the rows of a tile stand along k.
struct Span {
  int64_t from;
  int64_t count;
  bool first;
  bool last;
};

template <int R, int G>
void RunRows(const MatMulInput& input, const MatMulShare& share, const Span& span, int64_t row,
             int64_t group, const float* const (&w)[kMaxGroupsAtOnce], float* scratch) {
  Vec sums[R][G];
  BeginSums<R, G>(span.first, scratch, sums);
  const float* x = input.x + row * input.x_stride + span.from;
  for (int64_t k = 0; k < span.count; ++k) {
    Vec weights[G];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) weights[g] = Load(w[g] + k * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec activation = Broadcast(x[r * input.x_stride + k]);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[r][g] = Fma(weights[g], activation, sums[r][g]);
    }
  }
  EndSums<R, G>(span.last, share, row, group, scratch, sums);
}

template <int G>
void RunGroups(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch,
               int64_t group) {
  constexpr int kRows = kWideRegisters ? (G >= 4 ? 4 : 8) : (G >= 2 ? 2 : 6);
  constexpr int64_t kTile = kTileFloats / kLanes / G;
  float* const tile = reinterpret_cast<float*>(scratch.tile);
  for (int64_t from = 0; from < input.k; from += kTile) {
    const int64_t count = input.k - from < kTile ? input.k - from : kTile;
    const Span span{from, count, from == 0, from + count == input.k};
    const float* w[kMaxGroupsAtOnce];
    for (int g = 0; g < G; ++g) {
      w[g] = DecodeTile(share.weight, group + g, from, count, tile + g * kTile * kLanes);
    }
    int64_t row = 0;
    const auto sums = [&] { return scratch.sums + row * G * kLanes; };
    for (; row + kRows <= input.rows; row += kRows) {
      RunRows<kRows, G>(input, share, span, row, group, w, sums());
    }
    if constexpr (kRows > 4) {
      for (; row + 4 <= input.rows; row += 4) {
        RunRows<4, G>(input, share, span, row, group, w, sums());
      }
    }
    if constexpr (kRows > 2) {
      for (; row + 2 <= input.rows; row += 2) {
        RunRows<2, G>(input, share, span, row, group, w, sums());
      }
    }
    for (; row < input.rows; ++row) RunRows<1, G>(input, share, span, row, group, w, sums());
  }
}

}  // namespace

void MatMulExact(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  int64_t group = share.group_begin;
  if (input.rows <= 2) {
    for (; group + 4 <= share.group_end; group += 4) RunGroups<4>(input, share, scratch, group);
  }
  if (kWideRegisters) {
    for (; group + 2 <= share.group_end; group += 2) RunGroups<2>(input, share, scratch, group);
  }
  for (; group < share.group_end; ++group) RunGroups<1>(input, share, scratch, group);
}

}  // namespace treadle::TREADLE_ISA
