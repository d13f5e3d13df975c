// The CPU backend's ops other than matrix products: same contracts as in kernels/backend.h.
//
// Vector lanes run over features or positions; where a reduction is horizontal (norms, softmax), it
// uses 16 partial sums on every instruction set, combined in one order, so that AVX2 and AVX-512
// give equal bits (docs/design.md, Numerics). No libm: exp is our own, of explicit FMA, and the
// activations follow from it. Work that is smaller than what waking the pool costs stays on the
// caller; no split and no threshold ever changes a bit. Scratch grows to the largest call and is
// kept.
//
// Thread safety: confined to the rank's thread, which the pool joins.
#pragma once

#include <memory>
#include <span>

#include "kernels/backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

class CpuOps {
 public:
  CpuOps(ThreadPool& pool, CpuIsa isa);
  ~CpuOps();

  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out);
  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out);
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary, const KvView& kv);
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out);
  void SwiGlu(Tensor gate, Tensor up, Tensor out);
  void Gelu(Tensor x, Tensor out);
  void Sample(Tensor logits, std::span<const SampleRow> rows, std::span<SampleResult> results);
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards);

 private:
  template <typename One>
  void ForEachLogitRow(Tensor logits, One one);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
