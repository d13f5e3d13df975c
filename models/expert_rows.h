// The rows of an iteration that go to each expert of a layer, and what lies between them: the rows
// of each expert one after the other, so that its weights are read once for all of them.
//
// A row's sum is in the order of its weights, the largest first, whoever else is in the batch (N1).
// Ranks hold a part of each expert's inner features, and all of the router: what each has to do
// does not depend on where rows go.
//
// Thread safety: confined to the rank's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "models/activations.h"
#include "models/adapter.h"
#include "models/architectures/model_config.h"
#include "models/expert_use.h"
#include "models/linear.h"

namespace treadle {

// out = max(x, 0)^2; x is overwritten. Shapes as Backend::Relu's.
inline void SquaredRelu(Backend& backend, Tensor x, Tensor out) {
  backend.Relu(x, x);
  backend.Multiply(x, x, out);
}

class ExpertRows {
 public:
  // Memory for an iteration. inner: this rank's.
  absl::Status Allocate(Activations& activations, const ModelConfig& config, int64_t inner,
                        int64_t max_rows);

  // Sends the rows of x [rows, hidden] f32 to their experts, and adds the layer to `use`. Waits for
  // the device, because the host sorts; errors are the device's.
  absl::Status Route(Backend& backend, const Linear& router, const Routing& routing, Tensor x,
                     AdapterRows& adapters, ExpertUse& use);
  // The experts' results for the rows: W_down (silu(W_gate x) * W_up x), [experts] of each W, or
  // what Architecture::swiglu_limit, geglu or gated_rows says instead; without gates, W_down
  // max(W_up x, 0)^2.
  void Run(Backend& backend, std::span<const Linear> gate, std::span<const Linear> up,
           std::span<const Linear> down, Tensor x);
  // out = the weighted sum of it, [rows, hidden]; added to out if `accumulate`.
  void Mix(Backend& backend, bool accumulate, Tensor out) const;

 private:
  // The products of linear_, and what adapters add to them.
  void MatMul(Backend& backend, Tensor x);
  // Rows of experts, one expert after the other.
  Tensor Chosen(const Tensor& all) const { return all.Rows(0, std::ssize(order_)); }

  int64_t per_row_ = 0;
  float limit_ = 0;       // Architecture::swiglu_limit
  bool geglu_ = false;    // Architecture's
  bool gated_ = false;    // Architecture::gated_rows
  Tensor logits_;         // [max_rows, experts]
  Tensor ids_, weights_;  // [max_rows, per_row]
  Tensor rows_;       // [max_rows * per_row, hidden]: what experts are given, then what they make
  Tensor gate_, up_;  // [max_rows * per_row, inner]
  Tensor logit_;      // [max_rows * per_row, 1]: of the expert, where rows are gated
  std::vector<float> host_ids_;               // [rows * per_row]
  std::vector<int32_t> first_;                // [experts + 1]: where an expert's rows begin
  std::vector<int32_t> order_;                // [rows * per_row]: the row of x that is there
  std::vector<int32_t> places_;               // [rows * per_row]: where a row's results are
  std::vector<int32_t> logits_of_;            // [rows * per_row]: of order_, in logits_
  std::vector<LinearProduct> linear_;         // of one call
  std::vector<const Adapter*> row_adapters_;  // of order_
  AdapterRows adapters_;                      // of them
};

}  // namespace treadle
