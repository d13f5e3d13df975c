// Layers that keep a state in a GGUF file that is made of a folder: llama.cpp's names of sizes,
// shapes of vectors, and orders.
//
// Thread safety: pure functions.
#pragma once

#include <string>
#include <vector>

#include "models/architectures/architecture.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/write/gguf_file_writer.h"

namespace treadle {

// Whether the file lists the K/V heads of each layer, none where a state is kept.
bool ListsKvHeads(const Architecture& architecture);

// Adds what the table of fields does not have, behind `prefix`.
void DescribeStates(const ModelConfig& config, const Architecture& architecture,
                    const std::string& prefix, GgufMetadataWriter& metadata);

// Sets how a tensor of a folder is changed: the order of value heads where the file has them tiled
// (Architecture::gguf_tiled_states), and rates instead of their logarithms.
void ArrangeState(const TensorRow& row, const ModelConfig& config, TensorTarget& target);

// The shape of a vector of Mamba 2, [n] elsewhere: [heads, 1] of numbers of heads, [groups, *] of
// norms. Other shapes stay.
std::vector<int64_t> GgufStateShape(const TensorRow& row, const ModelConfig& config,
                                    std::vector<int64_t> shape);

}  // namespace treadle
