// Whole matrices of 16-bit weights, for products of many rows by the library.
//
// A block decodes a band, warps dealing out its steps. Every lane looks values up in a copy of its
// own (a bank of its own). A step of 1024 codes of NF4 takes 230 instructions for sm_90a, 58 cycles
// of a multiprocessor, in which 32 are of look-ups; on an H200 memory takes 99 cycles for the 2048
// bytes that are written (20.7 a cycle), unless a cache holds them until the product has read them.
#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/cuda/low_bit/low_bit_constants.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarp;

struct DecodeParams {
  LowBitView w;
  uint16_t* out = nullptr;  // [n, 64 * steps]
};

// The value at a code's place in this lane's table; entries are 128 bytes apart.
template <int kBits>
TREADLE_DEVICE float ValueOf(const unsigned char* table, uint32_t word, int bit) {
  constexpr uint32_t kMask = ((1u << kBits) - 1) << 7;
  const uint32_t at = (bit < 7 ? word << (7 - bit) : word >> (bit - 7)) & kMask;
  return *reinterpret_cast<const float*>(table + at);
}

// The four weights of product j and feature g + 8 * half of a lane, rounded (PlaceOfCode).
template <int kBits, bool kSecond, bool kBf16>
TREADLE_DEVICE void DecodeFour(const unsigned char* table, const simt::Words4* codes, int j,
                               int half, const ConstantPair& constants, Second kind,
                               uint32_t* words) {
  const float zero = kSecond && kind == Second::kZero ? constants.second[half] : 0.0f;
  const float offset = kSecond && kind == Second::kOffset ? constants.second[half] : 0.0f;
  float weights[4];
  TREADLE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int at = (half + i / 2 * 2) * 2 + i % 2;
    const uint32_t word =
        kBits == 4 ? WordOf(codes[0], j) : WordOf(codes[j / 2], j % 2 * 2 + at / 4);
    const float value = ValueOf<kBits>(table, word, at * kBits % 32);
    // One of the two is 0, and a scale times an integer is exact: the canonical value.
    weights[i] = kSecond ? simt::Fma(constants.scale[half], value - zero, offset)
                         : constants.scale[half] * value;
  }
  TREADLE_UNROLL
  for (int i = 0; i < 2; ++i) {
    words[i] = simt::Pack16(kBf16, weights[2 * i], weights[2 * i + 1]);
  }
}

// words: 2j and 2j + 1 are product j's. out: the step's first column of the feature.
template <int kGranule>
TREADLE_DEVICE void StoreFeature(const uint32_t (&words)[8], uint16_t* out) {
  const int t = simt::Lane() % 4;
  TREADLE_UNROLL
  for (int j = 0; j < 4; j += kGranule == 16 ? 1 : 2) {
    uint16_t* to = out + ColumnOf(kGranule, j, t, 0);
    if constexpr (kGranule == 16) {
      *reinterpret_cast<simt::Words2*>(to) = {words[2 * j], words[2 * j + 1]};
    } else {
      *reinterpret_cast<simt::Words4*>(to) = {words[2 * j], words[2 * j + 1], words[2 * j + 2],
                                              words[2 * j + 3]};
    }
  }
}

template <int kBits, int kGranule, bool kSecond, bool kBf16>
TREADLE_KERNEL(kThreads)
void DecodeKernel(DecodeParams p) {
  simt::AwaitEarlierLaunches();
  const LowBitView& w = p.w;
  auto* table = simt::DynamicShared<float>();
  for (int i = simt::Thread(); i < (1 << kBits) * simt::kWarp; i += kThreads) {
    table[i] = w.values[i / simt::kWarp];
  }
  simt::SyncThreads();
  const auto* own_table = reinterpret_cast<const unsigned char*>(table + simt::Lane());
  const int feature = simt::BlockX() * kBandFeatures + simt::Lane() / 4;  // and 8 further
  const int64_t band = simt::BlockX();
  const bool half_constants = w.half_constants != 0;
  const std::byte* pairs =
      w.constants + (band * w.runs * 8 + simt::Lane() / 4) * PairBytes<kSecond>(half_constants);
  constexpr int kGranules = kStepColumns / kGranule;
  for (int step = simt::Warp(); step < w.steps; step += kWarps) {
    const uint32_t* from = w.codes + (band * w.steps + step) * StepWords(kBits) + simt::Lane() * 4;
    simt::Words4 codes[kBits / 4];
    TREADLE_UNROLL
    for (int plane = 0; plane < kBits / 4; ++plane) {
      codes[plane] = simt::LoadOnce16(from + plane * 128);
    }
    ConstantPair constants[kGranules];
    TREADLE_UNROLL
    for (int i = 0; i < kGranules; ++i) {
      const int run = (step * kGranules + i) >> w.run_shift;
      constants[i] = DecodeConstants<kSecond>(LoadConstants<kSecond>(pairs, run, half_constants),
                                              half_constants);
    }
    TREADLE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[8];
      TREADLE_UNROLL
      for (int j = 0; j < 4; ++j) {
        DecodeFour<kBits, kSecond, kBf16>(own_table, codes, j, half, constants[j * 16 / kGranule],
                                          w.second, words + 2 * j);
      }
      if (feature + 8 * half >= w.n) continue;
      StoreFeature<kGranule>(
          words,
          p.out + (feature + 8 * half) * (int64_t{w.steps} * kStepColumns) + step * kStepColumns);
    }
  }
}

using DecodeFunction = void (*)(DecodeParams);

template <int... kLayouts>
DecodeFunction Find(int layout, bool bf16, std::integer_sequence<int, kLayouts...>) {
  static constexpr DecodeFunction kFunctions[][2] = {
      {DecodeKernel<LayoutAt(kLayouts).bits, LayoutAt(kLayouts).granule, LayoutAt(kLayouts).second,
                    false>,
       DecodeKernel<LayoutAt(kLayouts).bits, LayoutAt(kLayouts).granule, LayoutAt(kLayouts).second,
                    true>}...};
  return kFunctions[layout][bf16 ? 1 : 0];
}

}  // namespace

void LowBitDecode(Device& device, const LowBitView& matrix, DType dtype, uint16_t* out) {
  TREADLE_CHECK(matrix.bits == 4 || matrix.bits == 8);
  device.Launch(Find(LayoutOf(matrix), dtype == DType::kBF16, kLowBitLayouts),
                {.grid_x = static_cast<uint32_t>((matrix.n + kBandFeatures - 1) / kBandFeatures),
                 .threads = kThreads,
                 .shared_bytes = (size_t{1} << matrix.bits) * simt::kWarp * sizeof(float)},
                DecodeParams{.w = matrix, .out = out});
}

}  // namespace treadle::cuda
