// How a block of 32 k x 16 features of GGUF's formats, or of integers, lies in memory
// (matmul_kernels.h), for the kernels to read.
//
// A layout has kBytes per run of kBlocks blocks; its functions take the run and the block's place
// in it. Codes are code + kZero; kWide: they exceed 15. kHalves: one scale per 16 k instead of 32.
// kOffsets: how many minima a block has, at most one for each scale. kPacked: read from memory,
// worth prefetching.
//
// For sources that are compiled once per instruction set (see simd.h).
#pragma once

#include "kernels/cpu/matmul/int8_lanes.h"
#include "kernels/cpu/matmul/matmul_kernels.h"

namespace treadle::TREADLE_ISA {
namespace {

TREADLE_SIMD const uint16_t* Halves(const uint8_t* p) {
  return reinterpret_cast<const uint16_t*>(p);
}
TREADLE_SIMD const float* Floats(const uint8_t* p) { return reinterpret_cast<const float*>(p); }

// A block of its own: the codes of 32 k, f16 scales and, if the format has them, f16 minima.
template <int64_t kCodeBytes, int kFirst, bool kMinimum>
struct OneBlock {
  static constexpr int64_t kBytes = kCodeBytes + (kMinimum ? 64 : 32), kBlocks = 1;
  static constexpr int kZero = kFirst;
  static constexpr bool kWide = kCodeBytes > 256, kHalves = false, kPacked = true;
  static constexpr int kOffsets = kMinimum ? 1 : 0;
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t, int) {
    return Load(Halves(p + kCodeBytes));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p, int64_t, int) {
    return Load(Halves(p + kCodeBytes + 32));
  }
};

template <bool kMinimum>
struct Q4Layout : OneBlock<256, kMinimum ? 0 : 8, kMinimum> {
  // Codes of dwords I (low) and I + 4 (high).
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<false>& low, Codes<false>& high) {
    LoadNibbles(p + 64 * I, low, high);
  }
};

struct Q8Layout : OneBlock<512, 128, false> {
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<true>& low, Codes<true>& high) {
    low = LoadCodes<true>(p + 64 * I);
    high = LoadCodes<true>(p + 64 * (I + 4));
  }
};

// Nibbles, and a plane of fifth bits.
template <int I>
TREADLE_SIMD void FiveBitPair(const uint8_t* p, Codes<true>& low, Codes<true>& high) {
  Codes<false> low_nibbles, high_nibbles;
  LoadNibbles(p + 64 * I, low_nibbles, high_nibbles);
  low = AddUpperBits<1, I>(low_nibbles, p + 256);
  high = AddUpperBits<1, I + 4>(high_nibbles, p + 256);
}

template <bool kMinimum>
struct Q5Layout : OneBlock<320, kMinimum ? 0 : 16, kMinimum> {
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<true>& low, Codes<true>& high) {
    FiveBitPair<I>(p, low, high);
  }
};

// IQ4_NL's and IQ4_XS's codes.
template <int I>
TREADLE_SIMD void Iq4Pair(const uint8_t* p, Codes<true>& low, Codes<true>& high) {
  Codes<false> low_nibbles, high_nibbles;
  LoadNibbles(p + 64 * I, low_nibbles, high_nibbles);
  low = LookUp(kIq4Bytes, low_nibbles);
  high = LookUp(kIq4Bytes, high_nibbles);
}

struct Iq4Layout : OneBlock<256, 128, false> {
  static constexpr bool kWide = true;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<true>& low, Codes<true>& high) {
    Iq4Pair<I>(p, low, high);
  }
};

// The K types: the codes of eight blocks, bytes of integer scales for each, f16 constants.
template <int64_t kCodeBytes, int64_t kScaleBytes = 32, int64_t kConstantBytes = 64>
struct KRun {
  static constexpr int64_t kBlocks = 8;
  static constexpr int64_t kBytes = kBlocks * (kCodeBytes + kScaleBytes) + kConstantBytes;
  static constexpr bool kPacked = true;
  TREADLE_SIMD static const uint8_t* CodesOf(const uint8_t* p, int64_t block) {
    return p + block * kCodeBytes;
  }
  TREADLE_SIMD static const uint8_t* Scales(const uint8_t* p, int64_t block) {
    return p + kBlocks * kCodeBytes + kScaleBytes * block;
  }
  TREADLE_SIMD static const uint16_t* Constants(const uint8_t* p) {
    return Halves(p + kBlocks * (kCodeBytes + kScaleBytes));
  }
};

// Scales and minima of Q4_K and Q5_K: products of 16-bit floats and integers, exact.
template <typename Run>
struct KPairs : Run {
  static constexpr int kZero = 0;
  static constexpr bool kHalves = false;
  static constexpr int kOffsets = 1;
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t block, int) {
    return Mul(Load(Run::Constants(p)), LoadUnsigned(Run::Scales(p, block)));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p, int64_t block, int) {
    return Mul(Load(Run::Constants(p) + kLanes), LoadUnsigned(Run::Scales(p, block) + kLanes));
  }
};

struct Q4KLayout : KPairs<KRun<256>> {
  static constexpr bool kWide = false;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<false>& low,
                                Codes<false>& high) {
    LoadNibbles(CodesOf(p, block) + 64 * I, low, high);
  }
};

struct Q5KLayout : KPairs<KRun<320>> {
  static constexpr bool kWide = true;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<true>& low,
                                Codes<true>& high) {
    FiveBitPair<I>(CodesOf(p, block), low, high);
  }
};

struct Q6KLayout : KRun<384> {
  static constexpr int kZero = 32;
  static constexpr bool kWide = true, kHalves = true;
  static constexpr int kOffsets = 0;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<true>& low,
                                Codes<true>& high) {
    const uint8_t* codes = CodesOf(p, block);
    Codes<false> low_nibbles, high_nibbles;
    LoadNibbles(codes + 64 * I, low_nibbles, high_nibbles);
    low = AddUpperBits<2, 2 * I>(low_nibbles, codes + 256);
    high = AddUpperBits<2, 2 * I>(high_nibbles, codes + 320);
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t block, int half) {
    return Mul(Load(Constants(p)), LoadSigned(Scales(p, block) + kLanes * half));
  }
};

// Planes of two bits: of dwords I and I + 4.
template <int I>
TREADLE_SIMD void TwoBitPair(const uint8_t* p, Codes<false>& low, Codes<false>& high) {
  low = LoadBits<2, 2 * I, 0>(p);
  high = LoadBits<2, 2 * I, 0>(p + 64);
}

struct Q2KLayout : KRun<128> {
  static constexpr int kZero = 0, kOffsets = 2;
  static constexpr bool kWide = false, kHalves = true;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<false>& low,
                                Codes<false>& high) {
    TwoBitPair<I>(CodesOf(p, block), low, high);
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t block, int half) {
    return Mul(Load(Constants(p)), LoadNibblesAt<0>(Scales(p, block) + kLanes * half));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p, int64_t block, int half) {
    return Mul(Load(Constants(p) + kLanes), LoadNibblesAt<4>(Scales(p, block) + kLanes * half));
  }
};

struct Q3KLayout : KRun<192> {
  static constexpr int kZero = 4, kOffsets = 0;
  static constexpr bool kWide = false, kHalves = true;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<false>& low,
                                Codes<false>& high) {
    const uint8_t* codes = CodesOf(p, block);
    TwoBitPair<I>(codes, low, high);
    low = Or(low, LoadBits<1, I, 2>(codes + 128));
    high = Or(high, LoadBits<1, I + 4, 2>(codes + 128));
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t block, int half) {
    return Mul(Load(Constants(p)), LoadSigned(Scales(p, block) + kLanes * half));
  }
};

struct Iq4XsLayout : KRun<256, 16, 32> {
  static constexpr int kZero = 128, kOffsets = 0;
  static constexpr bool kWide = true, kHalves = false;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<true>& low,
                                Codes<true>& high) {
    Iq4Pair<I>(CodesOf(p, block), low, high);
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t block, int) {
    return Mul(Load(Constants(p)), LoadSigned(Scales(p, block)));
  }
};

// A tile's blocks, unpacked: 8 x 16 dwords, f32 scale[16] (two of them if kHalves), f32 offset[16]
// (kOffsets of them). `Packed` says which, and what the codes are.
template <typename Packed>
struct TileLayout {
  static constexpr bool kWide = Packed::kWide, kHalves = Packed::kHalves;
  static constexpr bool kPacked = false;
  static constexpr int kZero = Packed::kZero, kOffsets = Packed::kOffsets;
  static constexpr int64_t kOffsetAt = kHalves ? 640 : 576;
  static constexpr int64_t kBytes = kOffsetAt + 64 * kOffsets, kBlocks = 1;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<kWide>& low, Codes<kWide>& high) {
    low = LoadCodes<kWide>(p + 64 * I);
    high = LoadCodes<kWide>(p + 64 * (I + 4));
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t, int half) {
    return Load(Floats(p + 512 + 64 * half));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p, int64_t, int half) {
    return Load(Floats(p + kOffsetAt + 64 * half));
  }
};

// Codes of any format lie in memory as in a tile.
struct AnyCodes {
  static constexpr bool kWide = true, kHalves = true;
  static constexpr int kZero = 128, kOffsets = 2;
};
struct BytesLayout : TileLayout<AnyCodes> {
  static constexpr bool kPacked = true;
};
static_assert(BytesLayout::kBytes == kBytesBlock);

// Nibbles of any format, and what they stand for.
struct TableLayout {
  static constexpr bool kWide = true, kHalves = true, kPacked = true;
  static constexpr int kZero = 128, kOffsets = 0;
  static constexpr int64_t kBytes = kTableBlock, kBlocks = 1;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t, Codes<true>& low, Codes<true>& high) {
    Codes<false> low_nibbles, high_nibbles;
    LoadNibbles(p + 64 * I, low_nibbles, high_nibbles);
    low = LookUp(p + kTableAt, low_nibbles);
    high = LookUp(p + kTableAt, high_nibbles);
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t, int half) {
    return Load(Floats(p + 256 + 64 * half));
  }
};

// Integers of apart formats.
template <PackKind kKind>
struct IntegersLayout {
  static constexpr IntegerRun kRun = IntegerRunOf(kKind);
  static constexpr int kZero = 0, kOffsets = 1;
  static constexpr bool kWide = kRun.bits == 8, kHalves = false, kPacked = true;
  static constexpr int64_t kBytes = kRun.bytes(), kBlocks = kRun.values / kBlockValues;
  template <int I>
  TREADLE_SIMD static void Pair(const uint8_t* p, int64_t block, Codes<kWide>& low,
                                Codes<kWide>& high) {
    p += block * kRun.block_bytes();
    if constexpr (kWide) {
      Q8Layout::Pair<I>(p, 0, low, high);
    } else {
      LoadNibbles(p + 64 * I, low, high);
    }
  }
  TREADLE_SIMD static Vec Scale(const uint8_t* p, int64_t, int) {
    return Load(Floats(p + kRun.code_bytes()));
  }
  TREADLE_SIMD static Vec Offset(const uint8_t* p, int64_t block, int half) {
    const Vec zero = LoadUnsigned(p + kRun.code_bytes() + 4 * kGroupFeatures);
    return Sub(Zero(), Mul(Scale(p, block, half), zero));
  }
};

// Calls body.template operator()<Layout>() with the layout of `kind`; false if it is not one of
// blocks.
template <typename Body>
inline bool WithBlockLayout(PackKind kind, Body body) {
  switch (kind) {
    case PackKind::kQ4_0:
      return body.template operator()<Q4Layout<false>>(), true;
    case PackKind::kQ4_1:
      return body.template operator()<Q4Layout<true>>(), true;
    case PackKind::kQ5_0:
      return body.template operator()<Q5Layout<false>>(), true;
    case PackKind::kQ5_1:
      return body.template operator()<Q5Layout<true>>(), true;
    case PackKind::kQ8_0:
      return body.template operator()<Q8Layout>(), true;
    case PackKind::kQ2_K:
      return body.template operator()<Q2KLayout>(), true;
    case PackKind::kQ3_K:
      return body.template operator()<Q3KLayout>(), true;
    case PackKind::kIq4Nl:
      return body.template operator()<Iq4Layout>(), true;
    case PackKind::kIq4Xs:
      return body.template operator()<Iq4XsLayout>(), true;
    case PackKind::kQ4_K:
      return body.template operator()<Q4KLayout>(), true;
    case PackKind::kQ5_K:
      return body.template operator()<Q5KLayout>(), true;
    case PackKind::kQ6_K:
      return body.template operator()<Q6KLayout>(), true;
    case PackKind::kTable:
      return body.template operator()<TableLayout>(), true;
    case PackKind::kBytes:
      return body.template operator()<BytesLayout>(), true;
    case PackKind::kRun32Int4:
      return body.template operator()<IntegersLayout<PackKind::kRun32Int4>>(), true;
    case PackKind::kRun128Int4:
      return body.template operator()<IntegersLayout<PackKind::kRun128Int4>>(), true;
    case PackKind::kRun32Int8:
      return body.template operator()<IntegersLayout<PackKind::kRun32Int8>>(), true;
    case PackKind::kRun128Int8:
      return body.template operator()<IntegersLayout<PackKind::kRun128Int8>>(), true;
    default:
      return false;
  }
}

// Calls body.template operator()<I>() for I of 0 to 3.
template <typename Body>
TREADLE_SIMD void ForFour(Body body) {
  body.template operator()<0>();
  body.template operator()<1>();
  body.template operator()<2>();
  body.template operator()<3>();
}

// Where block `block` of a group's run lies: the run.
template <typename Layout>
TREADLE_SIMD const uint8_t* RunOf(const uint8_t* group, int64_t block) {
  return group + block / Layout::kBlocks * Layout::kBytes;
}

// Dwords I and I + 4 of a block, kDwordBytes each, as `store` writes them.
template <typename Packed, int64_t kDwordBytes, int I, typename Store8>
TREADLE_SIMD void UnpackPair(const uint8_t* group, int64_t block, uint8_t* codes, Store8 store) {
  Codes<Packed::kWide> low, high;
  Packed::template Pair<I>(RunOf<Packed>(group, block), block % Packed::kBlocks, low, high);
  store(codes + kDwordBytes * I, low);
  store(codes + kDwordBytes * (I + 4), high);
}

// The constants of a block: scales, then offsets.
template <typename Packed>
TREADLE_SIMD void UnpackConstants(const uint8_t* group, int64_t block, uint8_t* to) {
  const uint8_t* run = RunOf<Packed>(group, block);
  const int64_t place = block % Packed::kBlocks;
  auto* constants = reinterpret_cast<float*>(to);
  constexpr int kScales = Packed::kHalves ? 2 : 1;
#pragma GCC unroll 2
  for (int half = 0; half < kScales; ++half) {
    Store(constants + half * kLanes, Packed::Scale(run, place, half));
  }
  if constexpr (Packed::kOffsets > 0) {
#pragma GCC unroll 2
    for (int part = 0; part < Packed::kOffsets; ++part) {
      Store(constants + (kScales + part) * kLanes, Packed::Offset(run, place, part));
    }
  }
}

// Block `block` of a group to a tile: eight dwords of codes, then the constants.
template <typename Packed, int64_t kDwordBytes, typename Store8>
TREADLE_SIMD void UnpackBlockWith(const uint8_t* group, int64_t block, uint8_t* tile,
                                  Store8 store) {
  ForFour([&]<int I>() __attribute__((always_inline)) {
    UnpackPair<Packed, kDwordBytes, I>(group, block, tile, store);
  });
  UnpackConstants<Packed>(group, block, tile + 8 * kDwordBytes);
}

template <typename Packed>
inline void UnpackBlock(const uint8_t* group, int64_t block, uint8_t* tile) {
  UnpackBlockWith<Packed, 64>(group, block, tile,
                              [](uint8_t* p, auto codes) { StoreCodes(p, codes); });
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
