// GPT-2 (Radford et al. 2019, section 2.3): registry.cc's row.
#pragma once

#include <memory>

#include "models/model.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Model>> LoadGpt2(const Checkpoint& checkpoint, Backend& backend,
                                                const LoadOptions& options);

}  // namespace treadle
