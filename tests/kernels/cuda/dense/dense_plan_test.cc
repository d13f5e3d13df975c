// The host side of the dense family: the packed layout bit by bit, and the plans of launches.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "kernels/cuda/dense/dense_kernels.h"
#include "tests/kernels/cuda/product_matrices.h"

namespace treadle::cuda {
namespace {

// Row by row and element by element: canonical decode, order of rows, one rounding, zeros behind k.
TEST(DensePacking, IsTheCanonicalDecodeRoundedOnce) {
  for (const std::string_view format : {"f32", "f16", "bf16"}) {
    for (const bool transposed : {false, true}) {
      Weights weights(format, 13, 70, 18, transposed);
      std::vector<int32_t> order(13);
      std::iota(order.rbegin(), order.rend(), 0);
      weights.source.row_order = order;
      for (const DType dtype : kTypes) {
        const int64_t size = static_cast<int64_t>(SizeOf(dtype));
        std::vector<std::byte> packed(11 * 128 * size, std::byte{0x7f});
        PackDenseRows(weights.source, dtype, 2, 11, packed.data());
        for (int64_t row = 0; row < 11; ++row) {
          for (int64_t i = 0; i < 128; ++i) {
            const float x = i < 70 ? weights.values[(12 - 2 - row) * 70 + i] : 0.0f;
            const uint32_t expected = dtype == DType::kF32   ? std::bit_cast<uint32_t>(x)
                                      : dtype == DType::kF16 ? ToHalf(x).bits
                                                             : ToBFloat16(x).bits;
            uint32_t found = 0;
            std::memcpy(&found, &packed[(row * 128 + i) * size], size);
            ASSERT_EQ(found, expected)
                << format << " as " << Name(dtype) << " " << row << ", " << i;
          }
        }
      }
    }
  }
}

struct Gpu {
  std::string_view name;
  DenseLimits limits;
  size_t shared_bytes;  // of a multiprocessor; every block takes 1 KB of it for itself
  double bytes_per_us;  // of its memory
};
constexpr Gpu kGpus[] = {{"H200", {132, 227 << 10}, 228 << 10, 4.8e6},
                         {"A100", {108, 163 << 10}, 164 << 10, 2.0e6},
                         {"L40S", {142, 99 << 10}, 100 << 10, 0.86e6}};

// Every shape and row count has a tile that fits, reads each weight once, and keeps enough of them
// on their way: what memory delivers in a microsecond, its latency under load.
TEST(DenseTiles, FitTheirMultiprocessorAndSaturateMemory) {
  for (const Gpu& gpu : kGpus) {
    for (const int64_t features : {16, 1024, 4096, 6144, 28672, 128256}) {
      for (int64_t rows = 1; rows <= kDenseStreamRows; ++rows) {
        const DenseTile tile = ChooseDenseTile(features, rows, gpu.limits);
        EXPECT_GE(8 * tile.rows, rows);
        const size_t bytes = DenseStreamSharedBytes(tile);
        EXPECT_LE(bytes, gpu.limits.shared_bytes);
        const size_t blocks = gpu.shared_bytes / (bytes + 1024);
        EXPECT_GE(blocks, gpu.name == "H200" && rows <= 4 ? 2u : 1u);
        const size_t in_flight = blocks * kDenseParts * (tile.stages - 1) * 2048 * tile.features;
        EXPECT_GE(in_flight, gpu.bytes_per_us / gpu.limits.multiprocessors)
            << gpu.name << ", " << features << " features, " << rows << " rows";
      }
    }
  }
}

// All variants of the streaming kernel give the same bits, those for smaller GPUs, too.
TEST(DenseTiles, EveryGpuGetsTheSameBits) {
  constexpr int64_t kN = 150, kK = 192;
  const auto device = OpenDevice();
  const Weights weights("bf16", kN, kK, 30);
  const Buffer packed = device->Allocate(kN * kK * 2).value();
  device->CopyToDevice(packed.data(), weights.bytes.data(), kN * kK * 2);
  const Buffer x16 = device->Allocate(kDenseStreamRows * kK * 2).value();
  for (const int64_t rows : {1, 8, 16, 32}) {
    const Matrix x(*device, rows, kK, 0, 31);
    LaunchConvert(*device, x.view, DType::kBF16, reinterpret_cast<uint16_t*>(x16.data()), kK);
    std::vector<float> first;
    for (const bool one_multiprocessor : {false, true}) {
      for (const Gpu& gpu : kGpus) {
        const Matrix out(*device, rows, kN, kGap, 32);
        DenseProduct product;
        product.segments[0] = {{nullptr, out.view, false}, packed.data()};
        product.num_segments = 1;
        product.rows = static_cast<int32_t>(rows);
        product.k = kK;
        product.x = x16.data();
        product.x_stride = kK;
        DenseLimits limits = gpu.limits;
        if (one_multiprocessor) limits.multiprocessors = 1;
        LaunchDenseStream(*device, product, limits);
        const std::vector<float> now = out.Download();
        if (first.empty()) first = now;
        EXPECT_EQ(std::memcmp(now.data(), first.data(), now.size() * sizeof(float)), 0)
            << gpu.name << ", " << rows << " rows";
      }
    }
  }
}

}  // namespace
}  // namespace treadle::cuda
