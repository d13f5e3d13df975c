// Products of warpgroups in the emulation: against plain sums, with B written element by element
// where PTX's canonical layouts have it; and kernels that break the order of warpgroup.h.
#include "kernels/cuda/runtime/warpgroup.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "kernels/cuda/row_int8/warpgroup_int8.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"
#include "tests/kernels/cuda/runtime/emulated_array.h"

namespace treadle::cuda {
namespace {

using simt::RowsOf;

constexpr int kTerms = 32;  // two products
constexpr int kThreads = 2 * simt::kWarpgroup;
constexpr int kRows = 128;

struct ProductParams {
  const uint16_t* a;  // [128, kTerms]
  const uint16_t* b;  // [kTerms, columns]
  float* d;           // [128, columns]
};

// The layouts, written out: 8 rows of 128 bytes make 1024; see PTX, "Shared memory matrix layout"
// with 128-byte swizzling. At 2048 bytes into shared memory.
TREADLE_HOST_DEVICE int ByteOf(RowsOf rows, int columns, int k, int n) {
  const int row = rows == RowsOf::kColumns ? n : k + n / 64 * kTerms;
  const int in_row = rows == RowsOf::kColumns ? 2 * k : 2 * (n % 64);
  const int piece = (in_row / 16) ^ (row % 8);
  return 2048 + row / 8 * 1024 + row % 8 * 128 + piece * 16 + in_row % 16;
}

template <DType kType, RowsOf kRowsOf, int kN>
TREADLE_KERNEL(kThreads)
void ProductKernel(ProductParams p) {
  simt::AwaitEarlierLaunches();
  constexpr int kColumns = 8 * kN;
  auto* shared = simt::DynamicShared<unsigned char>();
  for (int i = simt::Thread(); i < kTerms * kColumns; i += kThreads) {
    *reinterpret_cast<uint16_t*>(shared + ByteOf(kRowsOf, kColumns, i / kColumns, i % kColumns)) =
        p.b[i];
  }
  simt::AsyncFence();
  simt::SyncThreads();
  const int g = simt::Warp() * 16 + simt::Lane() / 4;
  const int t = simt::Lane() % 4;
  float d[kN][4];
  for (int n = 0; n < kN; ++n) {
    for (int e = 0; e < 4; ++e) d[n][e] = p.d[(g + 8 * (e / 2)) * kColumns + 8 * n + 2 * t + e % 2];
  }
  const auto b = simt::MatrixAt(shared + 2048, 1024, kTerms * 128);
  uint32_t a[kTerms / 16][4];
  for (int step = 0; step < kTerms / 16; ++step) {
    for (int i = 0; i < 4; ++i) {
      const uint16_t* from = p.a + (g + 8 * (i % 2)) * kTerms + 16 * step + 2 * t + 8 * (i / 2);
      a[step][i] = from[0] | (uint32_t{from[1]} << 16);
    }
  }
  simt::WarpgroupFence();
  for (int step = 0; step < kTerms / 16; ++step) {
    const int bytes = kRowsOf == RowsOf::kColumns ? 32 * step : 2048 * step;
    simt::WarpgroupMma<kType, kRowsOf>(d, a[step], simt::Advance(b, bytes), true);
  }
  simt::WarpgroupCommit();
  simt::WarpgroupWait<0>();
  for (int n = 0; n < kN; ++n) {
    for (int e = 0; e < 4; ++e) p.d[(g + 8 * (e / 2)) * kColumns + 8 * n + 2 * t + e % 2] = d[n][e];
  }
}

template <DType kType, RowsOf kRowsOf, int kN>
void ExpectProduct() {
  constexpr int kColumns = 8 * kN;
  std::mt19937 random(5);
  // Small integers: every sum is exact.
  const auto draw = [&](size_t count) {
    std::vector<uint16_t> bits(count);
    for (uint16_t& x : bits) {
      const float value = static_cast<float>(static_cast<int>(random() % 17) - 8);
      x = kType == DType::kF16 ? ToHalf(value).bits : ToBFloat16(value).bits;
    }
    return bits;
  };
  const auto value = [](uint16_t x) {
    return kType == DType::kF16 ? ToFloat(Half{x}) : ToFloat(BFloat16{x});
  };
  const std::vector<uint16_t> a = draw(kRows * kTerms);
  const std::vector<uint16_t> b = draw(kTerms * kColumns);
  std::vector<float> sums(kRows * kColumns);
  for (float& x : sums) x = static_cast<float>(random() % 100);
  std::vector<float> expected = sums;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      for (int k = 0; k < kTerms; ++k) {
        expected[i * kColumns + j] += value(a[i * kTerms + k]) * value(b[k * kColumns + j]);
      }
    }
  }
  const auto device = OpenDevice(4);
  Array<uint16_t> device_a(*device, a);
  Array<uint16_t> device_b(*device, b);
  Array<float> d(*device, sums);
  device->Launch(ProductKernel<kType, kRowsOf, kN>,
                 {.threads = kThreads, .shared_bytes = 2048 + kTerms * kColumns * 2 * 2},
                 ProductParams{device_a.data(), device_b.data(), d.data()});
  EXPECT_EQ(d.Read(), expected);
}

TEST(Warpgroup, MmaIsAMatrixProduct) {
  ExpectProduct<DType::kBF16, RowsOf::kColumns, 8>();
  ExpectProduct<DType::kF16, RowsOf::kColumns, 16>();
  ExpectProduct<DType::kBF16, RowsOf::kTerms, 16>();
  ExpectProduct<DType::kF16, RowsOf::kTerms, 8>();
}

// -- kernels that a GPU would get wrong, sometimes ------------------------------------------------

enum class Fault {
  kNone,
  kSumsReadEarly,
  kCopyTooEarly,  // onto B, while it is read
  kCopyTooLate,   // of B, not waited for
};
struct FaultParams {
  const uint32_t* ones;  // [64, 64] bf16
  float* out;            // [2] of each product
  Fault fault;
};

TREADLE_KERNEL(simt::kWarpgroup) void FaultKernel(FaultParams p) {
  simt::AwaitEarlierLaunches();
  auto* shared = simt::DynamicShared<unsigned char>();
  const auto copy = [&] {
    for (int i = simt::Thread(); i < 512; i += simt::kWarpgroup) {
      simt::CopyAsync16(shared + simt::MatrixPiece(i / 8, i % 8), p.ones + 4 * i);
    }
    simt::CopyAsyncCommit();
  };
  copy();
  if (p.fault != Fault::kCopyTooLate) simt::CopyAsyncWait<0>();
  simt::AsyncFence();
  simt::SyncThreads();
  const auto b = simt::MatrixAt(shared, 1024, 0);
  const uint32_t a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float d[8][4];
  simt::WarpgroupFence();
  simt::WarpgroupMma<DType::kBF16, RowsOf::kColumns>(d, a, b, false);
  simt::WarpgroupCommit();
  if (p.fault == Fault::kCopyTooLate) simt::CopyAsyncWait<0>();
  if (p.fault == Fault::kCopyTooEarly) copy();
  if (p.fault == Fault::kSumsReadEarly && simt::Thread() == 0) *p.out = d[0][0];
  simt::WarpgroupWait<0>();
  if (p.fault != Fault::kSumsReadEarly && simt::Thread() == 0) *p.out = d[0][0];
  simt::CopyAsyncWait<0>();
}

bool IsRight(Fault fault, uint64_t seed) {
  const auto device = OpenDevice(seed);
  Array<uint32_t> ones(*device, std::vector<uint32_t>(64 * 32, 0x3f803f80u));
  Array<float> out(*device, 1);
  device->Launch(FaultKernel, {.threads = simt::kWarpgroup, .shared_bytes = 64 * 128},
                 FaultParams{ones.data(), out.data(), fault});
  return out.Read()[0] == 16.0f;
}

TEST(Warpgroup, WhatIsTouchedTooEarlyOrTooLateShowsUnderSomeSeed) {
  for (const Fault fault :
       {Fault::kNone, Fault::kSumsReadEarly, Fault::kCopyTooEarly, Fault::kCopyTooLate}) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 12; ++seed) wrong += IsRight(fault, seed) ? 0 : 1;
    if (fault == Fault::kNone) {
      EXPECT_EQ(wrong, 0);
    } else {
      EXPECT_GT(wrong, 0) << static_cast<int>(fault);
    }
  }
}

struct BarrierParams {
  int* out;  // [2, 128]
  bool barrier;
};
// The two warpgroups take different numbers of steps.
TREADLE_KERNEL(256) void GroupBarrierKernel(BarrierParams p) {
  simt::AwaitEarlierLaunches();
  auto* slot = simt::DynamicShared<int>();
  const int group = simt::Thread() / simt::kWarpgroup;
  const int own = simt::Thread() % simt::kWarpgroup;
  int sum = 0;
  for (int round = 0; round < 3 + group; ++round) {
    slot[simt::Thread()] = own + round;
    if (p.barrier) simt::SyncWarpgroup();
    sum += slot[group * simt::kWarpgroup + (own + 64) % simt::kWarpgroup];
    if (p.barrier) simt::SyncWarpgroup();
  }
  p.out[simt::Thread()] = sum;
}

TEST(Warpgroup, BarriersAreOfOneGroup) {
  for (const bool barrier : {true, false}) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      const auto device = OpenDevice(seed);
      Array<int> out(*device, 256);
      device->Launch(GroupBarrierKernel, {.threads = 256, .shared_bytes = 1024},
                     BarrierParams{out.data(), barrier});
      const std::vector<int> got = out.Read();
      for (int t = 0; t < 256; ++t) {
        const int other = (t + 64) % simt::kWarpgroup;
        if (got[t] != (t < 128 ? 3 * other + 3 : 4 * other + 6)) ++wrong;
      }
    }
    EXPECT_EQ(wrong == 0, barrier);
  }
}

struct BadParams {
  int kind;
  const uint32_t* ones;
};
TREADLE_KERNEL(384) void BadKernel(BadParams p) {
  simt::AwaitEarlierLaunches();
  auto* shared = simt::DynamicShared<unsigned char>();
  simt::CopyAsync16(shared + 16 * simt::Thread(), p.ones);
  simt::CopyAsyncCommit();
  simt::CopyAsyncWait<0>();
  if (p.kind != 1) simt::AsyncFence();
  simt::SyncThreads();
  const auto b = simt::MatrixAt(shared + (p.kind == 2 ? 1024 : 0), 1024, 0);
  const uint32_t a[4] = {};
  float d[8][4] = {};
  if (p.kind == 4 && simt::Warp() == 3) return;
  if (p.kind == 5 && simt::Warp() == 3) return;
  if (p.kind == 5 || p.kind == 8) simt::SyncWarpgroup();
  if (p.kind != 0) simt::WarpgroupFence();
  int32_t sums[32][4] = {};
  if (p.kind == 6) {
    simt::WarpgroupMmaS8(sums, a, b);
  } else if (p.kind == 7) {
    simt::WarpgroupMma<DType::kBF16, RowsOf::kColumns>(d, a, simt::ByteMatrixAt(shared, 128, 256),
                                                       false);
  } else {
    simt::WarpgroupMma<DType::kBF16, RowsOf::kColumns>(d, a, b, false);
  }
  simt::WarpgroupCommit();
  if (p.kind != 3) simt::WarpgroupWait<0>();
}

TEST(WarpgroupDeathTest, NamesWhatIsWrongWithAKernel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const char* const kWhat[] = {
      "no WarpgroupFence before it",
      "passed without an AsyncFence",
      "a matrix that ends outside of shared memory",
      "returned with products on their way",
      "issued different numbers of products",
      "a warp waits at SyncWarpgroup",
      "a matrix of int8 whose pieces change places",
      "not where 128-byte swizzle has them",
      "SyncWarpgroup by a third warpgroup",
  };
  for (int kind = 0; kind < static_cast<int>(std::size(kWhat)); ++kind) {
    EXPECT_DEATH(
        {
          const auto device = OpenDevice();
          Array<uint32_t> ones(*device, 64);
          const uint32_t threads = kind == 8 ? 384 : 256;
          device->Launch(BadKernel, {.threads = threads, .shared_bytes = 8192},
                         BadParams{kind, ones.data()});
          device->Synchronize().IgnoreError();
        },
        kWhat[kind]);
  }
}

}  // namespace
}  // namespace treadle::cuda
