// Products of a few rows in float with weights that are quick to decode: in registers, without a
// tile. Every output is the chain of fma(w, x, sum) of matmul_exact.cc.
#include "kernels/cpu/matmul/float_decoders.h"
#include "kernels/cpu/matmul/matmul_lanes.h"

namespace treadle::TREADLE_ISA {
namespace {

// How far ahead of their use codes are fetched.
constexpr int64_t kPrefetchBytes = 2048;

template <typename Decoder, int R, int G>
TREADLE_SIMD void AddSteps(const Decoder& decoder, const MatMulInput& input, int64_t group_bytes,
                           int64_t steps, bool prefetch, const Constants (&constants)[G],
                           const float*& x, const uint8_t*& p, Vec (&sums)[R][G]) {
  // Weights of all groups before their use, where the registers hold them: an activation is then
  // loaded once for all of them.
  constexpr int kAtOnce = Decoder::kStep * G <= 8 ? G : 1;
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int g = 0; g < G; g += kAtOnce) {
      Vec w[kAtOnce][Decoder::kStep];
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) {
        const uint8_t* codes = p + (g + i) * group_bytes;
        if (prefetch) FetchSoon(codes + kPrefetchBytes);
        decoder.Decode(codes, constants[g + i], w[i]);
      }
#pragma GCC unroll 8
      for (int k = 0; k < Decoder::kStep; ++k) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec activation = Broadcast(x[r * input.x_stride + k]);
#pragma GCC unroll 4
          for (int i = 0; i < kAtOnce; ++i) {
            sums[r][g + i] = Fma(w[i][k], activation, sums[r][g + i]);
          }
        }
      }
    }
    x += Decoder::kStep;
    p += Decoder::kStepBytes;
  }
}

template <typename Decoder, int R, int G>
TREADLE_LOOP void RunRows(const MatMulInput& input, const MatMulShare& share, int64_t row,
                          int64_t group) {
  const PackedView& weight = share.weight;
  const Decoder decoder(weight.codebook);
  const int64_t unit = Decoder::kScaled ? weight.unit : input.k;
  const float* x = input.x + row * input.x_stride;
  const uint8_t* p = weight.data + group * weight.group_bytes;
  Vec sums[R][G];
  BeginSums<R, G>(true, nullptr, sums);
  Constants constants[G] = {};
  for (int64_t k = 0; k < input.k; k += unit) {
    if constexpr (Decoder::kScaled) {
      for (int g = 0; g < G; ++g) {
        constants[g] = LoadConstants<Decoder>(p + g * weight.group_bytes);
      }
      p += kUnitHeader<Decoder>;
    }
    AddSteps<Decoder, R, G>(decoder, input, weight.group_bytes, unit / Decoder::kStep, row == 0,
                            constants, x, p, sums);
  }
  EndSums<R, G>(true, share, row, group, nullptr, sums);
}

template <typename Decoder, int G>
void RunGroups(const MatMulInput& input, const MatMulShare& share, int64_t group) {
  constexpr int kRows = kWideRegisters ? (G > 2 ? 2 : 8) : (G > 1 ? 1 : 4);
  ForRows<kRows>(input.rows,
                 [&]<int R>(int64_t row) { RunRows<Decoder, R, G>(input, share, row, group); });
}

// One chain of additions waits for itself: one or two rows take several groups at once.
template <typename Decoder>
void Run(const MatMulInput& input, const MatMulShare& share) {
  constexpr int kGroups = kWideRegisters ? 4 : 2;
  int64_t group = share.group_begin;
  if (input.rows <= 2) {
    for (; group + kGroups <= share.group_end; group += kGroups) {
      RunGroups<Decoder, kGroups>(input, share, group);
    }
  }
  if constexpr (kWideRegisters && Decoder::kStep <= 4) {
    for (; group + 2 <= share.group_end; group += 2) RunGroups<Decoder, 2>(input, share, group);
  }
  for (; group < share.group_end; ++group) RunGroups<Decoder, 1>(input, share, group);
}

}  // namespace

bool MatMulDirect(const MatMulInput& input, const MatMulShare& share) {
  return WithDecoder(share.weight, [&]<typename Decoder>() { Run<Decoder>(input, share); });
}

}  // namespace treadle::TREADLE_ISA
