// A backend that remembers the ops of a forward pass and goes back over them for gradients
// (reverse mode, Griewank and Walther 2008, section 3.2), and that adds low-rank updates to
// products. It hands the ops themselves on to a host backend.
//
// Every buffer that it allocates has a shadow of the same size, in which the gradient of a value
// lies where the value lies. An op that overwrites its output takes the gradient there away, and
// one that adds to it leaves it, so that ops may work in place and buffers may be used again.
//
// Recorded: RmsNorm, MatMul, RotateAndStoreKv, Attention, SwiGlu and GeGlu, on f32, with K/V of f32
// (training/ops/gradient_ops.h). Any other op of arithmetic while the tape records is a bug and
// CHECKed. From an op to its Backward nobody writes to the pages of its K/V cache.
//
// Thread safety: as Backend.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/forwarding_backend.h"
#include "training/ops/gradient_ops.h"

namespace treadle {

// Hands ops of arithmetic on, but none while the tape records.
class UnrecordedOps : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
#define TREADLE_NOT_RECORDED(name, parameters, arguments) \
  void name parameters override {                         \
    TREADLE_CHECK(!recording_);                           \
    below().name arguments;                               \
  }
  TREADLE_FEATURE_OPS(TREADLE_NOT_RECORDED)
#undef TREADLE_NOT_RECORDED

 protected:
  bool recording_ = false;
};

class Tape final : public UnrecordedOps {
 public:
  // `below` is a host backend, for which `gradients` are.
  Tape(std::unique_ptr<Backend> below, std::unique_ptr<GradientOps> gradients)
      : UnrecordedOps(std::move(below)), gradients_(std::move(gradients)) {}

  // Gives products with `weight` the update, recorded or not; null: none. It outlives the ops.
  void Attach(const PackedMatrix* weight, const LowRankUpdate* update) {
    updates_[weight] = update;
  }
  // Takes all updates away.
  void DetachAll() { updates_.clear(); }

  void Record() { recording_ = true; }
  // Goes back over the recorded ops, last one first, forgets them, and ends the recording.
  // REQUIRES: Gradient of the last outputs is set. Sets Gradient of the inputs and adds to the
  // updates' gradients; gradients of values that were overwritten are zeros.
  void Backward();

  // The gradient of a value in this backend's memory: a view of its shadow.
  Tensor Gradient(const Tensor& value) const;
  GradientOps& gradients() { return *gradients_; }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override;
  void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) override;
  void MatMul(Tensor x, std::span<const Projection> projections) override;
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override;
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override;
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override { Gated(false, gate, up, out); }
  void GeGlu(Tensor gate, Tensor up, Tensor out) override { Gated(true, gate, up, out); }

 private:
  struct Product {
    const PackedMatrix* weight;
    const LowRankUpdate* update;  // or null
    Tensor out;
    bool accumulate;
  };
  void Gated(bool gelu, Tensor gate, Tensor up, Tensor out);
  // A copy that stays until Backward is done.
  Tensor Save(const Tensor& value);
  // The gradient of an op's output; if the op overwrote that, a copy, and zeros stay there.
  Tensor Take(const Tensor& out, bool accumulate);
  void MatMulBackward(const Tensor& x, const Tensor& saved, std::span<const Product> products);

  const std::unique_ptr<GradientOps> gradients_;
  std::map<const PackedMatrix*, const LowRankUpdate*> updates_;
  std::map<const std::byte*, size_t> shadows_;  // begins of buffers: bytes to their shadows
  std::vector<std::function<void()>> steps_;    // back over one op each
  std::vector<std::vector<float>> saved_;       // memory of copies, used again after Backward
  size_t saved_count_ = 0;
  std::vector<float> taken_;
  std::vector<int32_t> rows_;                         // 0, 1, ...
  std::vector<float> key_gradient_, value_gradient_;  // [rows, kv_heads * head_dim], of the cache
};

}  // namespace treadle
