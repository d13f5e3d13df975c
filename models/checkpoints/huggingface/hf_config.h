// config.json of a Hugging Face folder -> ModelConfig, for the classes that architectures name.
// What we do not compute (another activation, a rope type) is an error that names the field.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "models/checkpoints/huggingface/hf_quantization.h"
#include "models/model_config.h"

namespace treadle {

struct HfConfig {
  ModelConfig config;
  int64_t sliding_window = 0;  // 0: none
  HfQuantization quantization;
};

absl::StatusOr<HfConfig> ReadHfConfig(const std::string& folder);

}  // namespace treadle
