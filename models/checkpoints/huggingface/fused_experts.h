// Folders that keep all experts of a layer in one tensor. P is "model.layers.N.mlp.experts.", E
// their number, and n, k the features of what comes out and goes in; shapes of gate_up_proj, whose
// n is twice the inner features, and of down_proj alike:
//
//   floats    P.gate_up_proj [E, k, n], F32, F16 or BF16
//   MXFP4     P.gate_up_proj_blocks u8 [E, n, k / 32, 16], low nibbles first, and
//             P.gate_up_proj_scales u8 [E, n, k / 32] (kernels/formats/blocks.h has the values)
//   biases    P.gate_up_proj_bias [E, n], floats
//
// with gate and up by turns (gpt-oss), or with the gate's columns first (Llama 4, floats alone); or
// floats P.gate_up_proj [E, n, k], first the gate (Qwen 3.5; Granite calls
// these block_sparse_moe.input_linear.weight and output_linear.weight).
//
// Thread safety: a pure function.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/huggingface/safetensors.h"

namespace treadle {

// Takes such entries out of `entries`, and gives a tensor of each expert: P.3.gate_proj.weight
// [n / 2, k], P.3.gate_proj.bias, P.3.up_proj, P.3.down_proj. They point to the entries' data; by
// turns, they are put in order whenever they are read (StoredTensor::arranged). An entry for a
// tensor by itself gets the ".weight" that all others end in. Errors name the entry that is
// missing, or of another type or shape.
absl::StatusOr<std::vector<StoredTensor>> TakeFusedExperts(std::vector<SafetensorsEntry>& entries,
                                                           FusedExperts layout);

}  // namespace treadle
