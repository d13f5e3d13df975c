// Outputs that an op on the device refuses.
#include "kernels/cuda/rows/row_output.h"

#include <gtest/gtest.h>

namespace treadle::cuda {
namespace {

alignas(16) float g_memory[4 * 128];

Tensor Out(int64_t offset, DType dtype, int64_t cols, int64_t stride) {
  return {reinterpret_cast<std::byte*>(g_memory) + offset, dtype, 2, cols, stride};
}

TEST(RowOutput, FloatsMayReplaceTheInput) {
  const Tensor x = Out(0, DType::kF32, 65, 67);
  const RowOutput out = OutputOf(x, x);
  EXPECT_EQ(out.data, x.data);
  EXPECT_EQ(out.stride, 67);
  EXPECT_EQ(out.dtype, DType::kF32);
}

TEST(RowOutput, RowsOf16BitsAreApartAndAligned) {
  const Tensor x = Out(0, DType::kF32, 64, 64);  // 512 bytes
  const Tensor after = Out(512, DType::kF32, 64, 64);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    EXPECT_EQ(OutputOf(Out(512, dtype, 64, 72), x).stride, 72);
    EXPECT_EQ(OutputOf(Out(256, dtype, 64, 64), after).dtype, dtype);
    EXPECT_DEATH(OutputOf(Out(0, dtype, 64, 64), x), "end");
    EXPECT_DEATH(OutputOf(Out(496, dtype, 64, 64), x), "end");
    EXPECT_DEATH(OutputOf(Out(256, dtype, 64, 72), after), "end");
    EXPECT_DEATH(OutputOf(Out(512, dtype, 32, 64), x), "cols % 64");
    EXPECT_DEATH(OutputOf(Out(512, dtype, 64, 68), x), "stride % 8");
    EXPECT_DEATH(OutputOf(Out(520, dtype, 64, 64), x), "% 16");
  }
  EXPECT_DEATH(OutputOf(Out(512, DType::kI8, 64, 64), x), "kBF16");
}

}  // namespace
}  // namespace treadle::cuda
