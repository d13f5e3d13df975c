// The ops that training has beside kernels/backend.h: gradients of a layer's ops and of low-rank
// updates (LoRA, Hu et al. 2021, section 4.1), and cross entropy. Two implementations: plain loops
// (reference_gradients.h) and vectors on the pool of a CPU backend (cpu_gradients.h).
//
// Gradients are of one number, the loss; "dx" is that by x. Every op adds to the gradients that it
// makes, unless it says otherwise. All tensors are f32 and host memory; rows may have strides.
//
// Numerics: every result has one order of sums, whatever the threads and the instruction set.
// Sums over a matrix' features or over rows are chains of fma in ascending order.
//
// Thread safety: confined to the thread that calls the backend's ops. Shapes are CHECKed.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace treadle {

// An update of a matrix W [n, k]: y = x W^T + scale * (x A^T) B^T.
struct LowRankUpdate {
  int64_t n = 0, k = 0;
  float scale = 0;
  LowRank factors;              // of Backend::AddLowRank: A^T and scale * B^T, f32
  const float* a = nullptr;     // [rank, k]
  const float* b = nullptr;     // [n, rank], scale * B
  float* a_gradient = nullptr;  // [rank, k]
  float* b_gradient = nullptr;  // [rank, n], of B^T
};

class GradientOps {
 public:
  virtual ~GradientOps() = default;

  // dx += dy W: the gradient of Backend::MatMul. The rows of W are decoded a few at a time
  // (Backend::Embed), in ascending order. dy: [rows, n]; dx: [rows, k].
  virtual void ProductGradient(const PackedMatrix& weight, Tensor dy, Tensor dx) = 0;

  // The gradients of the update's part of y (Backend::AddLowRank): by A, by B, and dx. x: [rows,
  // k]; dy: [rows, n].
  virtual void LowRankGradient(const LowRankUpdate& update, Tensor x, Tensor dy, Tensor dx) = 0;

  // The gradient of Backend::RmsNorm by x. With g = dy * weight and n = x / r, r the root of mean
  // square + eps: dx += (g - n * mean(g * n)) / r. x, dy, dx: [rows, cols].
  virtual void RmsNormGradient(Tensor x, const float* weight, float eps, Tensor dy, Tensor dx) = 0;

  // The gradient of Backend::SwiGlu, and of GeGlu if `gelu`. All: [rows, cols].
  virtual void GatedGradient(bool gelu, Tensor gate, Tensor up, Tensor dout, Tensor dgate,
                             Tensor dup) = 0;

  // The gradient of a rotation by each row's position, in place of that of what was rotated. x:
  // [rows, heads * head_dim]; sequences: as KvView's.
  virtual void RotateBack(Tensor x, int64_t head_dim, const RotaryTable& rotary,
                          std::span<const SequenceSpan> sequences) = 0;

  // The gradients of Backend::Attention by the rotated queries, the rotated keys and the values, of
  // sequences that begin at position 0, without slopes and sinks. Probabilities are computed anew
  // from q and the cache, which is f32, with keys by feature. q, dout, dq: [rows, heads *
  // head_dim]; dk, dv: [rows, kv_heads * head_dim].
  virtual void AttentionGradient(Tensor q, const KvView& kv, float scale, Tensor dout, Tensor dq,
                                 Tensor dk, Tensor dv) = 0;

  // The sum over rows of -log softmax(logits)[target]. The logits become `scale` times the gradient
  // of that sum. logits: [rows, vocab]; targets: [rows].
  virtual double CrossEntropy(Tensor logits, std::span<const int32_t> targets, float scale) = 0;
};

}  // namespace treadle
