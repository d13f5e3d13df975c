// A wrong op is found where it is, and right ones are not called wrong.
#include "engine/record/op_check.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <string>
#include <utility>

#include "base/status.h"
#include "kernels/forwarding_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/reference/reference_backend.h"
#include "models/architectures/architecture.h"
#include "tests/engine/record/recorded_run.h"

namespace treadle {
namespace {

// An op that is wrong in one call of each iteration.
class WrongBackend final : public ForwardingBackend {
 public:
  WrongBackend(std::unique_ptr<Backend> below, std::string op, int call)
      : ForwardingBackend(std::move(below)), op_(std::move(op)), call_(call) {}

  void BeginBatch(const BatchInput& batch) override {
    ForwardingBackend::BeginBatch(batch);
    calls_ = 0;
  }
  void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) override {
    ForwardingBackend::RmsNorm(x, weight, eps, accumulate, out);
    Spoil("RmsNorm", out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    ForwardingBackend::MatMul(x, projections);
    Spoil("MatMul", projections.back().out);
  }
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    ForwardingBackend::RotateAndStoreKv(q, k, v, rotary, kv);
    Spoil("RotateAndStoreKv", q);
    const SequenceSpan& span = kv.sequences[0];
    const int64_t page = span.pages[span.first_position / kv.layout.page_size];
    float* const slots = reinterpret_cast<float*>(kv.pages + page * kv.layout.PageBytes());
    const int64_t slot = span.first_position % kv.layout.page_size;
    Spoil("keys", DenseTensor(slots + kv.layout.KeyElement(0, slot, 5) - 5, DType::kF32, 1, 6));
    Spoil("values", DenseTensor(slots + kv.layout.ValueElement(0, slot, 0), DType::kF32, 1, 6));
  }
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    ForwardingBackend::Attention(q, kv, scale, out);
    Spoil("Attention", out);
  }
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override {
    ForwardingBackend::SwiGlu(gate, up, out);
    Spoil("SwiGlu", out);
  }
  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    ForwardingBackend::Embed(table, ids, first_id, accumulate, out);
    Spoil("Embed", out);
  }
  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    ForwardingBackend::Sample(logits, rows, results);
    if (op_ != "Sample") return;
    for (SampleResult& result : results) result.token ^= 1;
  }

 private:
  void Spoil(const std::string& op, Tensor out) {
    if (op != op_ || calls_++ != call_) return;
    out.Row<float>(out.rows - 1)[5] += 1e-3f;
  }

  const std::string op_;
  const int call_;
  int calls_ = 0;
};

// The reference, one of whose ops moves all that it writes by a ten-thousandth.
class WrongReference final : public ForwardingBackend {
 public:
  explicit WrongReference(Op op) : ForwardingBackend(CreateReferenceBackend()), op_(op) {}

#define TREADLE_SPOIL_OP(name, parameters, arguments) \
  void name parameters override {                     \
    ForwardingBackend::name arguments;                \
    if (op_ == Op::k##name) SpoilAll arguments;       \
  }
  TREADLE_BACKEND_OPS(TREADLE_SPOIL_OP)
#undef TREADLE_SPOIL_OP

 private:
  template <typename... Arguments>
  void SpoilAll(const Arguments&... arguments) {
    (Spoil(arguments), ...);
  }
  template <typename T>
  void Spoil(const T&) {}  // what ops only read
  void Spoil(Tensor tensor) {
    for (int64_t row = 0; row < tensor.rows; ++row) {
      for (int64_t i = 0; i < tensor.cols; ++i) tensor.Row<float>(row)[i] *= 1.0001f;
    }
  }
  void Spoil(std::span<const LowRankProduct> products) {
    for (const LowRankProduct& product : products) Spoil(product.out);
  }
  void Spoil(std::span<const Projection> projections) {
    for (const Projection& projection : projections) Spoil(projection.out);
  }
  void Spoil(KvLayout layout) { layout_ = layout; }
  void Spoil(std::byte* pages) {
    for (int64_t i = 0; i < layout_.num_pages; ++i) pages[i * layout_.PageBytes()] ^= std::byte{1};
  }
  void Spoil(std::span<SampleResult> results) {
    for (SampleResult& result : results) result.token ^= 1;
  }
  void Spoil(std::span<ShardSample> shards) {
    for (ShardSample& shard : shards) shard.num_candidates = shard.num_candidates == 0;
  }

  const Op op_;
  KvLayout layout_;
};

// The first op of a faultless recording that the check calls wrong.
std::optional<OpFinding> Check(const RecordedRun& run, const WrapBackend& wrap = {}) {
  const std::string recording = ReadWhole(run.file);
  const auto summary = Summarize(recording).value();
  OpCheck check;
  const auto stages = StagesFor(run, summary, WireType::kF32, wrap, &check);
  check.Arm(true);
  ReplayOptions options;
  options.after = [&] { return !check.found(); };
  const auto report = Replay(recording, 64, *stages, options).value();
  if (!wrap) {
    EXPECT_FALSE(report.difference) << report.difference->what;
  }
  return check.found();
}

TEST(OpCheck, OpsThatAreRightAreNotCalledWrong) {
  const struct {
    const char* architecture;
    const char* format;
    ComputeMode compute;
  } rows[] = {{"llama", "f32", ComputeMode::kExact},     {"llama", "q4_1", ComputeMode::kInt16},
              {"llama", "q4_1", ComputeMode::kInt8},     {"llama", "q8_0", ComputeMode::kAuto},
              {"gpt2", "f16", ComputeMode::kExact},      {"gemma3", "bf16", ComputeMode::kExact},
              {"gemma4", "f32", ComputeMode::kExact},    {"gpt-oss", "f32", ComputeMode::kExact},
              {"bloom", "q8_0", ComputeMode::kInt16},    {"falcon", "f32", ComputeMode::kBf16},
              {"qwen3moe", "f32", ComputeMode::kExact},  {"glm4moe", "f32", ComputeMode::kExact},
              {"qwen35moe", "f32", ComputeMode::kExact}, {"deepseek2", "f32", ComputeMode::kExact},
              {"deepseek3", "q8_0", ComputeMode::kInt16}};
  for (const auto& row : rows) {
    if (FindArchitecture(row.architecture) == nullptr) {
      ADD_FAILURE() << row.architecture;
      continue;
    }
    SCOPED_TRACE(Str(row.architecture, " ", row.format, " ", Name(row.compute)));
    RecordedRun run = NewRun("right", row.architecture, row.format);
    run.compute = row.compute;
    run.requests = 4;
    RecordLocal(run);
    const auto found = Check(run);
    EXPECT_FALSE(found) << found->layer << " " << found->name << " " << found->what;
  }
}

// The cases of every op. Attention's sinks are among them, which leave little of the values and of
// what may be off.
TEST(OpCheck, EveryOpIsChecked) {
  std::set<Op> checked;
  for (const OpCase& c : OpCases()) {
    if (c.slow || c.rows < 3 || c.rows * c.cols > 5000 || c.heads * c.kv.head_dim > 64) continue;
    if (c.op == Op::kLayerNorm && c.cols == 1) continue;               // 0, whatever moves
    if (c.op == Op::kAttention && c.kv.dtype == DType::kI8) continue;  // rounded more than it moves
    checked.insert(c.op);
    for (const bool wrong : {false, true}) {
      OpCheck check;
      auto below = CreateReferenceBackend();
      if (wrong) below = std::make_unique<WrongReference>(c.op);
      const CheckedRank rank = CheckOps(std::move(below), ComputeMode::kExact, check, 0, 0);
      check.Arm(true);
      Prepare(c, *rank.backend, 1)->Run();
      const auto found = check.found();
      EXPECT_EQ(found.has_value(), wrong) << c.name << (found ? ": " + found->what : "");
    }
  }
  EXPECT_EQ(checked.size(), std::size(kOps));
}

TEST(OpCheck, RanksAndStagesAreCheckedToo) {
  RecordedRun run = NewRun("ranks");
  run.ranks = 2;
  run.requests = 4;
  RecordLocal(run);
  run.end_layers = {4};
  EXPECT_FALSE(Check(run));
}

TEST(OpCheck, AWrongOpIsFoundInItsLayer) {
  RecordedRun run = NewRun("wrong");
  run.requests = 3;
  RecordLocal(run);
  const struct {
    const char* spoilt;
    int call;  // of four layers' of one iteration
    int64_t layer;
    const char* found;
  } rows[] = {{"Embed", 0, -1, "Embed"},
              {"RmsNorm", 0, 0, "RmsNorm"},
              {"RmsNorm", 7, 3, "RmsNorm"},
              {"RmsNorm", 8, 4, "RmsNorm"},
              {"MatMul", 0, 0, "MatMul (projection 2)"},
              {"MatMul", 7, 1, "MatMul"},
              {"MatMul", 16, 4, "MatMul"},
              {"RotateAndStoreKv", 2, 2, "RotateAndStoreKv (q)"},
              {"keys", 2, 2, "RotateAndStoreKv (k)"},
              {"values", 1, 1, "RotateAndStoreKv (v)"},
              {"Attention", 2, 2, "Attention"},
              {"SwiGlu", 1, 1, "SwiGlu"},
              {"Sample", 0, 4, "Sample"}};
  for (const auto& row : rows) {
    SCOPED_TRACE(Str(row.spoilt, " ", row.call));
    const auto found = Check(run, [&](std::unique_ptr<Backend> below) {
      return std::make_unique<WrongBackend>(std::move(below), row.spoilt, row.call);
    });
    ASSERT_TRUE(found);
    EXPECT_EQ(found->layer, row.layer);
    EXPECT_EQ(found->name, row.found);
  }
}

// Layers are the model's, whatever stage they are on.
TEST(OpCheck, AWrongOpIsFoundOnItsStageAndRank) {
  RecordedRun run = NewRun("stage");
  run.ranks = 2;
  run.requests = 3;
  run.end_layers = {1, 4};
  RecordLocal(run);
  std::atomic<int> made = 0;
  const auto found = Check(run, [&](std::unique_ptr<Backend> below) -> std::unique_ptr<Backend> {
    if (made++ != 3) return below;  // the second stage's second rank
    return std::make_unique<WrongBackend>(std::move(below), "Attention", 1);
  });
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stage, 1);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->layer, 2);
  EXPECT_EQ(found->name, "Attention");
}

}  // namespace
}  // namespace treadle
