// The CPU backend's ops on packed weights, on every instruction set that can run here: against the
// reference, and bit for bit against itself (N1, N2).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"
#include "tests/kernels/cpu/cpu_setting.h"
#include "tests/kernels/op_checks.h"

namespace treadle {
namespace {

bool IsMine(const OpCase& c) { return c.format != nullptr && !c.slow; }

class CpuMatMulTest : public CpuSettingTest {};

TEST_P(CpuMatMulTest, MatchesTheReference) {
  auto backend = MakeBackend(2);
  int tried = 0;
  for (const OpCase& c : OpCases()) {
    if (!IsMine(c)) continue;
    ++tried;
    const absl::Status status = MatchesReference(c, *backend, GetParam().compute);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_GT(tried, 20);
}

TEST_P(CpuMatMulTest, BitsDoNotDependOnRowsOrThreads) {
  auto backend = MakeBackend(3), other = MakeBackend(1);
  for (const OpCase& c : OpCases()) {
    if (!IsMine(c)) continue;
    const absl::Status status = BatchInvariance(c, *backend, other.get());
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

// Against the smallest one, which all can run: what equals it is equal.
TEST_P(CpuMatMulTest, BitsDoNotDependOnTheInstructionSet) {
  const CpuIsa isa = SupportedIsas().front();
  if (SupportedIsas().size() < 2) GTEST_SKIP() << "this processor runs one instruction set only";
  if (isa == GetParam().isa) return;
  auto backend = MakeBackend(2);
  auto other = MakeCpuBackend({isa, GetParam().compute}, 2);
  for (const OpCase& c : OpCases()) {
    if (!IsMine(c)) continue;
    const absl::Status status = BatchInvariance(c, *backend, other.get());
    EXPECT_TRUE(status.ok()) << Name(isa) << ": " << status.ToString();
  }
}

// As a layer's, with coarse activations: ComputeMode::kBf16 and kMixed are for these.
std::unique_ptr<PackedMatrix> MustPack(Backend& backend, MatrixSource source) {
  source.of_layer = source.coarse = true;
  auto packed = backend.Pack(source);
  TREADLE_CHECK(packed.ok());
  return *std::move(packed);
}

// Row counts around every dispatch threshold (rows at once, direct or tiled), and k around the
// tiles.
TEST_P(CpuMatMulTest, EveryRowCountGivesTheSameBits) {
  auto backend = MakeBackend(2);
  constexpr int64_t kRows = 80;
  for (const WeightFormat& format : WeightFormats()) {
    for (const int64_t k : {256, 768, 1280, 1440}) {
      if (k % format.block != 0) continue;
      const int64_t n = 53;
      const RandomMatrix matrix = MakeRandomMatrix(format, n, k, 7);
      const auto packed = MustPack(*backend, matrix.source);
      std::vector<float> x(kRows * k), bias(n), all(kRows * n), some(kRows * n);
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i % 4099));
      for (int64_t i = 0; i < n; ++i) bias[i] = 0.01f * static_cast<float>(i);
      const auto run = [&](int64_t begin, int64_t count, std::vector<float>& out) {
        const Projection projection{
            packed.get(), bias.data(),
            DenseTensor(out.data(), DType::kF32, kRows, n).Rows(begin, count), false};
        backend->MatMul(DenseTensor(x.data(), DType::kF32, kRows, k).Rows(begin, count),
                        {&projection, 1});
      };
      run(0, kRows, all);
      for (const int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 32, 33, 47, 64}) {
        std::fill(some.begin(), some.end(), 0.0f);
        for (int64_t row = 0; row < kRows; row += count)
          run(row, std::min(count, kRows - row), some);
        EXPECT_EQ(0, std::memcmp(all.data(), some.data(), all.size() * sizeof(float)))
            << format.name << ", k = " << k << ", rows = " << count;
      }
    }
  }
}

// As experts have them: each projection its own rows, which begin anywhere.
TEST_P(CpuMatMulTest, ProjectionsOfSomeRowsGiveTheBitsOfAll) {
  auto backend = MakeBackend(3);
  constexpr int64_t kRows = 75, kCols = 256, kFeatures = 37;
  std::vector<float> x(kRows * kCols), all(kRows * kFeatures, 0.25f), some = all;
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i % 4099));
  const Tensor input = DenseTensor(x.data(), DType::kF32, kRows, kCols);
  for (const WeightFormat& format : WeightFormats()) {
    const RandomMatrix matrix = MakeRandomMatrix(format, kFeatures, kCols, 7);
    const auto packed = MustPack(*backend, matrix.source);
    const auto projection = [&](int64_t begin, int64_t count, std::vector<float>& out) {
      return Projection{packed.get(), nullptr,
                        DenseTensor(out.data(), DType::kF32, kRows, kFeatures).Rows(begin, count),
                        true, begin};
    };
    const Projection whole = projection(0, kRows, all);
    backend->MatMul(input, {&whole, 1});
    const Projection parts[] = {projection(0, 3, some), projection(3, 14, some),
                                projection(17, 16, some), projection(33, 42, some)};
    backend->MatMul(input, parts);
    EXPECT_EQ(all, some) << format.name;
  }
}

// Pairs of a gate and an up, of experts' rows and of more rows than are gated at a time: the bits
// of the products and of the gate after them.
TEST_P(CpuMatMulTest, GatedProductsGiveTheBitsOfOneAfterTheOther) {
  auto backend = MakeBackend(3);
  constexpr int64_t kCols = 256, kFeatures = 53;
  for (const WeightFormat& format : WeightFormats()) {
    const RandomMatrix gates = MakeRandomMatrix(format, kFeatures, kCols, 7);
    const RandomMatrix ups = MakeRandomMatrix(format, kFeatures, kCols, 8);
    const auto gate = MustPack(*backend, gates.source), up = MustPack(*backend, ups.source);
    // 1,031 rows would leave fewer than a tile.
    const bool long_one = format.name == std::string_view("q4_1") || format.name == "int8";
    const std::vector<std::vector<int64_t>> parts_of_rows = {
        {1}, {3, 14, 16, 42}, {long_one ? 1031 : 40}};
    for (const std::vector<int64_t>& parts : parts_of_rows) {
      const int64_t rows = std::accumulate(parts.begin(), parts.end(), int64_t{0});
      std::vector<float> x(rows * kCols), bias(kFeatures, 0.125f);
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * static_cast<float>(i % 4099));
      for (const auto by : {Backend::Gate::kSwiGlu, Backend::Gate::kGeGlu}) {
        std::vector<float> results[2];
        for (const bool gated : {false, true}) {
          std::vector<float> memory(3 * rows * kFeatures);
          Tensor tensors[3];
          for (int64_t i = 0; i < 3; ++i) {
            tensors[i] =
                DenseTensor(memory.data() + i * rows * kFeatures, DType::kF32, rows, kFeatures);
          }
          std::vector<Projection> pairs;
          int64_t first = 0;
          for (const int64_t count : parts) {
            pairs.push_back({gate.get(), bias.data(), tensors[0].Rows(first, count), false, first});
            pairs.push_back({up.get(), nullptr, tensors[1].Rows(first, count), false, first});
            first += count;
          }
          const Tensor input = DenseTensor(x.data(), DType::kF32, rows, kCols);
          if (gated) {
            backend->GatedMatMul(input, pairs, by, tensors[0], tensors[1], tensors[2]);
          } else {
            backend->MatMul(input, pairs);
            backend->Apply(by, tensors[0], tensors[1], tensors[2]);
          }
          results[gated].assign(memory.end() - rows * kFeatures, memory.end());
        }
        EXPECT_EQ(results[0], results[1]) << format.name << ", " << rows << " rows";
      }
    }
  }
}

// An activation that is not finite spoils its own row and no other.
TEST_P(CpuMatMulTest, ActivationsThatAreNotFiniteStayInTheirRow) {
  auto backend = MakeBackend(2);
  constexpr int64_t kRows = 9, kCols = 64, kFeatures = 20;
  for (const WeightFormat& format : WeightFormats()) {
    if (format.block > kCols) continue;
    const RandomMatrix matrix = MakeRandomMatrix(format, kFeatures, kCols, 3);
    const auto packed = MustPack(*backend, matrix.source);
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x(kRows * kCols, 0.5f), out(kRows * kFeatures);
      const Projection projection{packed.get(), nullptr,
                                  DenseTensor(out.data(), DType::kF32, kRows, kFeatures), false};
      const Tensor input = DenseTensor(x.data(), DType::kF32, kRows, kCols);
      backend->MatMul(input, {&projection, 1});
      const std::vector<float> clean = out;
      x[4 * kCols + 37] = bad;
      backend->MatMul(input, {&projection, 1});
      for (int64_t i = 0; i < kRows * kFeatures; ++i) {
        if (i / kFeatures == 4) continue;
        EXPECT_EQ(out[i], clean[i]) << format.name << " element " << i;
      }
      EXPECT_TRUE(std::isinf(bad) || std::isnan(out[4 * kFeatures])) << format.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuMatMulTest, EveryCpuSetting(), SettingName);

class CpuBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    if (SupportedIsas().empty()) GTEST_SKIP() << "this processor lacks AVX2";
  }
};

// Extreme codes: what saturates in 16 bits if a kernel is careless.
TEST_F(CpuBackendTest, ExtremeCodesDoNotSaturate) {
  const WeightFormat& format = *FindWeightFormat("q8_0");
  constexpr int64_t kCols = 64, kFeatures = 16;
  for (const uint8_t code : {0x80, 0x81, 0x7f}) {
    std::vector<uint8_t> data(kFeatures * format.RowBytes(kCols), code);
    for (size_t block = 0; block < data.size(); block += 34) {
      data[block] = 0x00;  // f16 1.0
      data[block + 1] = 0x3c;
    }
    for (const float sign : {1.0f, -1.0f}) {
      std::vector<float> x(kCols, sign * 127.0f), out(kFeatures);
      const float expected = sign * 127.0f * 64.0f * static_cast<int8_t>(code);
      for (const ComputeMode compute : {ComputeMode::kInt8, ComputeMode::kInt16}) {
        for (const CpuIsa isa : SupportedIsas()) {
          auto backend = MakeCpuBackend({isa, compute}, 1);
          const auto packed = MustPack(*backend, {&format,
                                                  reinterpret_cast<const std::byte*>(data.data()),
                                                  kFeatures,
                                                  kCols,
                                                  {},
                                                  false});
          const Projection projection{packed.get(), nullptr,
                                      DenseTensor(out.data(), DType::kF32, 1, kFeatures), false};
          backend->MatMul(DenseTensor(x.data(), DType::kF32, 1, kCols), {&projection, 1});
          for (const float value : out) EXPECT_EQ(value, expected) << Name(isa) << Name(compute);
        }
      }
    }
  }
}

TEST_F(CpuBackendTest, EmbedDecodesEveryFormatCanonically) {
  auto backend = CreateCpuBackend({.threads = 2});
  ASSERT_TRUE(backend.ok());
  constexpr int64_t kRows = 37, kCols = 256;
  for (const WeightFormat& format : WeightFormats()) {
    const RandomMatrix matrix = MakeRandomMatrix(format, kRows, kCols, 5);
    const auto packed = *(*backend)->Pack(matrix.source);
    // The K types' scales take a byte each instead of six bits. Formats without a layout of their
    // own have codes of four bits, scales of four bytes and perhaps a table.
    if (!format.apart()) {
      double bits = 1.03 * format.bits_per_weight;
      if (!format.codebook.empty()) {
        bits = std::max(bits, 4.3 + 32.0 / static_cast<double>(format.group));
      }
      EXPECT_LE(8.0 * static_cast<double>(packed->bytes()), 1024 + bits * 48 * kCols)
          << format.name;
    }
    const std::vector<int32_t> ids = {36, 0, 15, 16, 16};
    std::vector<float> out(ids.size() * kCols), expected(kCols);
    (*backend)->Embed(*packed, ids, 0, false, DenseTensor(out.data(), DType::kF32, 5, kCols));
    for (size_t i = 0; i < ids.size(); ++i) {
      DecodeSourceRow(matrix.source, ids[i], expected.data());
      EXPECT_EQ(0, std::memcmp(expected.data(), &out[i * kCols], kCols * sizeof(float)))
          << format.name << " row " << ids[i];
    }
  }
}

std::vector<float> Multiply(Backend& backend, const PackedMatrix& weight, std::vector<float>& x,
                            int64_t rows) {
  std::vector<float> out(static_cast<size_t>(rows * weight.n()));
  const Projection projection = {.weight = &weight,
                                 .out = DenseTensor(out.data(), DType::kF32, rows, weight.n())};
  backend.MatMul(DenseTensor(x.data(), DType::kF32, rows, weight.k()), {&projection, 1});
  return out;
}

// Coarse products and others of one call have the bits of either mode alone, and matrices without
// blocks of weights are none of either.
TEST_F(CpuBackendTest, MixedIsTwoModesSideBySide) {
  constexpr int64_t kFeatures = 45, kCols = 512, kRows = 41;
  Random random(3);
  std::vector<float> x(kRows * kCols);
  for (float& value : x) value = random.Normal();
  for (const char* const name : {"q4_1", "q8_0", "q6_k", "f16", "nf4"}) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat(name), kFeatures, kCols, 7);
    MatrixSource fine = matrix.source;
    fine.of_layer = true;
    for (const CpuIsa isa : SupportedIsas()) {
      const auto mixed = MakeCpuBackend({isa, ComputeMode::kMixed}, 2);
      const auto int8 = MakeCpuBackend({isa, ComputeMode::kInt8}, 2);
      const auto int12 = MakeCpuBackend({isa, ComputeMode::kInt12}, 2);
      const auto packed_fine = *mixed->Pack(fine);
      const auto packed_coarse = MustPack(*mixed, matrix.source);
      std::vector<float> first(kRows * kFeatures), second(kRows * kFeatures);
      const Projection both[] = {
          {.weight = packed_fine.get(),
           .out = DenseTensor(first.data(), DType::kF32, kRows, kFeatures)},
          {.weight = packed_coarse.get(),
           .out = DenseTensor(second.data(), DType::kF32, kRows, kFeatures)}};
      mixed->MatMul(DenseTensor(x.data(), DType::kF32, kRows, kCols), both);
      const auto by = [&](Backend& backend) {
        return Multiply(backend, *MustPack(backend, matrix.source), x, kRows);
      };
      EXPECT_EQ(first, by(*int12)) << name << " " << Name(isa);
      EXPECT_EQ(second, by(fine.format->apart() ? *int12 : *int8)) << name << " " << Name(isa);
    }
  }
}

// A block format that no backend knows, as a new row of the table is: it is multiplied by its
// codes, in any mode, with the bits of sums and of rows that every format promises.
TEST_F(CpuBackendTest, FormatsWithoutALayoutKeepTheirCodes) {
  constexpr int64_t kFeatures = 37, kCols = 512, kRows = 41;
  for (const WeightFormat& known : WeightFormats()) {
    if (known.group == 0) continue;
    WeightFormat format = known;
    format.name = "new";
    RandomMatrix matrix = MakeRandomMatrix(known, kFeatures, kCols, 7);
    matrix.source.format = &format;
    Random random(3);
    std::vector<float> x(kRows * kCols);
    for (float& value : x) value = random.Normal();
    for (const ComputeMode compute :
         {ComputeMode::kExact, ComputeMode::kInt16, ComputeMode::kInt12, ComputeMode::kInt8}) {
      auto reference = CreateReferenceBackend(compute);
      const auto expected = Multiply(*reference, *MustPack(*reference, matrix.source), x, kRows);
      std::vector<float> first;
      for (const CpuIsa isa : SupportedIsas()) {
        auto backend = MakeCpuBackend({isa, compute}, 2);
        const auto packed = MustPack(*backend, matrix.source);
        // At most 8 bits more than codes of four.
        EXPECT_LE(8.0 * static_cast<double>(packed->bytes()), 12.0 * 48 * kCols) << known.name;
        const std::vector<float> all = Multiply(*backend, *packed, x, kRows);
        for (size_t i = 0; i < all.size(); ++i) {
          ASSERT_NEAR(all[i], expected[i], 1e-4) << known.name << " " << Name(compute);
        }
        if (first.empty()) first = all;
        ASSERT_EQ(all, first) << known.name << " " << Name(compute) << " " << Name(isa);
        for (const int64_t rows : {1, 2, 3, 5, 8, 9, 17}) {
          const std::vector<float> some = Multiply(*backend, *packed, x, rows);
          ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
              << known.name << " " << Name(compute) << " rows " << rows;
        }
        std::vector<float> row(kCols), stored(kCols);
        const std::vector<int32_t> ids = {kFeatures - 1};
        backend->Embed(*packed, ids, 0, false, DenseTensor(row.data(), DType::kF32, 1, kCols));
        DecodeSourceRow(matrix.source, ids[0], stored.data());
        EXPECT_EQ(0, std::memcmp(row.data(), stored.data(), kCols * sizeof(float))) << known.name;
      }
    }
  }
}

TEST_F(CpuBackendTest, RefusesBadSources) {
  auto backend = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  std::vector<std::byte> data(4096);
  const std::vector<int32_t> twice = {0, 2};
  const MatrixSource odd{FindWeightFormat("q4_0"), data.data(), 2, 40, {}, false};
  const MatrixSource order{FindWeightFormat("q4_0"), data.data(), 2, 64, twice, false};
  const MatrixSource transposed{FindWeightFormat("q4_0"), data.data(), 2, 64, {}, true};
  const MatrixSource empty{FindWeightFormat("f32"), data.data(), 0, 64, {}, false};
  for (const MatrixSource* source : {&odd, &order, &transposed, &empty}) {
    EXPECT_EQ((*backend)->Pack(*source).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(CreateCpuBackend({.threads = -1}).ok());
}

TEST_F(CpuBackendTest, AllocatesAlignedZeros) {
  auto backend = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  auto huge = (*backend)->Allocate(size_t{1} << 40);  // never touched
  EXPECT_TRUE(!huge.ok() || huge->bytes() == size_t{1} << 40);
  auto buffer = (*backend)->Allocate(100);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(buffer->data()[i], std::byte{0});
  EXPECT_EQ((*backend)->Allocate(std::numeric_limits<size_t>::max()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

class IsaTest : public testing::Test {
 protected:
  void TearDown() override { unsetenv("TREADLE_CPU_ISA"); }
};

TEST_F(IsaTest, VariableForcesAndBadValueIsNamed) {
  for (const CpuIsa isa : SupportedIsas()) {
    setenv("TREADLE_CPU_ISA", std::string(Name(isa)).c_str(), 1);
    const auto chosen = ChooseIsa();
    ASSERT_TRUE(chosen.ok());
    EXPECT_EQ(*chosen, isa);
    auto backend = CreateCpuBackend({.threads = 1});
    ASSERT_TRUE(backend.ok());
    EXPECT_NE((*backend)->description().find(Name(isa)), std::string::npos);
  }
  setenv("TREADLE_CPU_ISA", "sse9", 1);
  const std::string message(ChooseIsa().status().message());
  EXPECT_NE(message.find("sse9"), std::string::npos);
  EXPECT_NE(message.find("avx2"), std::string::npos);
  EXPECT_FALSE(CreateCpuBackend({.threads = 1}).ok());
}

TEST_F(IsaTest, DefaultIsTheBest) {
  unsetenv("TREADLE_CPU_ISA");
  const auto isas = SupportedIsas();
  if (isas.empty()) GTEST_SKIP() << "this processor lacks AVX2";
  EXPECT_EQ(*ChooseIsa(), isas.back());
}

}  // namespace
}  // namespace treadle
