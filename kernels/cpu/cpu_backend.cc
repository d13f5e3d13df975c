#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/matmul/matmul.h"
#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/matmul/weight_arena.h"
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_backend.h"

namespace treadle {
namespace {

constexpr int kMaxThreads = 1024;

class CpuBackend final : public HostBackend {
 public:
  CpuBackend(int threads, CpuIsa isa, const CpuBackendOptions& options)
      : isa_(isa),
        compute_(options.compute),
        pool_(threads, options.pin, options.first_cpu),
        matmul_(pool_, isa, compute_),
        ops_(pool_, isa) {}

  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return Str("cpu ", Name(isa_), ", ", pool_.size(), pool_.size() == 1 ? " thread" : " threads",
               ", compute ", Name(compute_), compute_ == ComputeMode::kAuto ? " (int16)" : "");
  }

  void BindThread() override { pool_.PinCaller(); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    std::shared_ptr<uint8_t> memory = MapMemory(bytes);
    if (memory == nullptr) return ResourceExhausted("no memory for a buffer of ", bytes, " bytes");
    uint8_t* data = memory.get();
    return Buffer(data, bytes, [memory = std::move(memory)](void*) {});
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return PackMatrix(source, PackTargetOf(isa_, compute_), pool_, arena_);
  }

  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    const auto& matrix = static_cast<const CpuMatrix&>(table);
    TREADLE_CHECK(out.rows == static_cast<int64_t>(ids.size()) && out.cols == matrix.k());
    pool_.ParallelFor(out.rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (const int64_t from = TableRow(table, ids[row], first_id); from >= 0) {
          matrix.DecodeRow(from, accumulate, out.Row<float>(row));
        } else if (!accumulate) {
          std::fill_n(out.Row<float>(row), out.cols, 0.0f);
        }
      }
    });
  }
  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    TREADLE_CHECK(out.rows == static_cast<int64_t>(rows.size()) && out.cols == x.cols);
    for (int64_t i = 0; i < out.rows; ++i) {
      TREADLE_CHECK(rows[i] >= 0 && rows[i] < x.rows);
      std::memcpy(out.Row<float>(i), x.Row<float>(rows[i]),
                  static_cast<size_t>(x.cols) * sizeof(float));
    }
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    const int64_t bytes = layout.PageBytes();
    for (const PageCopy& copy : copies) {
      if (copy.from == copy.to) continue;
      std::memcpy(pages + copy.to * bytes, pages + copy.from * bytes, static_cast<size_t>(bytes));
    }
  }

  void MatMul(Tensor x, std::span<const Projection> projections) override {
    matmul_.Run(x, projections);
  }
  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out) override {
    ops_.RmsNorm(x, weight, eps, out);
  }
  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    ops_.LayerNorm(x, weight, bias, eps, out);
  }
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    ops_.RotateAndStoreKv(q, k, v, rotary, kv);
  }
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    ops_.Attention(q, kv, scale, out);
  }
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override { ops_.SwiGlu(gate, up, out); }
  void Gelu(Tensor x, Tensor out) override { ops_.Gelu(x, out); }
  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    ops_.Sample(logits, rows, results);
    KeepSamples(rows, results);
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    ops_.SampleShard(logits, first_token, rows, shards);
  }

 private:
  static constexpr int64_t kRowsPerThread = 8;  // fewer rows to look up are not worth a hand-off

  const CpuIsa isa_;
  const ComputeMode compute_;
  ThreadPool pool_;
  WeightArena arena_;
  CpuMatMul matmul_;
  CpuOps ops_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return InvalidArgument("threads is ", options.threads, ", expected 0 to ", kMaxThreads);
  }
  if (options.first_cpu < 0) {
    return InvalidArgument("first_cpu is ", options.first_cpu, ", expected 0 or more");
  }
  CpuIsa isa;
  if (options.isa.has_value()) {
    isa = *options.isa;
    bool supported = false;
    for (const CpuIsa candidate : SupportedIsas()) supported |= candidate == isa;
    if (!supported) return InvalidArgument("this processor cannot run ", Name(isa));
  } else {
    TREADLE_ASSIGN_OR_RETURN(isa, ChooseIsa());
  }
  const int threads = options.threads > 0 ? options.threads : UsableCpus();
  return std::make_unique<CpuBackend>(threads, isa, options);
}

}  // namespace treadle
