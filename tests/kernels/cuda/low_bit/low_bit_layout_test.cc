// How low-bit matrices lie on the device, and their canonical values bit by bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tests/kernels/cuda/low_bit/low_bit_gpu.h"

namespace treadle::cuda {
namespace {

using ::testing::HasSubstr;

// The value of the code of a weight, without constants.
float CodeValue(const MatrixSource& source, int64_t row, int64_t i) {
  const WeightFormat& format = *source.format;
  if (format.apart()) {
    uint8_t code;
    UnpackCodes(format, source.data, row * source.k + i, 1, &code);
    return CodebookOf(source)[code];
  }
  CodeGroup group;
  format.codes(source.data + row * format.RowBytes(source.k), i / format.group, group);
  return group.codes[i % format.group];
}

// Part that lane l must hold of a fragment of A (kernels/cuda/runtime/simt.h): half h of register r
// of product j is feature g or, of odd registers, g + 8, and column 2t + h or, of registers 2 and
// 3, 2t + 8 + h of the instruction, which are elements h and 2 + h of ColumnOf.
TEST(LowBitLayout, CodesLieInFragmentOrder) {
  for (const char* name : {"nf4", "fp8", "q6_k", "q4_0", "gptq4"}) {
    constexpr int64_t kCols = 256;
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 32, kCols, 1);
    LowBitGpu gpu(DType::kBF16);
    const auto packed = gpu.family().Pack(matrix.source).value();
    const LowBitView& w = static_cast<const LowBitMatrix&>(*packed).view();
    ASSERT_EQ(w.steps, 4);
    const auto words = gpu.Download(w.codes, 2 * w.steps * StepWords(w.bits));
    const auto values = gpu.Download(w.values, 256);
    for (int i = 0; i < 32 * kCols; ++i) {
      const int h = i % 2, r = i / 2 % 4, j = i / 8 % 4, lane = i / 32 % 32, step = i / 1024;
      // Words of a lane follow each other, in planes of four words for 32 lanes.
      const int word = w.bits == 4 ? j : 2 * j + r / 2;
      const int shift = w.bits == 4 ? 8 * r + 4 * h : 16 * (r % 2) + 8 * h;
      const uint32_t stored =
          words[step * StepWords(w.bits) + word / 4 * 128 + lane * 4 + word % 4];
      const uint32_t code = stored >> shift & ((1u << w.bits) - 1);
      const int row = step / w.steps * 16 + lane / 4 + 8 * (r % 2);
      const int column = step % w.steps * 64 + ColumnOf(w.granule, j, lane % 4, r / 2 * 2 + h);
      ASSERT_EQ(values[code], CodeValue(matrix.source, row, column))
          << name << " feature " << row << " column " << column;
    }
  }
}

TEST(LowBitLayout, EmbedGivesCanonicalValues) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const WeightFormat* format : LowBitFormats()) {
      for (const Shape& shape : ShapesOf(*format)) {
        RandomMatrix matrix = MakeMatrix(*format, shape, 3);
        for (int64_t i = 0; i < shape.n; ++i) {
          matrix.row_order.push_back(static_cast<int32_t>((i + 1) % shape.n));
        }
        matrix.source.row_order = matrix.row_order;
        LowBitGpu gpu(dtype);
        const auto packed = gpu.family().Pack(matrix.source).value();
        std::vector<int32_t> ids = {-1, -2, -3};
        for (int32_t i = 0; i < shape.n; ++i) ids.push_back(i);
        const std::vector<int32_t> samples = {2, 0};
        std::vector<float> out(ids.size() * shape.k, kNan);
        float* at = gpu.Upload(out);
        const auto rows = static_cast<int64_t>(ids.size());
        gpu.family().Embed(*packed, {gpu.Upload(ids), gpu.Upload(samples), 0, shape.n, false,
                                     DenseTensor(at, DType::kF32, rows, shape.k)});
        ASSERT_TRUE(gpu.device().Synchronize().ok());
        out = gpu.Download(at, out.size());
        const Weights weights(matrix.source);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t id = ids[row] < -1 ? samples[-2 - ids[row]] : ids[row];
          for (int64_t i = 0; i < shape.k; ++i) {
            const float expected = id < 0 ? 0.0f : weights.values[id * shape.k + i];
            ASSERT_EQ(out[row * shape.k + i], expected)
                << format->name << " k " << shape.k << " row " << id << " column " << i;
          }
        }
      }
    }
  }
}

TEST(LowBitLayout, EmbedAccumulates) {
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("q4_k"), 4, 256, 3);
  LowBitGpu gpu(DType::kBF16);
  const auto packed = gpu.family().Pack(matrix.source).value();
  std::vector<float> out(2 * 300, 1.5f);
  float* at = gpu.Upload(out);
  const Tensor rows = {at, DType::kF32, 2, 256, 300};
  gpu.family().Embed(*packed, {gpu.Upload(std::vector<int32_t>{3, -1}), nullptr, 0, 4, true, rows});
  out = gpu.Download(at, out.size());
  const Weights weights(matrix.source);
  for (int64_t i = 0; i < 300; ++i) {
    EXPECT_EQ(out[i], i < 256 ? 1.5f + weights.values[3 * 256 + i] : 1.5f);
    EXPECT_EQ(out[300 + i], 1.5f);
  }
}

// Columns that lie in another order than the features: floats, in order.
TEST(LowBitLayout, InputOrdersBecomeFloats) {
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("gptq4"), 5, 128, 3, 32);
  for (int32_t i = 0; i < 128; ++i) matrix.constants->input_order.push_back(127 - i);
  std::swap(matrix.constants->input_order[2], matrix.constants->input_order[90]);
  LowBitGpu gpu(DType::kBF16);
  const auto packed = gpu.family().Pack(matrix.source).value();
  EXPECT_GE(packed->bytes(), 5 * 128 * sizeof(float));
  std::vector<float> out(5 * 128);
  float* at = gpu.Upload(out);
  gpu.family().Embed(*packed, {gpu.Upload(std::vector<int32_t>{0, 1, 2, 3, 4}), nullptr, 0, 5,
                               false, DenseTensor(at, DType::kF32, 5, 128)});
  EXPECT_EQ(gpu.Download(at, out.size()), Weights(matrix.source).values);
}

// The bits of a weight, constants included, as low_bit.h promises.
TEST(LowBitLayout, BytesOfFormats) {
  const std::map<std::string_view, double> expected = {{"q4_0", 4.5},   {"q4_1", 5},  {"q5_0", 8.5},
                                                       {"q8_0", 8.5},   {"nf4", 4.5}, {"gptq4", 5},
                                                       {"iq4_nl", 4.5}, {"mxfp4", 5}};
  for (const auto& [name, bits] : expected) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), 256, 1024, 3);
    LowBitGpu gpu(DType::kBF16);
    const auto packed = gpu.family().Pack(matrix.source).value();
    const double tables = 4096;  // and what aligns them
    EXPECT_NEAR(static_cast<double>(packed->bytes()), bits / 8 * 256 * 1024, tables) << name;
  }
}

TEST(LowBitLayout, TakesQuantizedFormatsOfFloatActivations) {
  LowBitGpu gpu(DType::kBF16);
  for (const WeightFormat& format : WeightFormats()) {
    const RandomMatrix matrix = MakeRandomMatrix(format, 1, 256, 1);
    EXPECT_EQ(gpu.family().Takes(matrix.source), IsLowBit(format)) << format.name;
  }
}

TEST(LowBitLayout, RefusesSourcesThatAreNotValid) {
  LowBitGpu gpu(DType::kBF16);
  RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("nf4"), 4, 64, 1);
  matrix.constants->scales.pop_back();
  const auto packed = gpu.family().Pack(matrix.source);
  ASSERT_FALSE(packed.ok());
  EXPECT_THAT(std::string(packed.status().message()), HasSubstr("scales"));
}

}  // namespace
}  // namespace treadle::cuda
