// A linear layer: weight in any format, bias or none. Thread safety: constant once loaded.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels/backend.h"

namespace treadle {

class Linear;

// A projection, and the layer that it is of.
struct LinearProduct : Projection {
  const Linear* linear = nullptr;
};

class Linear {
 public:
  Linear() = default;
  Linear(std::unique_ptr<PackedMatrix> weight, Buffer bias, int32_t index = -1)
      : weight_(std::move(weight)), bias_(std::move(bias)), index_(index) {}

  // out = x W^T + bias, added to out if `accumulate`. out: [rows, n]
  LinearProduct To(Tensor out, bool accumulate = false) const {
    return {{weight_.get(), reinterpret_cast<const float*>(bias_.data()), out, accumulate}, this};
  }
  int32_t index() const { return index_; }  // of a model's linear layers, from 0
  const PackedMatrix& weight() const { return *weight_; }
  bool loaded() const { return weight_ != nullptr; }

 private:
  std::unique_ptr<PackedMatrix> weight_;  // [n, k]
  Buffer bias_;                           // [n] f32 on the device, or empty
  int32_t index_ = -1;
};

// Backend::InputType of layers that share an input; those that are not loaded do not count.
inline DType InputTypeOf(const Backend& backend, std::initializer_list<const Linear*> layers) {
  std::vector<const PackedMatrix*> weights;
  for (const Linear* layer : layers) {
    if (layer->loaded()) weights.push_back(&layer->weight());
  }
  return backend.InputType(weights);
}

}  // namespace treadle
