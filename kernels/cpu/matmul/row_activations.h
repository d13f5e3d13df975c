// LLM.int8()'s activations of one product: each row quantized whole, once for all projections that
// share a threshold and a rule.
//
// Thread safety: Begin and Reserve belong to the rank's thread; FlagColumns and QuantizeRows may
// run on any threads at once with distinct ranges, all of the first before any of the second.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/weight_arena.h"
#include "kernels/tensor.h"

namespace treadle {

class RowActivations {
 public:
  explicit RowActivations(CpuIsa isa) : isa_(isa) {}

  // Forgets the last product.
  void Begin() {
    inputs_.clear();
    of_call_.clear();
  }
  // The index in inputs() of the weight's input; adds it if it is new.
  int64_t Add(const PackedView& weight);
  // Memory for all that were added. x: [rows, k] f32
  void Reserve(const Tensor& x);

  bool empty() const { return inputs_.empty(); }
  // Whether FlagColumns has anything to do.
  bool any_of_call() const {
    return std::find(of_call_.begin(), of_call_.end(), true) != of_call_.end();
  }
  // Input `index`, from row `first_row` on.
  RowInt8Input input(int64_t index, int64_t first_row) const;

  // Flags columns [begin, end), over all rows (OutlierRule::kPerCall).
  void FlagColumns(const Tensor& x, int64_t begin, int64_t end) const;
  void QuantizeRows(const Tensor& x, int64_t begin, int64_t end) const;

 private:
  const CpuIsa isa_;
  int64_t k_ = 0, code_row_bytes_ = 0;  // of the rows that Reserve was given
  std::vector<RowInt8Input> inputs_;
  std::vector<bool> of_call_;  // whether an input has call_flags
  ScratchMemory memory_;
};

}  // namespace treadle
