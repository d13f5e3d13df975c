// The CPU backend's ops. Contracts: kernels/backend.h.
//
// Vector lanes run over features or positions; where a reduction is horizontal (norms, softmax), it
// uses 16 partial sums on every instruction set, combined in one order, so that AVX2 and AVX-512
// give equal bits (docs/design.md, Numerics). No libm: exp is our own, of explicit FMA, and the
// activations follow from it. Work that is smaller than what waking the pool costs stays on the
// caller; no split and no threshold ever changes a bit. Scratch grows to the largest call and is
// kept.
//
// Each op is defined in a source of its own, beside its vector code (isa_kernel.h).
//
// Thread safety: confined to the rank's thread, which the pool joins.
#pragma once

#include <memory>
#include <span>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul/matmul.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_backend.h"

namespace treadle {

class CpuOps : public HostBackend {
 public:
  CpuOps(int threads, bool pin, int first_cpu, CpuIsa isa, ComputeMode compute);
  ~CpuOps() override;

  TREADLE_BACKEND_OPS(TREADLE_OVERRIDE_OP)

 protected:
  ThreadPool& pool() { return pool_; }
  const ThreadPool& pool() const { return pool_; }
  CpuIsa isa() const { return isa_; }

 private:
  template <typename One>
  void ForEachLogitRow(Tensor logits, One one);

  const CpuIsa isa_;
  ThreadPool pool_;
  CpuMatMul matmul_;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
