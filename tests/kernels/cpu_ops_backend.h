// CpuOps as a Backend, for tests that need no packed matrices: what is not CpuOps' business is the
// reference's.
#pragma once

#include <span>
#include <string>

#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {

class CpuOpsBackend : public ForwardingBackend {
 public:
  CpuOpsBackend(CpuIsa isa, int threads)
      : ForwardingBackend(CreateReferenceBackend()),
        name_(Name(isa)),
        pool_(threads),
        ops_(pool_, isa) {}

  std::string_view name() const override { return name_; }
  std::string description() const override {
    return "cpu ops " + name_ + ", " + std::to_string(pool_.size()) + " threads";
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
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    ops_.SampleShard(logits, first_token, rows, shards);
  }

 private:
  const std::string name_;
  ThreadPool pool_;
  CpuOps ops_;
};

}  // namespace treadle
