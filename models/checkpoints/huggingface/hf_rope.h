// How positions rotate, as config.json says it.
//
// Thread safety: a pure function.
#pragma once

#include "absl/status/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/huggingface/json_fields.h"

namespace treadle {

// Reads rope_theta and rope_scaling, or both in one object `rope_parameters` (newer files), which
// may hold one for global and one for local layers. Errors name file and field.
absl::Status ReadHfRope(const JsonFields& fields, const ConfigJson& json, ModelConfig& config);

}  // namespace treadle
