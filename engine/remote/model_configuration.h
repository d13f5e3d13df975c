// ModelConfig on the wire, field by field. Thread safety: stateless.
#pragma once

#include "absl/status/status.h"
#include "models/model_config.h"

namespace treadle {

namespace control {
class ModelConfiguration;
}  // namespace control

void EncodeConfig(const ModelConfig& config, control::ModelConfiguration& message);
// InvalidArgument if the message has another number of fields. Values are checked by
// Checkpoint::CheckConsistency.
absl::Status DecodeConfig(const control::ModelConfiguration& message, ModelConfig& config);

}  // namespace treadle
