// The op-case list: named cases of every Backend op that drive correctness tests and the kernel
// benchmark alike, on every backend.
//
//   for (const OpCase& c : OpCases()) if (!c.slow) EXPECT_TRUE(MatchesReference(c, cpu,
//   mode).ok()); auto run = Prepare(c, cpu, /*seed=*/1); run->Run();  // a benchmark's body
//
// Inputs depend on (case, seed) only, so two backends get the same ones. Device buffers carry guard
// values around every output row; K/V slots that no sequence owns hold NaN. Caches are filled in
// the backend's key order (kernels/kv_view.h) and compared element by element, whatever the order.
//
// Thread safety: the list is constant; an OpRun is used by its backend's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend.h"

namespace treadle {

enum class Op : uint8_t {
  kEmbed,
  kRmsNorm,
  kLayerNorm,
  kMatMul,
  kRotateAndStoreKv,
  kAttention,
  kSwiGlu,
  kGelu,
  kGather,
  kCopy,
  kCopyPages,
  kSample,
  kSampleShard,
};
std::string_view Name(Op op);  // "matmul"

// Consecutive rows of one sequence; with live = false rows that belong to none.
struct CaseSequence {
  int64_t rows = 1;
  int64_t first_position = 0;
  bool live = true;
};

// Fields that an op does not use keep their defaults.
struct OpCase {
  std::string name = {};  // unique: "matmul/q4_1/576x576,192,192/rows=8"
  Op op = Op::kRmsNorm;
  int64_t rows = 1;  // of activations; CopyPages: page copies
  int64_t cols = 0;  // features; MatMul: k; Sample: vocab; SampleShard: tokens of the shard

  bool in_place = false;  // norms, GeLU: out is x; SwiGlu: out is gate
  // As models run it: x of products, and what norms, activations and Attention leave for products
  // (of float weights), are of Backend::InputType's type; with 16 bits nothing is in place.
  bool input_type = false;

  // Embed, MatMul
  const WeightFormat* format = nullptr;
  std::vector<int64_t> outputs = {};  // MatMul: n of each projection; Embed: {table rows}
  bool bias = false;                  // LayerNorm too
  bool accumulate = false;
  bool row_order = false;   // the source's rows are permuted
  bool transposed = false;  // the source is [k, n] (dense formats)
  // Apart formats: weights per scale; 0: as MakeRandomMatrix chooses.
  int64_t scale_block = 0;
  // LLM.int8(): inputs hold outliers at 6.0 in some rows and not in others.
  float outlier_threshold = 6.0f;
  OutlierRule outlier_rule = OutlierRule::kPerRow;

  // RotateAndStoreKv, Attention, CopyPages
  int64_t heads = 0;
  KvLayout kv = {};
  int64_t rotary_dims = 0;  // rotated elements per head; 0: no rotation
  std::vector<CaseSequence> sequences = {};

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

  bool bench = false;  // makes sense as a benchmark
  bool slow = false;   // not worth the time in a quick correctness run
};

std::span<const OpCase> OpCases();

// How a backend computes, as far as tolerances depend on it.
struct Arithmetic {
  // NOLINTNEXTLINE(google-explicit-constructor): most backends differ in the mode alone
  constexpr Arithmetic(ComputeMode mode = ComputeMode::kExact) : compute(mode) {}
  // What backends on matrix units do: activations, float weights and decoded low-bit weights enter
  // products rounded once to `type` (kF32: as they are), queries and softmax weights rounded to the
  // cache's type, if that has 16 bits. LLM.int8() is as ever.
  static constexpr Arithmetic MatrixUnits(DType type) {
    Arithmetic arithmetic;
    arithmetic.products = type;
    arithmetic.attention_in_cache_type = true;
    return arithmetic;
  }

  ComputeMode compute;
  DType products = DType::kF32;
  bool attention_in_cache_type = false;
};

// One case on one backend, set up once.
class OpRun {
 public:
  virtual ~OpRun() = default;

  // The whole case: one call of the op. May be repeated; ops in place then work on their own
  // output.
  void Run() { RunRows(0, rows()); }
  // The op on rows [begin, begin + count) only, as if they were the whole batch; results land where
  // Run would put them.
  virtual void RunRows(int64_t begin, int64_t count) = 0;
  // Restores all inputs and outputs to their state after Prepare.
  virtual void Reset() = 0;

  // Everything that the op may write, as floats on the host: output rows one after the other (K/V
  // cases: q, then the whole cache; CopyPages: the cache; Sample: the fields of SampleResult or
  // ShardSample).
  virtual std::vector<float> Output() const = 0;
  // Absolute tolerance of each element of Output() against the reference in the same compute mode,
  // from the number formats and the operands' magnitudes; 0 where bits must agree. Costly: host
  // work of the order of the op itself.
  virtual std::vector<float> Tolerance(const Arithmetic& arithmetic) const = 0;
  // Guard values around outputs, and inputs that the op must not touch.
  virtual absl::Status CheckGuards() const = 0;

  virtual int64_t rows() const = 0;
  virtual double bytes() const = 0;       // of device memory that one Run must move
  virtual double operations() const = 0;  // additions and multiplications of one Run
};

// CHECK-fails on an error of the backend: a case is always valid.
std::unique_ptr<OpRun> Prepare(const OpCase& op_case, Backend& backend, uint64_t seed);

// Runs the case on `backend` and on the reference in the same mode (kAuto: the mode that the
// backend uses for this format has to be named, so pass kExact, kInt8 or kInt16) and compares every
// element. The error names the case, the element, both values and the tolerance.
absl::Status MatchesReference(const OpCase& op_case, Backend& backend, const Arithmetic& arithmetic,
                              uint64_t seed = 1);

// N1 and N2: the whole batch, random cuts of it (chunks) and every row alone (token by token) give
// bit-identical output; also the same bits as `other`, if given (another thread count, instruction
// set or packing of the same compute mode). Batches of more than 64 rows try a sample of rows
// alone. Outliers are taken per row, whatever the case says: per call, neither property holds.
absl::Status BatchInvariance(const OpCase& op_case, Backend& backend, Backend* other = nullptr,
                             uint64_t seed = 1);

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

}  // namespace treadle
