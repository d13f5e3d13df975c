// The settings of a PEFT folder's adapter_config.json.
//
// Thread safety: a value, and a pure function.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "models/architectures/model_config.h"

namespace treadle {

struct AdapterSettings {
  std::string base;                                    // AdapterFile::base
  double alpha = 0;                                    // 0: a scale of 1
  bool by_root = false;                                // rsLoRA
  std::vector<std::pair<std::string, double>> alphas;  // of modules of these names
  int64_t virtual_tokens = 0;                          // 0: it is no soft prompt, but factors

  // A module's alpha, by its whole name.
  double AlphaOf(std::string_view module) const;
};

// config: of the model. InvalidArgument with the setting, what was found and what was expected.
absl::StatusOr<AdapterSettings> ReadAdapterSettings(const MappedFile& config_json,
                                                    const ModelConfig& config);

}  // namespace treadle
