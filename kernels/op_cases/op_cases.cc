#include "kernels/op_cases/op_cases.h"

#include <algorithm>

#include "kernels/op_cases/random.h"

namespace treadle {

#define TREADLE_DECLARE_ROW(name, parameters, arguments) extern const OpRow k##name##Row;
TREADLE_BACKEND_OPS(TREADLE_DECLARE_ROW)
#undef TREADLE_DECLARE_ROW

namespace {

#define TREADLE_ROW_OF(name, parameters, arguments) &k##name##Row,
constexpr const OpRow* kRows[] = {TREADLE_BACKEND_OPS(TREADLE_ROW_OF)};
#undef TREADLE_ROW_OF

const OpRow& RowOf(Op op) { return *kRows[static_cast<size_t>(op)]; }

}  // namespace

std::string_view Name(Op op) { return RowOf(op).name; }

std::span<const OpCase> OpCases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> cases;
    for (const OpRow* row : kRows) row->add_cases(cases);
    return cases;
  }();
  return all;
}

std::unique_ptr<OpRun> Prepare(const OpCase& op_case, Backend& backend, uint64_t seed) {
  auto run = std::make_unique<OpRun>(op_case, backend);
  RowOf(op_case.op).prepare(*run, SeedOf(op_case.name, seed));
  run->Reset();
  return run;
}

void OpRun::Reset() {
  Finish();
  for (GuardedTensor& tensor : tensors) tensor.Upload();
  if (cache != nullptr) cache->Upload();
  std::ranges::fill(samples, SampleResult());
  std::ranges::fill(shards, ShardSample());
}

const GuardedTensor& OpRun::tensor(std::string_view name) const {
  const auto found = std::ranges::find(tensors, name, &GuardedTensor::name);
  TREADLE_CHECK(found != tensors.end());
  return *found;
}

GuardedTensor& OpRun::AddForProducts(std::string_view name, int64_t rows, int64_t cols) {
  DType dtype = DType::kF32;
  if (op_case_.input_type) {
    const RandomMatrix matrix = MakeRandomMatrix(*FindWeightFormat("f32"), 1, cols, 1);
    const auto packed = backend_.Pack(matrix.source);
    TREADLE_CHECK(packed.ok());
    Finish();  // before the matrix goes
    const PackedMatrix* const weights[] = {packed->get()};
    dtype = backend_.InputType(weights);
  }
  return Add(name, Role::kOutput, rows, cols, dtype);
}

}  // namespace treadle
