// AMX's tile registers: eight, each of up to 16 rows of 64 bytes. A product of two adds to a third:
// sums (f32 or i32) [16][16] += activations [16][bytes] * codes [bytes / 4][16 features][4].
//
// The instructions are named, as this is compiled for AVX-512 (isa.h), and read and write memory
// that the compiler does not see. For sources that are compiled once per instruction set (simd.h).
#pragma once

#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

inline constexpr int64_t kTileLine = 64;  // bytes

// Shapes of the registers that are used; the others stay empty.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TREADLE_SIMD void Set(int tile, int tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

// The registers have these shapes while it lives. A thread without them has less to save.
class ScopedTiles {
 public:
  TREADLE_SIMD explicit ScopedTiles(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  }
  TREADLE_SIMD ~ScopedTiles() { asm volatile("tilerelease" : : : "memory"); }
  ScopedTiles(const ScopedTiles&) = delete;
  ScopedTiles& operator=(const ScopedTiles&) = delete;
};

// Calls body.template operator()<I>() for I of [kFrom, kTo). An array that a
// loop indexes stays in memory instead of registers.
template <int kFrom, int kTo, typename Body>
TREADLE_SIMD void ForEach(Body body) {
  if constexpr (kFrom < kTo) {
    body.template operator()<kFrom>();
    ForEach<kFrom + 1, kTo>(body);
  }
}

template <int kTile>
TREADLE_SIMD void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// Rows that are `stride` bytes apart.
template <int kTile>
TREADLE_SIMD void LoadTile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}
// Loads a tile that will not be read again soon.
template <int kTile>
TREADLE_SIMD void LoadPassingTile(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
TREADLE_SIMD void StoreTile(void* p, int64_t stride = kTileLine) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}
// Bytes, summed exactly: all signed, or unsigned codes.
template <int kSums, int kActivations, int kCodes>
TREADLE_SIMD void AddSigned() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kSums), "i"(kActivations), "i"(kCodes));
}
template <int kSums, int kActivations, int kCodes>
TREADLE_SIMD void AddUnsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kSums), "i"(kActivations), "i"(kCodes));
}
// Unsigned activations, signed codes.
template <int kSums, int kActivations, int kCodes>
TREADLE_SIMD void AddSignedCodes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kSums), "i"(kActivations), "i"(kCodes));
}

#ifdef __AVX512F__
// Lanes of `low` before those of `high`, rounded to bf16.
TREADLE_SIMD __m512i RoundPair(__m512 low, __m512 high) {
  __m512i out;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(low), "v"(high));
  return out;
}
#endif
// bf16, summed in f32 as bf16_chains.h says: activations [16][32], weights [16][16 features][2].
template <int kSums, int kActivations, int kWeights>
TREADLE_SIMD void AddBf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kSums), "i"(kActivations), "i"(kWeights));
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
