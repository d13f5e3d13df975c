// CpuOps as a Backend, for tests that need no packed matrices: what is not CpuOps' business is the
// reference's.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {

class CpuOpsBackend : public Backend {
 public:
  CpuOpsBackend(CpuIsa isa, int threads)
      : name_(Name(isa)), pool_(threads), ops_(pool_, isa), rest_(CreateReferenceBackend()) {}

  std::string_view name() const override { return name_; }
  std::string description() const override {
    return "cpu ops " + name_ + ", " + std::to_string(pool_.size()) + " threads";
  }
  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return rest_->Allocate(bytes); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    rest_->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    rest_->CopyToHost(host, device, bytes);
  }
  void BindThread() override { rest_->BindThread(); }
  void Synchronize() override { rest_->Synchronize(); }
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return rest_->Pack(source);
  }
  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, bool accumulate,
             Tensor out) override {
    rest_->Embed(table, ids, accumulate, out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    rest_->MatMul(x, projections);
  }
  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    rest_->Gather(x, rows, out);
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    rest_->CopyPages(layout, pages, copies);
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
  void Gelu(Tensor x) override { ops_.Gelu(x); }
  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    ops_.Sample(logits, rows, results);
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    ops_.SampleShard(logits, first_token, rows, shards);
  }

 private:
  const std::string name_;
  ThreadPool pool_;
  CpuOps ops_;
  const std::unique_ptr<Backend> rest_;
};

}  // namespace treadle
