// The loops of machine_peaks.h, compiled once per instruction set: independent chains, nothing
// else.
#include "bench/kernels/machine_peaks.h"
#include "kernels/cpu/matmul/int8_lanes.h"
#include "kernels/cpu/matmul/tile_registers.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int kChains = kWideRegisters ? 20 : 6;  // of 16 lanes
constexpr int kDotChains = kWideRegisters ? 20 : 6;

float FmaLoop(int64_t rounds) {
  Vec sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Broadcast(static_cast<float>(i));
  const Vec a = Broadcast(0.999f);
  const Vec b = Broadcast(0.001f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sums[i] = Fma(sums[i], a, b);
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += Sum(sums[i]);
  return sum;
}

int32_t IntegerLoop(int64_t rounds) {
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i % 3);
  const Codes<false> codes = LoadCodes<false>(bytes);
  const int8_t four[4] = {1, 0, -1, 1};
  const Quad x = LoadQuad(four);
  Dots<false> dots[kDotChains];
  for (int i = 0; i < kDotChains; ++i) dots[i] = BeginDots<false, 1>(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kDotChains; ++i) dots[i] = AddDots(dots[i], codes, x);
  }
  float sum = 0;
  for (int i = 0; i < kDotChains; ++i) sum += Sum(ToFloat(EndDots<false, 1>(dots[i], i)));
  return static_cast<int32_t>(sum);
}

#ifdef __AVX512F__
int32_t TileLoop(int64_t rounds) {
  alignas(64) int32_t sums[16][16];
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.Set(tile, 16, kTileLine);
  const ScopedTiles registers(shapes);
  for (auto& row : sums) {
    for (int32_t& bytes : row) bytes = 0x01ff0201;
  }
  LoadTile<4>(sums, kTileLine);
  LoadTile<5>(sums, kTileLine);
  for (int64_t round = 0; round < rounds; ++round) {
    AddSigned<0, 4, 5>();
    AddSigned<1, 4, 5>();
    AddSigned<2, 4, 5>();
    AddSigned<3, 4, 5>();
  }
  StoreTile<0>(sums);
  return sums[0][0];
}
constexpr auto kTileLoop = TileLoop;
#else
constexpr int32_t (*kTileLoop)(int64_t) = nullptr;
#endif

int64_t ReadLoop(const uint8_t* data, int64_t bytes) {
  Vec sums[4] = {Zero(), Zero(), Zero(), Zero()};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    __builtin_prefetch(data + i + 4096);
    __builtin_prefetch(data + i + 4096 + 64);
    __builtin_prefetch(data + i + 4096 + 128);
    __builtin_prefetch(data + i + 4096 + 192);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      sums[j] = Max(sums[j], Load(reinterpret_cast<const float*>(data + i + 64 * j)));
    }
  }
  return static_cast<int64_t>(Sum(Max(Max(sums[0], sums[1]), Max(sums[2], sums[3]))));
}

}  // namespace

const PeakLoops kPeakLoops = {.fma = FmaLoop,
                              .integer = IntegerLoop,
                              .read = ReadLoop,
                              .fma_ops = 2.0 * kLanes * kChains,
                              .integer_ops = 2.0 * 4 * kLanes * kDotChains,
                              .tile = kTileLoop,
                              .tile_ops = 2.0 * 16 * 16 * 64 * 4};

}  // namespace treadle::TREADLE_ISA
