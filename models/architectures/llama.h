// Llama (Touvron et al. 2023; grouped queries as in Llama 2 and 3): registry.cc's row.
#pragma once

#include <memory>

#include "models/model.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Model>> LoadLlama(const Checkpoint& checkpoint, Backend& backend,
                                                 const LoadOptions& options);

}  // namespace treadle
