// The emulation of a GPU, primitive by primitive against scalar models of what PTX says.
#include "kernels/cuda/runtime/simt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "kernels/dtype.h"
#include "tests/kernels/cuda/runtime/emulated_array.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace treadle::cuda {
namespace {

// -- indices, shuffles, ballots -------------------------------------------------------------------

struct IndexParams {
  int32_t* out;  // [grid][threads]
};
TREADLE_KERNEL(96) void IndexKernel(IndexParams p) {
  simt::AwaitEarlierLaunches();
  const int block =
      (simt::BlockZ() * simt::GridY() + simt::BlockY()) * simt::GridX() + simt::BlockX();
  p.out[block * simt::Threads() + simt::Thread()] =
      10000 * block + 100 * simt::Warp() + simt::Lane();
}

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  const auto device = OpenDevice();
  Array<int32_t> out(*device, 3 * 2 * 4 * 96);
  device->Launch(IndexKernel, {.grid_x = 3, .grid_y = 2, .grid_z = 4, .threads = 96},
                 IndexParams{out.data()});
  const auto got = out.Read();
  for (int i = 0; i < static_cast<int>(got.size()); ++i) {
    EXPECT_EQ(got[i], 10000 * (i / 96) + 100 * (i % 96 / 32) + i % 32) << i;
  }
}

#if defined(__SANITIZE_ADDRESS__)
struct StackParams {
  uintptr_t* out;  // [threads]
};
TREADLE_KERNEL(96) void StackKernel(StackParams p) {
  simt::AwaitEarlierLaunches();
  int here = 0;
  p.out[simt::Thread()] = reinterpret_cast<uintptr_t>(&here);
}

// Whatever is mapped where a stack was may be used.
TEST(Simt, StacksLeaveNoMarks) {
  const auto device = OpenDevice();
  Array<uintptr_t> out(*device, 96);
  std::thread([&] {
    device->Launch(StackKernel, {.threads = 96}, StackParams{out.data()});
    ASSERT_EQ(device->Synchronize(), absl::OkStatus());
  }).join();
  constexpr size_t kAbove = 4096;  // the kernel's frame, and those of its callers
  const auto stacks = out.Read();
  for (int t = 16; t < 64; ++t) {  // those that have so much above them (Fiber's color)
    EXPECT_EQ(__asan_region_is_poisoned(reinterpret_cast<void*>(stacks[t]), kAbove), nullptr) << t;
  }
}
#endif

struct ExchangeParams {
  const int32_t* lanes;    // [32] lane to read
  const uint64_t* values;  // [64]
  uint64_t* out;           // [5][64]
  int amount;
};
TREADLE_KERNEL(64) void ExchangeKernel(ExchangeParams p) {
  simt::AwaitEarlierLaunches();
  const int t = simt::Thread();
  const uint64_t value = p.values[t];
  const auto word = static_cast<uint32_t>(value);
  p.out[t] = simt::Shuffle(value, p.lanes[simt::Lane()]);
  p.out[64 + t] = simt::ShuffleXor(word, p.amount);
  p.out[128 + t] = simt::ShuffleUp(value, p.amount);
  p.out[192 + t] = simt::Ballot(value % 3 == 0);
  p.out[256 + t] = static_cast<uint64_t>(simt::WarpSum(static_cast<float>(simt::Lane())));
}

TEST(Simt, WarpExchanges) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> values(64);
  for (auto& v : values) v = random();
  std::vector<int32_t> lanes(32);
  for (auto& l : lanes) l = static_cast<int32_t>(random() % 32);
  for (const int amount : {0, 1, 5, 16, 31}) {
    const auto device = OpenDevice(random());
    Array<uint64_t> in(*device, values);
    Array<int32_t> from(*device, lanes);
    Array<uint64_t> out(*device, 5 * 64);
    device->Launch(ExchangeKernel, {.threads = 64},
                   ExchangeParams{from.data(), in.data(), out.data(), amount});
    const auto got = out.Read();
    for (int t = 0; t < 64; ++t) {
      const int w = t / 32 * 32;
      const int l = t % 32;
      uint64_t ballot = 0;
      for (int i = 0; i < 32; ++i) ballot |= uint64_t{values[w + i] % 3 == 0} << i;
      EXPECT_EQ(got[t], values[w + lanes[l]]);
      EXPECT_EQ(got[64 + t], values[w + (l ^ amount)] & 0xffffffffu);
      EXPECT_EQ(got[128 + t], values[l >= amount ? t - amount : t]);
      EXPECT_EQ(got[192 + t], ballot);
      EXPECT_EQ(got[256 + t], 31 * 32 / 2);
    }
  }
}

// -- matrix instructions --------------------------------------------------------------------------

enum class MmaKind { kBf16, kF16, kS8 };
struct MmaParams {
  const void* a;  // [16, k]
  const void* b;  // [8, k]
  void* d;        // [16, 8]: float or int32_t
  MmaKind kind;
};

// Fragments as the header lists them, element by element.
template <typename T>
TREADLE_DEVICE uint32_t Word(const T* matrix, int row, int column, int k) {
  uint32_t word = 0;
  for (int e = 0; e < static_cast<int>(4 / sizeof(T)); ++e) {
    word |= static_cast<uint32_t>(matrix[row * k + column + e]) << (8 * sizeof(T) * e);
  }
  return word;
}

TREADLE_KERNEL(32) void MmaKernel(MmaParams p) {
  simt::AwaitEarlierLaunches();
  const int g = simt::Lane() / 4;
  const int t = simt::Lane() % 4;
  uint32_t a[4];
  uint32_t b[2];
  if (p.kind == MmaKind::kS8) {
    const auto* pa = static_cast<const uint8_t*>(p.a);
    const auto* pb = static_cast<const uint8_t*>(p.b);
    for (int i = 0; i < 4; ++i) a[i] = Word(pa, g + 8 * (i % 2), 4 * t + 16 * (i / 2), 32);
    for (int i = 0; i < 2; ++i) b[i] = Word(pb, g, 4 * t + 16 * i, 32);
    auto* d = static_cast<int32_t*>(p.d);
    int32_t sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    simt::MmaS8(sums, a, b);
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
    return;
  }
  const auto* pa = static_cast<const uint16_t*>(p.a);
  const auto* pb = static_cast<const uint16_t*>(p.b);
  for (int i = 0; i < 4; ++i) a[i] = Word(pa, g + 8 * (i % 2), 2 * t + 8 * (i / 2), 16);
  for (int i = 0; i < 2; ++i) b[i] = Word(pb, g, 2 * t + 8 * i, 16);
  auto* d = static_cast<float*>(p.d);
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  if (p.kind == MmaKind::kBf16) {
    simt::MmaBf16(sums, a, b);
  } else {
    simt::MmaF16(sums, a, b);
  }
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sums[i];
}

template <typename Bits, typename Sum>
void CheckMma(MmaKind kind, int k, const std::function<Bits(std::mt19937&)>& draw,
              const std::function<Sum(Bits)>& decode) {
  std::mt19937 random(11);
  std::vector<Bits> a(16 * k);
  std::vector<Bits> b(8 * k);
  for (auto& x : a) x = draw(random);
  for (auto& x : b) x = draw(random);
  std::vector<Sum> sums(16 * 8);
  for (auto& x : sums) x = static_cast<Sum>(static_cast<int>(random() % 100) - 50);
  std::vector<Sum> expected = sums;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      for (int x = 0; x < k; ++x)
        expected[i * 8 + j] += decode(a[i * k + x]) * decode(b[j * k + x]);
    }
  }
  const auto device = OpenDevice(3);
  Array<Bits> da(*device, a);
  Array<Bits> db(*device, b);
  Array<Sum> d(*device, sums);
  device->Launch(MmaKernel, {.threads = 32}, MmaParams{da.data(), db.data(), d.data(), kind});
  EXPECT_EQ(d.Read(), expected);
}

TEST(Simt, MmaIsAMatrixProduct) {
  std::normal_distribution<float> normal;
  CheckMma<uint16_t, float>(
      MmaKind::kBf16, 16, [&](std::mt19937& r) { return ToBFloat16(normal(r)).bits; },
      [](uint16_t x) { return ToFloat(BFloat16{x}); });
  CheckMma<uint16_t, float>(
      MmaKind::kF16, 16, [&](std::mt19937& r) { return ToHalf(normal(r)).bits; },
      [](uint16_t x) { return ToFloat(Half{x}); });
  CheckMma<uint8_t, int32_t>(
      MmaKind::kS8, 32, [](std::mt19937& r) { return static_cast<uint8_t>(r()); },
      [](uint8_t x) { return int32_t{static_cast<int8_t>(x)}; });
}

struct LoadMatrixParams {
  const uint16_t* in;  // [32][8]
  uint32_t* out;       // [32][4]
  bool transposed;
};
TREADLE_KERNEL(32) void LoadMatrixKernel(LoadMatrixParams p) {
  simt::AwaitEarlierLaunches();
  auto* tile = simt::DynamicShared<uint16_t>();
  for (int e = 0; e < 8; ++e) tile[simt::Lane() * 8 + e] = p.in[simt::Lane() * 8 + e];
  simt::SyncWarp();
  uint32_t r[4];
  if (p.transposed) {
    simt::LoadMatrix4Transposed(r, tile + 8 * simt::Lane());
  } else {
    simt::LoadMatrix4(r, tile + 8 * simt::Lane());
  }
  for (int j = 0; j < 4; ++j) p.out[simt::Lane() * 4 + j] = r[j];
}

TEST(Simt, LoadMatrix) {
  std::vector<uint16_t> in(32 * 8);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  for (const bool transposed : {false, true}) {
    const auto device = OpenDevice();
    Array<uint16_t> from(*device, in);
    Array<uint32_t> out(*device, 32 * 4);
    device->Launch(LoadMatrixKernel, {.threads = 32, .shared_bytes = 512},
                   LoadMatrixParams{from.data(), out.data(), transposed});
    const auto got = out.Read();
    for (int l = 0; l < 32; ++l) {
      for (int j = 0; j < 4; ++j) {
        const int first =
            64 * j + (transposed ? 8 * (2 * (l % 4)) + l / 4 : 8 * (l / 4) + 2 * (l % 4));
        const int second = first + (transposed ? 8 : 1);
        EXPECT_EQ(got[l * 4 + j],
                  static_cast<uint32_t>(first) | (static_cast<uint32_t>(second) << 16));
      }
    }
  }
}

// -- asynchronous copies --------------------------------------------------------------------------

struct CopyParams {
  const uint32_t* in;  // [3][32][4]
  uint32_t* out;  // [4][32]: before any wait, after the first, after the second, of a zero fill
};
TREADLE_KERNEL(32) void CopyKernel(CopyParams p) {
  simt::AwaitEarlierLaunches();
  auto* tile = simt::DynamicShared<uint32_t>();
  const int l = simt::Lane();
  for (int group = 0; group < 2; ++group) {
    simt::CopyAsync16(tile + (group * 32 + l) * 4, p.in + (group * 32 + l) * 4);
    simt::CopyAsyncCommit();
  }
  p.out[l] = tile[l * 4];
  simt::CopyAsyncWait<1>();
  p.out[32 + l] = tile[l * 4];
  p.out[64 + l] = tile[(32 + l) * 4];
  simt::CopyAsync16(tile + l * 4, p.in + l * 4, false);
  simt::CopyAsyncCommit();
  simt::CopyAsyncWait<0>();
  p.out[96 + l] = tile[(32 + l) * 4] + tile[l * 4];
}

TEST(Simt, CopiesLandWhenTheyAreWaitedFor) {
  std::vector<uint32_t> in(2 * 32 * 4);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(i) + 1000;
  const auto device = OpenDevice();
  Array<uint32_t> from(*device, in);
  Array<uint32_t> out(*device, 4 * 32);
  device->Launch(CopyKernel, {.threads = 32, .shared_bytes = 1024},
                 CopyParams{from.data(), out.data()});
  const auto got = out.Read();
  for (int l = 0; l < 32; ++l) {
    EXPECT_EQ(got[l], 0xffffffffu);
    EXPECT_EQ(got[32 + l], in[l * 4]);
    EXPECT_EQ(got[64 + l], 0xffffffffu);
    EXPECT_EQ(got[96 + l], in[(32 + l) * 4]);
  }
}

// -- atomics, numbers -----------------------------------------------------------------------------

struct AtomicParams {
  uint32_t* words;  // [3]
};
TREADLE_KERNEL(64) void AtomicKernel(AtomicParams p) {
  simt::AwaitEarlierLaunches();
  simt::AtomicAdd(p.words, static_cast<uint32_t>(simt::Thread()));
  simt::AtomicOr(p.words + 1, 1u << simt::Lane());
  simt::AtomicMax(p.words + 2, static_cast<uint32_t>(simt::Thread() * 7 % 61));
}

TEST(Simt, Atomics) {
  const auto device = OpenDevice();
  Array<uint32_t> words(*device, 3);
  device->Launch(AtomicKernel, {.grid_x = 5, .threads = 64}, AtomicParams{words.data()});
  EXPECT_EQ(words.Read(), (std::vector<uint32_t>{5 * 63 * 64 / 2, 0xffffffffu, 60}));
}

TEST(Simt, Numbers) {
  EXPECT_EQ(simt::RoundHalfEven(2.5f), 2);
  EXPECT_EQ(simt::RoundHalfEven(-3.5f), -4);
  EXPECT_EQ(simt::RoundHalfEven(3e9f), 0x7fffffff);
  EXPECT_EQ(simt::RoundHalfEven(NAN), 0);
  EXPECT_EQ(simt::PickBytes(0x33221100u, 0x77665544u, 0x7042u), 0x77004422u);
  EXPECT_EQ(simt::FromF16(simt::ToF16(1e6f)), 65504.0f);
  EXPECT_EQ(simt::FromF16(simt::ToF16(-simt::Infinity())), -simt::Infinity());
  EXPECT_EQ(simt::PackBf16(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(simt::PackF16(1.0f, -2.0f), 0xc0003c00u);
}

}  // namespace
}  // namespace treadle::cuda
