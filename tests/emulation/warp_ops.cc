// Warp functions and matrix instructions of the emulation, for all 32 lanes at once.
#include <array>
#include <bit>
#include <cstring>

#include "base/status.h"
#include "kernels/dtype.h"
#include "tests/emulation/machine.h"

namespace treadle::simt {
namespace {

using Operands = void* const (&)[32];

void ExchangeValues(Operands operands) {
  uint64_t values[32];
  for (int l = 0; l < 32; ++l) values[l] = static_cast<const Exchange*>(operands[l])->value;
  for (int l = 0; l < 32; ++l) {
    auto* lane = static_cast<Exchange*>(operands[l]);
    lane->value = values[lane->from];
  }
}

void CollectBallot(Operands operands) {
  uint32_t bits = 0;
  for (int l = 0; l < 32; ++l) {
    bits |= static_cast<uint32_t>(static_cast<const Exchange*>(operands[l])->value) << l;
  }
  for (int l = 0; l < 32; ++l) static_cast<Exchange*>(operands[l])->value = bits;
}

float HalfToFloat(uint16_t bits) { return ToFloat(Half{bits}); }
float BFloat16ToFloat(uint16_t bits) { return ToFloat(BFloat16{bits}); }

// The whole operands of an m16n8 product with kK terms, collected from the lanes' fragments. A word
// holds kK / 8 elements of the lane's row of A (column of B).
template <typename Element, int kK, typename Decode>
void Multiply(Operands operands, Decode decode) {
  constexpr int kPerWord = kK / 8;
  constexpr int kBits = 32 / kPerWord;
  Element a[kK][16];
  Element b[kK][8];
  Element d[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<const MmaOperands*>(operands[l]);
    const int g = l / 4;
    const int t = l % 4;
    const auto* sums = static_cast<const Element*>(lane.d);
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = sums[i];
    for (int e = 0; e < kPerWord; ++e) {
      const int k = kPerWord * t + e;
      for (int i = 0; i < 4; ++i) {
        a[k + kK / 2 * (i / 2)][g + 8 * (i % 2)] = decode(lane.a[i] >> (kBits * e));
      }
      for (int i = 0; i < 2; ++i) b[k + kK / 2 * i][g] = decode(lane.b[i] >> (kBits * e));
    }
  }
  for (int k = 0; k < kK; ++k) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) d[i][j] += a[k][i] * b[k][j];
    }
  }
  for (int l = 0; l < 32; ++l) {
    auto* sums = static_cast<Element*>(static_cast<MmaOperands*>(operands[l])->d);
    for (int i = 0; i < 4; ++i) sums[i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
  }
}

void LoadMatrices(Operands operands, bool transposed) {
  uint16_t elements[4][8][8];
  for (int l = 0; l < 32; ++l) {
    std::memcpy(elements[l / 8][l % 8], static_cast<const LoadMatrixOperands*>(operands[l])->row,
                16);
  }
  for (int l = 0; l < 32; ++l) {
    const auto& lane = *static_cast<const LoadMatrixOperands*>(operands[l]);
    const int i = l / 4;
    const int j = 2 * (l % 4);
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = transposed ? elements[m][j][i] : elements[m][i][j];
      const uint32_t high = transposed ? elements[m][j + 1][i] : elements[m][i][j + 1];
      lane.r[m] = low | (high << 16);
    }
  }
}

}  // namespace

void CarryOut(Meeting meeting, Operands operands) {
  switch (meeting) {
    case Meeting::kSyncWarp:
      return;
    case Meeting::kShuffle:
    case Meeting::kShuffleXor:
    case Meeting::kShuffleUp:
      return ExchangeValues(operands);
    case Meeting::kBallot:
      return CollectBallot(operands);
    case Meeting::kMmaBf16:
      return Multiply<float, 16>(
          operands, [](uint32_t word) { return BFloat16ToFloat(static_cast<uint16_t>(word)); });
    case Meeting::kMmaF16:
      return Multiply<float, 16>(
          operands, [](uint32_t word) { return HalfToFloat(static_cast<uint16_t>(word)); });
    case Meeting::kMmaS8:
      return Multiply<int32_t, 32>(
          operands, [](uint32_t word) { return int32_t{static_cast<int8_t>(word)}; });
    case Meeting::kLoadMatrix4:
    case Meeting::kLoadMatrix4Transposed:
      return LoadMatrices(operands, meeting == Meeting::kLoadMatrix4Transposed);
    case Meeting::kReturn:
    case Meeting::kAwaitEarlierLaunches:
    case Meeting::kSyncThreads:
    case Meeting::kSyncWarpgroup:
    case Meeting::kWarpgroupFence:
    case Meeting::kWarpgroupMma:
    case Meeting::kWarpgroupCommit:
    case Meeting::kWarpgroupWait:
      break;
  }
  TREADLE_CHECK(false);  // the machine's own affair
}

}  // namespace treadle::simt
