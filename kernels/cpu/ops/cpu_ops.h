// The CPU backend: cpu_backend.h. Contracts of its ops: kernels/backend.h.
//
// Vector lanes run over features or positions; where a reduction is horizontal (norms, softmax), it
// uses 16 partial sums on every instruction set, combined in one order, so that AVX2 and AVX-512
// give equal bits (docs/design.md, Numerics). No libm: exp is our own, of explicit FMA, and the
// activations follow from it. Work that is smaller than what waking the pool costs stays on the
// caller; no split and no threshold ever changes a bit. Scratch grows to the largest call and is
// kept.
//
// Each op with vector code is defined in a source of its own, beside it (isa_kernel.h); the rest is
// in cpu_backend.cc.
//
// Thread safety: confined to the rank's thread, which the pool joins.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul/matmul.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_backend.h"

namespace treadle {

class CpuOps final : public HostBackend {
 public:
  CpuOps(int threads, bool pin, int first_cpu, CpuIsa isa, ComputeMode compute);
  ~CpuOps() override;

  std::string_view name() const override { return "cpu"; }
  std::string description() const override;
  // Factors in 16 bits, unless floats shall stay floats.
  DType low_rank_type() const override {
    return compute_ == ComputeMode::kExact ? DType::kF32 : DType::kF16;
  }
  void BindThread() override { pool_.PinCaller(); }
  absl::StatusOr<Buffer> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override;

  // For ops beside those of Backend, which run between them.
  ThreadPool& pool() { return pool_; }
  CpuIsa isa() const { return isa_; }

  TREADLE_FEATURE_OPS(TREADLE_OVERRIDE_OP)
  void GatedMatMul(Tensor x, std::span<const Projection> pairs, Gate by, Tensor gate, Tensor up,
                   Tensor out) override;
  TREADLE_SAMPLE_OPS(TREADLE_OVERRIDE_OP)

 private:
  template <typename One>
  void ForEachLogitRow(Tensor logits, One one);

  const CpuIsa isa_;
  const ComputeMode compute_;
  ThreadPool pool_;
  WeightArena arena_;
  CpuMatMul matmul_;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
