// The matrices that make keys and values of a latent (ModelConfig::latent_dim), as products
// multiply them.
//
// Files keep one matrix [heads, unrotated_dim + value_dim, latent_dim] a layer: W_UK and W_UV of
// each head, one behind the other (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2). Attention over
// latents asks for W_UK transposed, which takes a head's query to one of latents, and for W_UV,
// which takes what the head attends to to its values: newer .gguf files have these two.
//
// Thread safety: pure functions.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// The tensors, with two in place of each such matrix: [heads * latent_dim, unrotated_dim] and
// [heads * value_dim, latent_dim], in its format if that is dense, else decoded and rounded to f16.
// Sizes are in their ranges. A matrix of another shape stays as it is, and has then no place in the
// model. Errors: constants of a quantized one that cannot be read.
absl::StatusOr<std::vector<StoredTensor>> WithLatentsApart(std::vector<StoredTensor> tensors,
                                                           const ModelConfig& config,
                                                           Container kind);

}  // namespace treadle
