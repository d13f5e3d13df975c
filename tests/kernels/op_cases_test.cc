// The op-case list on the reference itself, and that its checks are able to fail.
#include "kernels/op_cases/op_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "kernels/reference/reference_backend.h"
#include "tests/kernels/faulty_backend.h"
#include "tests/kernels/op_checks.h"

namespace treadle {
namespace {

// The reference is slow: small cases will do.
bool IsSmall(const OpCase& c) {
  return !c.slow && c.rows * c.cols <= 20000 && c.kv.page_size <= 16 && c.kv.head_dim <= 32;
}

TEST(OpCases, NamesAreUnique) {
  std::set<std::string> names;
  for (const OpCase& c : OpCases()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
}

TEST(OpCases, ReferenceIsBatchInvariant) {
  const auto exact = CreateReferenceBackend();
  const auto int8 = CreateReferenceBackend(ComputeMode::kInt8);
  const auto int16 = CreateReferenceBackend(ComputeMode::kInt16);
  for (const OpCase& c : OpCases()) {
    if (!IsSmall(c)) continue;
    EXPECT_EQ(BatchInvariance(c, *exact), absl::OkStatus());
    if (c.op == Op::kMatMul) {
      EXPECT_EQ(BatchInvariance(c, *int8), absl::OkStatus());
      EXPECT_EQ(BatchInvariance(c, *int16), absl::OkStatus());
    }
  }
}

const OpCase& Find(std::string_view name) {
  for (const OpCase& c : OpCases()) {
    if (c.name == name) return c;
  }
  ADD_FAILURE() << "no case " << name;
  return OpCases().front();
}

std::string Check(const OpCase& c, Faults faults) {
  FaultyBackend backend(std::move(faults));
  return std::string(MatchesReference(c, backend, ComputeMode::kExact).message());
}

TEST(OpCases, FaultsAreNoticed) {
  using testing::HasSubstr;
  const OpCase& norm = Find("rms_norm/33/rows=3");
  EXPECT_EQ(Check(norm, {}), "");
  EXPECT_THAT(
      Check(norm, {.rms_norm = [](Tensor, Tensor out) { out.Row<float>(2)[32] *= 1.0001f; }}),
      HasSubstr("element 98 is"));
  EXPECT_THAT(Check(norm, {.rms_norm = [](Tensor, Tensor out) { out.Row<float>(1)[5] = NAN; }}),
              HasSubstr("element 38 is nan"));
  EXPECT_THAT(Check(norm, {.rms_norm = [](Tensor, Tensor out) { out.Row<float>(0)[33] = 0; }}),
              HasSubstr("row 0 column 33 outside was written"));
  EXPECT_THAT(Check(norm, {.rms_norm = [](Tensor, Tensor out) { out.Row<float>(-1)[2] = 0; }}),
              HasSubstr("row -1 column 2 outside was written"));
  EXPECT_THAT(Check(norm, {.rms_norm = [](Tensor x, Tensor) { x.Row<float>(1)[0] += 1; }}),
              HasSubstr("row 1 column 0 of an input was changed"));

  const OpCase& attention = Find("attention/9x3x64/f16/page=16/mixed");
  EXPECT_EQ(Check(attention, {}), "");
  // Row 31 belongs to no sequence.
  EXPECT_THAT(
      Check(attention, {.attention = [](const KvView&, Tensor out) { out.Row<float>(31)[0] = 0; }}),
      HasSubstr("element 17856 is 0"));
  EXPECT_THAT(Check(attention,
                    {.attention = [](const KvView& kv, Tensor) { kv.pages[7] ^= std::byte{1}; }}),
              HasSubstr("K/V page"));
  EXPECT_THAT(Check(Find("copy_pages/f32"), {.copy_pages =
                                                 [](const KvLayout& layout, std::byte* pages) {
                                                   pages[layout.num_pages * layout.PageBytes()] =
                                                       std::byte{0};
                                                 }}),
              HasSubstr("K/V page"));
}

TEST(OpCases, DependenceOnNeighboursIsNoticed) {
  FaultyBackend norm({.rms_norm = [](Tensor x, Tensor out) {
    if (x.rows == 1) out.Row<float>(0)[0] = std::nextafter(out.Row<float>(0)[0], 0.0f);
  }});
  EXPECT_FALSE(BatchInvariance(Find("rms_norm/33/rows=17"), norm).ok());
  FaultyBackend attention({.attention = [](const KvView& kv, Tensor out) {
    for (const SequenceSpan& span : kv.sequences) {
      if (span.num_rows < 5) continue;
      float& value = out.Row<float>(span.first_row)[3];
      value = std::nextafter(value, 0.0f);
    }
  }});
  EXPECT_FALSE(BatchInvariance(Find("attention/9x3x64/f16/page=16/chunks"), attention).ok());
}

// The part of the case's outputs, if not nearly 0, that its tolerance catches when they move by
// `part` of their size.
double CaughtPart(const OpCase& c, const Arithmetic& arithmetic, double part) {
  TolerantReference reference(arithmetic);
  const auto run = Prepare(c, reference, 1);
  run->Run();
  const std::vector<float> output = Output(*run);
  const std::vector<float> tolerance = Tolerance(reference);
  EXPECT_EQ(output.size(), tolerance.size()) << c.name;
  double significant = 0;
  double caught = 0;
  for (size_t i = 0; i < output.size(); ++i) {
    if (std::isnan(output[i]) || std::fabs(output[i]) < 1e-2) continue;
    ++significant;
    caught += tolerance[i] < part * std::fabs(output[i]);
  }
  return significant == 0 ? 1 : caught / significant;
}

// Tolerances are neither zero where rounding is allowed nor so wide that nothing can fail: an
// output moved by 1 % of its size is outside of them nearly always.
TEST(OpCases, TolerancesCanFail) {
  for (const OpCase& c : OpCases()) {
    if (!IsSmall(c) || c.op == Op::kSample || c.op == Op::kSampleShard || c.op == Op::kCopyPages)
      continue;
    EXPECT_GE(CaughtPart(c, ComputeMode::kExact, 0.01), 0.95) << c.name;
  }
}

// With factors of 16 bits, of which outputs that cancel suffer more, a larger part of it.
TEST(OpCases, TolerancesOfMatrixUnitsCanFail) {
  for (OpCase c : OpCases()) {
    if (!IsSmall(c) || c.rows < 4) continue;
    if (c.op != Op::kAttention && (c.op != Op::kMatMul || c.outputs[0] < 40)) continue;
    if (c.kv.dtype == DType::kF16) {
      EXPECT_GE(CaughtPart(c, Arithmetic::MatrixUnits(DType::kF16), 0.03), 0.75) << c.name;
      c.kv.dtype = DType::kBF16;
    }
    EXPECT_GE(CaughtPart(c, Arithmetic::MatrixUnits(DType::kBF16), 0.2), 0.75) << c.name;
  }
}

// Inputs rounded to a type of 16 bits are within its own tolerances, and not within those of a
// better one.
TEST(OpCases, RoundedInputsAreToldApart) {
  const auto check = [](const OpCase& c, DType input, DType promised) {
    FaultyBackend backend({.input = input});
    return MatchesReference(c, backend, Arithmetic::MatrixUnits(promised));
  };
  for (OpCase c : OpCases()) {
    if (!IsSmall(c) || c.rows < 8) continue;
    // If there are few results, none may have come out far enough.
    if (c.op == Op::kMatMul && c.format->activations == ActivationPolicy::kFloat &&
        c.outputs[0] >= 40) {
      EXPECT_EQ(check(c, DType::kBF16, DType::kBF16), absl::OkStatus());
      EXPECT_EQ(check(c, DType::kF16, DType::kF16), absl::OkStatus());
      if (c.format->name == "f16") {  // other weights are rounded too, if the reference's are not
        EXPECT_NE(check(c, DType::kBF16, DType::kF16), absl::OkStatus()) << c.name;
      }
      EXPECT_NE(check(c, DType::kF16, DType::kF32), absl::OkStatus()) << c.name;
    }
    if (c.op == Op::kAttention && c.kv.dtype == DType::kF16) {
      EXPECT_EQ(check(c, DType::kF16, DType::kF16), absl::OkStatus());
      EXPECT_NE(check(c, DType::kBF16, DType::kF16), absl::OkStatus()) << c.name;
      c.kv.dtype = DType::kBF16;
      EXPECT_EQ(check(c, DType::kBF16, DType::kBF16), absl::OkStatus());
      c.kv.dtype = DType::kF32;
      EXPECT_NE(check(c, DType::kF16, DType::kF16), absl::OkStatus()) << c.name;
    }
  }
}

// int8 activations differ from float ones, and from those of 16 bits, by far more than the
// tolerances allow; so do those of 12 bits, which are for nibbles alone.
TEST(OpCases, ComputeModesAreToldApart) {
  const auto int8 = CreateReferenceBackend(ComputeMode::kInt8);
  const auto int12 = CreateReferenceBackend(ComputeMode::kInt12);
  for (const OpCase& c : OpCases()) {
    if (c.op != Op::kMatMul || c.format->group == 0 || c.slow || c.rows != 4) continue;
    EXPECT_EQ(MatchesReference(c, *int8, ComputeMode::kInt8), absl::OkStatus());
    EXPECT_NE(MatchesReference(c, *int8, ComputeMode::kExact), absl::OkStatus()) << c.name;
    EXPECT_NE(MatchesReference(c, *int8, ComputeMode::kInt16), absl::OkStatus()) << c.name;
    EXPECT_EQ(MatchesReference(c, *int12, ComputeMode::kInt16).ok(), !c.format->nibbles) << c.name;
  }
}

}  // namespace
}  // namespace treadle
