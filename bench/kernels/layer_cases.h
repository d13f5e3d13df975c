// The work of one layer of a model on a backend: its products in several formats, and attention at
// the sizes of serving, as cases of the kernel benchmark.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"
#include "kernels/op_cases/op_cases.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// Matrices that share an input.
struct LayerProduct {
  std::string name;                             // "qkv", "out", "up", "down"
  bool accumulate = false;                      // into the residual stream
  std::vector<std::vector<float>> values = {};  // [n, k] each
  std::vector<int64_t> outputs = {};            // n
  int64_t k = 0;
};

// The first layer's matrices, as floats. `checkpoint` names its tensors as GGUF does. Errors: it
// does not.
absl::StatusOr<std::vector<LayerProduct>> ProductsOfLayer(const Checkpoint& checkpoint);

// All matrices of a product in one format. Errors: those of Quantize.
absl::StatusOr<std::vector<QuantizedMatrix>> Convert(const LayerProduct& product,
                                                     const QuantizeSpec& spec);

// Attention, and the storing of K and V before it: decoding sequences of 1024 tokens, and a prompt.
std::vector<OpCase> AttentionOfLayer(const ModelConfig& config);

}  // namespace treadle
