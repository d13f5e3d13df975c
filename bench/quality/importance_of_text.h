// The importance of a model's columns (models/checkpoints/write/importance.h) over a text that it
// reads.
//
// Thread safety: a pure function.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/write/importance.h"

namespace treadle {

inline constexpr int64_t kImportanceChunk = 512;  // tokens of one text, as in llama-imatrix

// Loads the model as it is stored, on `backend` (the CPU), and reads the tokens in texts of
// kImportanceChunk, or less if the model allows less. It covers the layers' matrices, not the head.
// Errors: no token, a model that cannot be loaded.
absl::StatusOr<Importance> ImportanceOfText(const Checkpoint& checkpoint,
                                            std::unique_ptr<Backend> backend,
                                            std::span<const int32_t> tokens, int threads,
                                            std::function<void(double)> progress);

}  // namespace treadle
