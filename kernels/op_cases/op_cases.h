// The op-case list: named cases of every Backend op that drive correctness tests and the kernel
// benchmark alike, on every backend.
//
//   for (const OpCase& c : OpCases()) Prepare(c, cpu, /*seed=*/1)->Run();  // a benchmark's body
//
// Inputs depend on (case, seed) only, so two backends get the same ones. Device buffers carry guard
// values around every output row; K/V slots that no sequence owns hold NaN. Caches are filled in
// the backend's key order (kernels/kv_view.h). An op's result is checked by the tests' op
// checks, to which an OpRun shows what it works on.
//
// An op's cases are one OpRow: its name, the cases, and how one is made ready.
//
// Thread safety: the list is constant; an OpRun is used by its backend's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/op_cases/guarded_tensor.h"
#include "kernels/op_cases/kv_case_cache.h"

namespace treadle {

#define TREADLE_OP_ENUMERATOR(name, parameters, arguments) k##name,
enum class Op : uint8_t { TREADLE_BACKEND_OPS(TREADLE_OP_ENUMERATOR) };
#undef TREADLE_OP_ENUMERATOR
#define TREADLE_OP_LISTED(name, parameters, arguments) Op::k##name,
inline constexpr Op kOps[] = {TREADLE_BACKEND_OPS(TREADLE_OP_LISTED)};
#undef TREADLE_OP_LISTED
std::string_view Name(Op op);  // "matmul"

// Fields that an op does not use keep their defaults.
struct OpCase {
  std::string name = {};  // unique: "matmul/q4_1/576x576,192,192/rows=8"
  Op op = Op::kRmsNorm;
  int64_t rows = 1;  // of activations; CopyPages: page copies
  int64_t cols = 0;  // features; MatMul: k; Sample: vocab; SampleShard: tokens of the shard

  bool in_place = false;  // norms, GeLU: out is x; SwiGlu, GeGlu: out is gate
  // As models run it: x of products, and what norms, activations and Attention leave for products
  // (of float weights), are of Backend::InputType's type; with 16 bits nothing is in place.
  bool input_type = false;

  // Embed, MatMul
  const WeightFormat* format = nullptr;
  std::vector<int64_t> outputs = {};  // MatMul: n of each projection; Embed: {table rows}
  bool bias = false;                  // LayerNorm and Route too
  bool accumulate = false;            // RmsNorm too
  bool row_order = false;             // the source's rows are permuted
  bool transposed = false;            // the source is [k, n] (dense formats)
  // Apart formats: weights per scale; 0: as MakeRandomMatrix chooses.
  int64_t scale_block = 0;
  // LLM.int8(): inputs hold outliers at 6.0 in some rows and not in others.
  float outlier_threshold = 6.0f;
  OutlierRule outlier_rule = OutlierRule::kPerRow;

  // MatMul: projection i reads and makes but [i rows / 4, (i + 2) rows / 4), as experts do.
  bool parts = false;

  // Route, Mix: experts of a row; SigmoidGate: 1 if it has one gate; GatedDelta: 1 if it has skips
  int64_t chosen = 0;
  bool normalize = false;               // Route
  bool sigmoid = false;                 // likewise
  bool scaled = false;                  // likewise: experts have scales
  int64_t groups = 1, used_groups = 1;  // likewise

  // RotateAndStoreKv, Attention, CopyPages; with states: Convolve, GatedDelta
  int64_t heads = 0;
  KvLayout kv = {};
  int64_t rotary_dims = 0;  // rotated elements per head; 0: no rotation
  std::vector<CaseSequence> sequences = {};
  bool silu = false;    // Convolve
  int64_t window = 0;   // Attention
  bool sloped = false;  // likewise (KvView::slopes)
  bool sunk = false;    // likewise (KvView::sinks)
  bool bf16 = false;    // the cache is one of ComputeMode::kBf16

  // Sample, SampleShard: how rows are drawn up.
  enum class Sampling : uint8_t {
    kGreedy,
    kPlain,
    kTopK,
    kTopPMinP,
    kPenalties,
    kLogprobs,
    kMixed
  };
  Sampling sampling = Sampling::kGreedy;

  // The rows of x that a projection of a MatMul reads. [begin, end)
  std::pair<int64_t, int64_t> RowsOf(size_t projection) const {
    const auto i = static_cast<int64_t>(projection);
    return parts ? std::pair(i * rows / 4, (i + 2) * rows / 4) : std::pair(int64_t{0}, rows);
  }

  bool bench = false;  // makes sense as a benchmark
  bool slow = false;   // not worth the time in a quick correctness run
};

std::span<const OpCase> OpCases();

// A random source matrix [n, k] in `format`: sensible blocks (finite random scales, some of them
// zero; random codes, none of them NaN). `bytes` and `constants` own what `source` points to.
// scale_block: of apart formats; 0: a row for int8 and fp8, 64 weights for the others.
struct RandomMatrix {
  std::vector<std::byte> bytes;
  std::vector<int32_t> row_order;
  std::unique_ptr<MatrixConstants> constants;  // of apart formats
  MatrixSource source;
};
RandomMatrix MakeRandomMatrix(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed,
                              int64_t scale_block = 0);

// A random matrix, packed by the backend.
struct PackedCase {
  RandomMatrix matrix;
  std::unique_ptr<PackedMatrix> packed;
};

// One case on one backend, set up once.
class OpRun {
 public:
  OpRun(const OpCase& op_case, Backend& backend) : op_case_(op_case), backend_(backend) {}
  OpRun(const OpRun&) = delete;
  ~OpRun() { Finish(); }  // results may be on their way to this object

  // The whole case: one call of the op. May be repeated; ops in place then work on their own
  // output.
  void Run() { RunRows(0, rows()); }
  // The op on rows [begin, begin + count) only, as if they were the whole batch; results land where
  // Run would put them.
  void RunRows(int64_t begin, int64_t count) { call(begin, count); }
  // Restores all inputs and outputs to their state after Prepare.
  void Reset();
  void Finish() const { TREADLE_CHECK(backend_.Synchronize().ok()); }

  const OpCase& op_case() const { return op_case_; }
  Backend& backend() const { return backend_; }
  int64_t rows() const { return op_case_.rows; }
  double bytes() const { return bytes_moved; }
  double operations() const { return operations_done; }

  // -- what its maker sets up, and checks look at
  // --------------------------------------------------
  GuardedTensor& Add(std::string_view name, Role role, int64_t rows, int64_t cols,
                     DType dtype = DType::kF32) {
    return tensors.emplace_back(backend_, name, role, rows, cols, dtype);
  }
  const GuardedTensor& tensor(std::string_view name) const;  // the first of this name
  // The cache, and the part of the batch in rows [begin, begin + count), which are counted from
  // `begin`; spans: what it points to.
  KvView ViewOf(int64_t begin, int64_t count, std::vector<SequenceSpan>& spans) const;
  // As Add, of an output that an op without weights leaves for products (OpCase::input_type).
  GuardedTensor& AddForProducts(std::string_view name, int64_t rows, int64_t cols);

  std::function<void(int64_t begin, int64_t count)> call;
  double bytes_moved = 0;      // of device memory that one Run must move
  double operations_done = 0;  // additions and multiplications of one Run

  std::deque<GuardedTensor> tensors;
  std::deque<PackedCase> weights;
  std::unique_ptr<KvCaseCache> cache;
  std::vector<int32_t> ids;  // Embed's and Gather's, Mix's places
  int32_t first_id = 0;
  std::vector<SampleResult> samples;
  std::vector<ShardSample> shards;

 private:
  const OpCase op_case_;
  Backend& backend_;
};

// CHECK-fails on an error of the backend: a case is always valid.
std::unique_ptr<OpRun> Prepare(const OpCase& op_case, Backend& backend, uint64_t seed);

// The row that an op's file of cases defines, as k<Op>Row; op_cases.cc looks for one of each op.
struct OpRow {
  std::string_view name;
  void (*add_cases)(std::vector<OpCase>& cases);
  // `run` has the case and the backend, and is uploaded afterwards.
  void (*prepare)(OpRun& run, uint64_t seed);
};

}  // namespace treadle
