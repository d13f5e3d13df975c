// A checkpoint's model and matrices as messages of control.proto.
//
// Thread safety: pure functions.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

namespace control {
class ModelConfiguration;
}  // namespace control

void EncodeConfig(const ModelConfig& config, control::ModelConfiguration& message);
// InvalidArgument if a hyper-parameter is missing, unknown or of another type. Values are checked
// by Checkpoint::CheckConsistency.
absl::Status DecodeConfig(const control::ModelConfiguration& message, ModelConfig& config);

// A Constants message. Parsing does not say whether they fit their matrix.
std::string SerializeConstants(const MatrixConstants& constants);
absl::StatusOr<MatrixConstants> ParseConstants(const std::string& bytes);

}  // namespace treadle
