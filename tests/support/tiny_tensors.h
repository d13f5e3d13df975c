// The sizes and the random weights of tiny models, as every container has them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/architectures/architecture.h"
#include "tests/support/tiny_model.h"

namespace treadle {

struct TinyTensor {
  std::string gguf_name;
  std::string hf_name;
  std::vector<int64_t> shape;  // [n, k] or [n]
  std::vector<float> values = {};
  // Rows are heads, whose elements pair up by their halves up to `rotated`; a container may have
  // the elements of each pair side by side. 0: not such rows.
  int64_t rotated = 0;
  bool gguf_pairs = false, hf_pairs = false;
  bool rotated_last = false;  // files have these elements behind the others of a head
  bool transposed = false;    // the folder keeps [k, n]
  int64_t head_dim = 0;
  // Fused rows that the folder keeps by K/V heads: so many queries for each. 0: not such rows.
  int64_t queries = 0;
  float hf_less = 0;   // what the folder's values are smaller by
  bool rates = false;  // logarithms in folders, negative in GGUF

  // Vectors, and convolutions, whose rows are too short for blocks.
  bool KeptAsFloats() const { return shape.size() == 1 || shape.back() < 16; }
  // To the order of elements in files that have it.
  void PermuteHeads();     // half-split rows (s * half + i) to adjacent pairs (2 * i + s)
  void InterleaveHeads();  // queries, keys and values to those of one K/V head after another's
  void Transpose();
};

ModelConfig TinyConfig(const Architecture& architecture, const TinyModelOptions& options);
// In the order of the model's rows.
std::vector<TinyTensor> TinyTensors(const Architecture& architecture,
                                    const TinyModelOptions& options);

}  // namespace treadle
