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

KvView OpRun::ViewOf(int64_t begin, int64_t count, std::vector<SequenceSpan>& spans) const {
  const std::vector<CaseSequence>& sequences = op_case_.sequences;
  spans.clear();
  int64_t row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int64_t first = std::max(row, begin);
    const int64_t end = std::min(row + sequences[s].rows, begin + count);
    if (sequences[s].live && first < end) {
      spans.push_back(
          {.first_row = static_cast<int32_t>(first - begin),
           .num_rows = static_cast<int32_t>(end - first),
           .first_position = static_cast<int32_t>(sequences[s].first_position + first - row),
           .pages = cache->PagesOf(s)});
    }
    row += sequences[s].rows;
  }
  return {.layout = cache->layout(),
          .pages = cache->pages(),
          .sequences = spans,
          .window = op_case_.window};
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
