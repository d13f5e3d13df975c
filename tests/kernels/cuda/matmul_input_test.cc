// Activations that come in the type that products round them to (Backend::InputType).
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/cuda/matmul.h"
#include "kernels/op_cases/op_cases.h"
#include "tests/kernels/cuda/product_matrices.h"

namespace treadle::cuda {
namespace {

// Around every border between kernels and tiles.
constexpr int64_t kRowCounts[] = {1, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 130};

class RoundedInput : public ::testing::TestWithParam<std::tuple<DType, bool>> {};

// They are read where they lie, whatever lies between rows, and give the bits of f32.
TEST_P(RoundedInput, GivesTheBitsOfFloats) {
  const auto [dtype, deterministic] = GetParam();
  constexpr int64_t kN = 40, kK = 192, kStride = kK + 24;
  const auto device = OpenDevice();
  const auto matmuls =
      MatMuls::Create(*device, {.dtype = dtype, .deterministic = deterministic}).value();
  std::vector<std::unique_ptr<PackedMatrix>> packed;
  for (const std::string_view format : {"f32", "q4_0", "q8_0"}) {
    packed.push_back(
        matmuls->Pack(MakeRandomMatrix(*FindWeightFormat(format), kN, kK, 28).source).value());
  }
  for (const int64_t rows : kRowCounts) {
    const Matrix x(*device, rows, kK, 0, 29);
    std::vector<uint16_t> rounded(static_cast<size_t>(rows * kStride), 0x7fff);  // a NaN
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < kK; ++i) {
        const float value = x.host[row * kK + i];
        rounded[row * kStride + i] =
            dtype == DType::kF16 ? ToHalf(value).bits : ToBFloat16(value).bits;
      }
    }
    const Buffer buffer = device->Allocate(rounded.size() * sizeof(uint16_t)).value();
    device->CopyToDevice(buffer.data(), rounded.data(), buffer.bytes());
    const Tensor x16 = {buffer.data(), dtype, rows, kK, kStride};
    for (const auto& weight : packed) {
      const Matrix expected(*device, rows, kN, 0, 30), found(*device, rows, kN, 0, 31);
      const Projection floats = {.weight = weight.get(), .out = expected.view};
      ASSERT_TRUE(matmuls->Multiply(x.view, {&floats, 1}).ok());
      const Projection projection = {.weight = weight.get(), .out = found.view};
      ASSERT_TRUE(matmuls->Multiply(x16, {&projection, 1}).ok());
      EXPECT_EQ(std::memcmp(found.Download().data(), expected.Download().data(), rows * kN * 4), 0)
          << weight->format().name << ", " << rows << " rows";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RoundedInput,
                         ::testing::Combine(::testing::Values(DType::kBF16, DType::kF16),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_deterministic" : "");
                         });

TEST(InputType, IsWhatEveryProductRoundsTo) {
  const auto device = OpenDevice();
  for (const DType dtype : kTypes) {
    const auto matmuls = MatMuls::Create(*device, {.dtype = dtype}).value();
    const auto pack = [&](std::string_view format, int64_t k, int64_t scale_block = 0) {
      const RandomMatrix matrix =
          MakeRandomMatrix(*FindWeightFormat(format), 16, k, 25, scale_block);
      return matmuls->Pack(matrix.source).value();
    };
    const auto dense = pack("f32", 128), codes = pack("q4_0", 128), int8 = pack("int8", 128);
    const auto odd = pack("bf16", 96), odd_codes = pack("q8_0", 32);
    const auto decoded = pack("nf4", 128, /*scale_block=*/8);  // multiplied as floats
    ASSERT_EQ(static_cast<const LowBitMatrix&>(*decoded).view().bits, 32);
    const auto type = [&](std::vector<const PackedMatrix*> weights) {
      return matmuls->InputType(weights);
    };
    EXPECT_EQ(type({dense.get()}), dtype);
    EXPECT_EQ(type({codes.get()}), dtype);
    EXPECT_EQ(type({dense.get(), codes.get(), dense.get()}), dtype);
    for (const PackedMatrix* floats : {int8.get(), odd.get(), odd_codes.get(), decoded.get()}) {
      EXPECT_EQ(type({floats}), DType::kF32) << floats->format().name;
    }
    EXPECT_EQ(type({dense.get(), int8.get()}), DType::kF32);
    EXPECT_EQ(type({decoded.get(), codes.get()}), DType::kF32);
    if (dtype == DType::kF32) continue;

    // Nothing else is taken.
    const Matrix x(*device, 2, 128, 8, 26);
    const Matrix out(*device, 2, 16, 0, 27);
    const auto multiply = [&](DType x_type, int64_t cols, int64_t stride, const PackedMatrix& w) {
      const Projection projection = {.weight = &w, .out = out.view};
      (void)matmuls->Multiply({x.view.data, x_type, 2, cols, stride}, {&projection, 1});
    };
    const DType other = dtype == DType::kF16 ? DType::kBF16 : DType::kF16;
    EXPECT_DEATH(multiply(dtype, 128, 128, *int8), "rounds");
    EXPECT_DEATH(multiply(dtype, 128, 128, *decoded), "rounds");
    EXPECT_DEATH(multiply(other, 128, 128, *dense), "dtype");
    EXPECT_DEATH(multiply(dtype, 96, 96, *odd), "cols % kDenseStep");
    EXPECT_DEATH(multiply(dtype, 128, 132, *dense), "stride % 8");
  }
}

}  // namespace
}  // namespace treadle::cuda
