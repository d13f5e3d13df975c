// Rows of floats from and to the types that weights are stored in.
#include "kernels/cuda/dense/dense_kernels.h"
#include "kernels/cuda/rows/row_output.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

using simt::Words4;

constexpr int kThreads = 256;
constexpr int kGroup = 8;  // elements of a thread: 16 bytes of a 16-bit type

struct ConvertParams {
  const float* x;
  int64_t x_stride;
  uint16_t* out;
  int64_t stride;
  int64_t groups;  // of all rows
  int32_t cols;
  int32_t aligned;  // rows of x begin at multiples of 16 bytes
  int32_t bf16;
};

TREADLE_KERNEL(kThreads) void ConvertKernel(ConvertParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t group = int64_t{simt::BlockX()} * kThreads + simt::Thread();
  if (group >= p.groups) return;
  const int64_t row_groups = p.stride / kGroup;
  const int64_t row = group / row_groups;
  const int column = static_cast<int>(group % row_groups) * kGroup;
  const float* x = p.x + row * p.x_stride + column;
  float values[kGroup];
  if (p.aligned != 0 && column + kGroup <= p.cols) {
    TREADLE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float four[4];
      simt::LoadFloats(x + 4 * i, four);
      TREADLE_UNROLL
      for (int e = 0; e < 4; ++e) values[4 * i + e] = four[e];
    }
  } else {
    TREADLE_UNROLL
    for (int i = 0; i < kGroup; ++i) values[i] = column + i < p.cols ? x[i] : 0.0f;
  }
  uint32_t packed[kGroup / 2];
  TREADLE_UNROLL
  for (int i = 0; i < kGroup / 2; ++i) {
    packed[i] = simt::Pack16(p.bf16 != 0, values[2 * i], values[2 * i + 1]);
  }
  *reinterpret_cast<Words4*>(p.out + row * p.stride + column) = {packed[0], packed[1], packed[2],
                                                                 packed[3]};
}

TREADLE_DEVICE float Decode(const EmbedProduct& p, int64_t at) {
  if (p.dtype == DType::kF32) return static_cast<const float*>(p.table)[at];
  const uint16_t bits = static_cast<const uint16_t*>(p.table)[at];
  return p.dtype == DType::kBF16 ? simt::FromBf16(bits) : simt::FromF16(bits);
}

TREADLE_KERNEL(kThreads) void EmbedKernel(EmbedProduct p) {
  EmbedRow(p.rows, [&](int64_t row, int column) { return Decode(p, row * p.stride + column); });
}

}  // namespace

void LaunchConvert(Device& device, const Tensor& x, DType dtype, uint16_t* out, int64_t stride) {
  ConvertParams params;
  params.x = static_cast<const float*>(x.data);
  params.x_stride = x.stride;
  params.out = out;
  params.stride = stride;
  params.groups = x.rows * (stride / kGroup);
  params.cols = static_cast<int32_t>(x.cols);
  params.aligned = x.stride % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  params.bf16 = dtype == DType::kBF16;
  LaunchShape shape;
  shape.grid_x = static_cast<uint32_t>((params.groups + kThreads - 1) / kThreads);
  shape.threads = kThreads;
  device.Launch(ConvertKernel, shape, params);
}

void LaunchDenseEmbed(Device& device, const EmbedProduct& embed) {
  device.Launch(EmbedKernel,
                {.grid_x = static_cast<uint32_t>(embed.rows.rows), .threads = kThreads}, embed);
}

}  // namespace treadle::cuda
