// A wrong op is found where it is, and right ones are not called wrong.
#include "engine/record/op_check.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <utility>

#include "base/status.h"
#include "kernels/forwarding_backend.h"
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

// Of a recording without a fault: the first op that the check calls wrong.
std::optional<OpFinding> Check(const RecordedRun& run, const WrapBackend& wrap = {}) {
  const std::string recording = ReadWhole(run.file);
  const auto summary = Summarize(recording);
  TREADLE_CHECK(summary.ok());
  OpCheck check;
  const auto stages = StagesFor(run, *summary, WireType::kF32, wrap, &check);
  check.Arm(true);
  ReplayOptions options;
  options.after = [&] { return !check.found(); };
  const auto report = Replay(recording, 64, *stages, options);
  TREADLE_CHECK(report.ok());
  if (!wrap) {
    EXPECT_FALSE(report->difference) << report->difference->what;
  }
  return check.found();
}

TEST(OpCheck, OpsThatAreRightAreNotCalledWrong) {
  const struct {
    const char* architecture;
    const char* format;
    ComputeMode compute;
  } rows[] = {{"llama", "f32", ComputeMode::kExact},   {"llama", "q4_1", ComputeMode::kInt16},
              {"llama", "q4_1", ComputeMode::kInt8},   {"llama", "q8_0", ComputeMode::kAuto},
              {"gpt2", "f16", ComputeMode::kExact},    {"gemma3", "bf16", ComputeMode::kExact},
              {"gpt-oss", "f32", ComputeMode::kExact}, {"bloom", "q8_0", ComputeMode::kInt16},
              {"falcon", "f32", ComputeMode::kExact},  {"qwen3moe", "f32", ComputeMode::kExact}};
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
