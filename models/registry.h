// The architectures that there are: one row each, in registry.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "models/model.h"

namespace treadle {

struct Architecture {
  std::string_view name;  // ModelConfig::architecture
  absl::StatusOr<std::unique_ptr<Model>> (*load)(const Checkpoint&, Backend&, const LoadOptions&);
};

// Null if unknown.
const Architecture* FindArchitecture(std::string_view name);
// "llama, gpt2"
std::string KnownArchitectures();

}  // namespace treadle
