#include "kernels/op_cases/op_cases.h"

#include <bit>
#include <cmath>

#include "kernels/op_cases/op_runs.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

struct OpRow {
  Op op;
  std::string_view name;
  op_runs::Factory make;
};
constexpr OpRow kOps[] = {
    {Op::kEmbed, "embed", op_runs::MakeEmbed},
    {Op::kRmsNorm, "rms_norm", op_runs::MakeNorm},
    {Op::kLayerNorm, "layer_norm", op_runs::MakeNorm},
    {Op::kMatMul, "matmul", op_runs::MakeMatMul},
    {Op::kRotateAndStoreKv, "rotate_and_store_kv", op_runs::MakeRotateAndStoreKv},
    {Op::kAttention, "attention", op_runs::MakeAttention},
    {Op::kSwiGlu, "swiglu", op_runs::MakeActivation},
    {Op::kGelu, "gelu", op_runs::MakeActivation},
    {Op::kGather, "gather", op_runs::MakeGather},
    {Op::kCopy, "copy", op_runs::MakeGather},
    {Op::kCopyPages, "copy_pages", op_runs::MakeCopyPages},
    {Op::kSample, "sample", op_runs::MakeSample},
    {Op::kSampleShard, "sample_shard", op_runs::MakeSampleShard},
};

const OpRow& RowOf(Op op) {
  const OpRow& row = kOps[static_cast<size_t>(op)];
  TREADLE_CHECK(row.op == op);
  return row;
}

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

absl::Status SameOutput(const OpCase& op_case, std::span<const float> expected,
                        std::span<const float> found, std::string_view how) {
  TREADLE_CHECK(expected.size() == found.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (SameBits(expected[i], found[i])) continue;
    return Internal(op_case.name, ": element ", i, " is ", std::hexfloat, found[i], " ", how,
                    ", expected ", expected[i]);
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view Name(Op op) { return RowOf(op).name; }

DType op_runs::OutputType(const OpCase& op_case, Backend& backend, int64_t cols) {
  if (!op_case.input_type) return DType::kF32;
  const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("f32"), 1, cols, 1);
  const auto packed = backend.Pack(matrix.source);
  TREADLE_CHECK(packed.ok());
  TREADLE_CHECK(backend.Synchronize().ok());  // before the matrix goes
  const PackedMatrix* const weights[] = {packed->get()};
  return backend.InputType(weights);
}

std::unique_ptr<OpRun> Prepare(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return RowOf(op_case.op).make(op_case, backend, SeedOf(op_case.name, seed));
}

absl::Status MatchesReference(const OpCase& op_case, Backend& backend, const Arithmetic& arithmetic,
                              uint64_t seed) {
  const auto reference = CreateReferenceBackend(arithmetic.compute);
  const auto expected_run = Prepare(op_case, *reference, seed);
  const auto run = Prepare(op_case, backend, seed);
  expected_run->Run();
  run->Run();
  const std::vector<float> expected = expected_run->Output();
  const std::vector<float> found = run->Output();
  const std::vector<float> tolerance = expected_run->Tolerance(arithmetic);
  TREADLE_CHECK(expected.size() == found.size() && expected.size() == tolerance.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (SameBits(expected[i], found[i])) continue;
    if (std::fabs(double{expected[i]} - found[i]) <= tolerance[i]) continue;
    return Internal(op_case.name, " on ", backend.description(), ": element ", i, " is ", found[i],
                    ", expected ", expected[i], " within ", tolerance[i]);
  }
  return run->CheckGuards();
}

absl::Status BatchInvariance(const OpCase& any_case, Backend& backend, Backend* other,
                             uint64_t seed) {
  OpCase op_case = any_case;
  op_case.outlier_rule = OutlierRule::kPerRow;
  const auto run = Prepare(op_case, backend, seed);
  run->Run();
  const std::vector<float> whole = run->Output();

  Random random(SeedOf(op_case.name, seed + 1));
  run->Reset();
  for (int64_t begin = 0; begin < run->rows();) {
    const int64_t left = run->rows() - begin;
    const int64_t count = 1 + random.Below(std::min<int64_t>(left, 1 + random.Below(40)));
    run->RunRows(begin, count);
    begin += count;
  }
  TREADLE_RETURN_IF_ERROR(SameOutput(op_case, whole, run->Output(), "when cut at random"));

  // If there are many rows, only some run alone, the others together.
  run->Reset();
  for (int64_t begin = 0; begin < run->rows();) {
    const int64_t left = run->rows() - begin;
    const bool alone = run->rows() <= 64 || random.Below(8) == 0;
    const int64_t count = alone ? 1 : std::min<int64_t>(left, 8);
    run->RunRows(begin, count);
    begin += count;
  }
  TREADLE_RETURN_IF_ERROR(SameOutput(op_case, whole, run->Output(), "row by row"));

  if (other == nullptr) return absl::OkStatus();
  const auto twin = Prepare(op_case, *other, seed);
  twin->Run();
  return SameOutput(op_case, whole, twin->Output(), Str("on ", other->description()));
}

}  // namespace treadle
