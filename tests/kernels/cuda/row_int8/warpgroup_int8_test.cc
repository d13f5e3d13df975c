// Products of int8 of warpgroups in the emulation: against plain sums, with B written element by
// element where PTX's canonical layout has it; and kernels that touch too early what products read.
#include "kernels/cuda/row_int8/warpgroup_int8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "tests/kernels/cuda/runtime/emulated_array.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 2 * simt::kWarpgroup;
constexpr int kRows = 128;
constexpr int kTerms = 64;  // two products
constexpr int kColumns = 256;

struct ProductParams {
  const int8_t* a;  // [128, kTerms]
  const int8_t* b;  // [kTerms, kColumns]
  int32_t* d;       // [128, kColumns]
  // Bytes between two pieces ("core matrices"), as the matrix says and as it is.
  int next_terms, next_columns;
};

// The layout, written out: 8 columns of 16 terms make 128 bytes; see PTX, "Shared memory matrix
// layout", without swizzling, K-major. At 1024 bytes into shared memory.
TREADLE_HOST_DEVICE int ByteOf(const ProductParams& p, int k, int n) {
  return 1024 + k / 16 * p.next_terms + n / 8 * p.next_columns + n % 8 * 16 + k % 16;
}

TREADLE_KERNEL(kThreads) void ProductKernel(ProductParams p) {
  simt::AwaitEarlierLaunches();
  auto* shared = simt::DynamicShared<unsigned char>();
  for (int i = simt::Thread(); i < kTerms * kColumns; i += kThreads) {
    shared[ByteOf(p, i / kColumns, i % kColumns)] = static_cast<unsigned char>(p.b[i]);
  }
  simt::AsyncFence();
  simt::SyncThreads();
  const int g = simt::Warp() * 16 + simt::Lane() / 4;
  const int t = simt::Lane() % 4;
  const auto at = [&](int n, int e) {
    return (g + 8 * (e / 2)) * kColumns + 8 * n + 2 * t + e % 2;
  };
  int32_t d[32][4];
  for (int i = 0; i < 128; ++i) d[i / 4][i % 4] = p.d[at(i / 4, i % 4)];
  uint32_t a[2][4];
  for (int i = 0; i < 8; ++i) {
    const int8_t* from = p.a + (g + 8 * (i % 2)) * kTerms + 32 * (i / 4) + 4 * t + i % 4 / 2 * 16;
    a[i / 4][i % 4] = 0;
    for (int e = 0; e < 4; ++e) a[i / 4][i % 4] |= uint32_t{static_cast<uint8_t>(from[e])} << 8 * e;
  }
  const auto b = simt::ByteMatrixAt(shared + 1024, p.next_terms, p.next_columns);
  simt::WarpgroupFence();
  simt::WarpgroupMmaS8(d, a[0], b);
  simt::WarpgroupMmaS8(d, a[1], simt::Advance(b, 2 * p.next_terms));
  simt::WarpgroupCommit();
  simt::WarpgroupWait<0>();
  for (int i = 0; i < 128; ++i) p.d[at(i / 4, i % 4)] = d[i / 4][i % 4];
}

// The units' layout of row_int8_kernels.h, and one in which all columns of 16 terms lie together.
TEST(WarpgroupInt8, MmaIsAMatrixProduct) {
  std::mt19937 random(6);
  const auto draw = [&](size_t count) {
    std::vector<int8_t> codes(count);
    for (int8_t& x : codes) x = static_cast<int8_t>(random());
    return codes;
  };
  std::vector<int8_t> a = draw(kRows * kTerms);
  std::vector<int8_t> b = draw(kTerms * kColumns);
  std::fill_n(a.begin(), kTerms, -128);
  for (int k = 0; k < kTerms; ++k) b[k * kColumns] = -128;
  std::vector<int32_t> sums(kRows * kColumns);
  // Sums that no float has.
  for (int32_t& x : sums) x = static_cast<int32_t>(random() % (1u << 31)) - (1 << 30);
  std::vector<int32_t> expected = sums;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      for (int k = 0; k < kTerms; ++k) {
        expected[i * kColumns + j] += a[i * kTerms + k] * b[k * kColumns + j];
      }
    }
  }
  for (const auto& [next_terms, next_columns] : {std::pair{128, 512}, {128 * 32, 128}}) {
    const auto device = OpenDevice(4);
    Array<int8_t> device_a(*device, a);
    Array<int8_t> device_b(*device, b);
    Array<int32_t> d(*device, sums);
    device->Launch(
        ProductKernel, {.threads = kThreads, .shared_bytes = 1024 + kTerms * kColumns},
        ProductParams{device_a.data(), device_b.data(), d.data(), next_terms, next_columns});
    EXPECT_EQ(d.Read(), expected) << next_terms;
  }
}

enum class Fault {
  kNone,
  kSumsReadEarly,
  kWeightsChangedEarly,
  kCopyTooEarly,
};
struct FaultParams {
  const uint32_t* ones;  // [256 * 32 / 4]
  int32_t* out;
  Fault fault;
};
// Two products, the second issued before the first is waited for.
TREADLE_KERNEL(simt::kWarpgroup) void FaultKernel(FaultParams p) {
  simt::AwaitEarlierLaunches();
  auto* shared = simt::DynamicShared<unsigned char>();
  const auto copy = [&] {
    for (int i = simt::Thread(); i < 512; i += simt::kWarpgroup) {
      simt::CopyAsync16(shared + 16 * i, p.ones + 4 * i);
    }
    simt::CopyAsyncCommit();
  };
  copy();
  simt::CopyAsyncWait<0>();
  simt::AsyncFence();
  simt::SyncThreads();
  const auto b = simt::ByteMatrixAt(shared, simt::kBytePiece, 2 * simt::kBytePiece);
  uint32_t a[2][4] = {{0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u},
                      {0x02020202u, 0x02020202u, 0x02020202u, 0x02020202u}};
  int32_t d[32][4] = {};
  for (int i = 0; i < 2; ++i) {
    simt::Pin(a[i]);
    simt::WarpgroupFence();
    simt::WarpgroupMmaS8(d, a[i], b);
    simt::WarpgroupCommit();
  }
  if (p.fault == Fault::kWeightsChangedEarly) a[0][0] = 0;
  simt::WarpgroupWait<1>();
  a[0][0] = 0;
  if (p.fault == Fault::kWeightsChangedEarly) a[1][0] = 0;
  if (p.fault == Fault::kCopyTooEarly) copy();
  if (p.fault == Fault::kSumsReadEarly && simt::Thread() == 0) *p.out = d[0][0];
  simt::WarpgroupWait<0>();
  if (p.fault != Fault::kSumsReadEarly && simt::Thread() == 0) *p.out = d[0][0];
  simt::CopyAsyncWait<0>();
}

TEST(WarpgroupInt8, WhatProductsReadMustStay) {
  for (const Fault fault :
       {Fault::kNone, Fault::kSumsReadEarly, Fault::kWeightsChangedEarly, Fault::kCopyTooEarly}) {
    int wrong = 0;
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      const auto device = OpenDevice(seed);
      Array<uint32_t> ones(*device, std::vector<uint32_t>(2048, 0x01010101u));
      Array<int32_t> out(*device, 1);
      device->Launch(FaultKernel, {.threads = simt::kWarpgroup, .shared_bytes = 8192},
                     FaultParams{ones.data(), out.data(), fault});
      wrong += out.Read()[0] == 32 + 64 ? 0 : 1;
    }
    EXPECT_EQ(wrong > 0, fault != Fault::kNone) << static_cast<int>(fault);
  }
}

}  // namespace
}  // namespace treadle::cuda
