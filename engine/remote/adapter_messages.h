// LoRA adapters as messages of control.proto. Thread safety: pure functions.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/adapters/adapter_file.h"
#include "models/model.h"

namespace treadle {

namespace control {
class Adapter;
}  // namespace control

// The factors of these layers, and those outside of layers. ResourceExhausted if they are more than
// a message may have.
absl::Status EncodeAdapter(const AdapterFile& adapter, LayerRange layers,
                           control::Adapter& message);
// Checked as a file is; keeps what it needs of the message. config: of the model.
absl::StatusOr<std::shared_ptr<const AdapterFile>> DecodeAdapter(control::Adapter&& message,
                                                                 const ModelConfig& config);

}  // namespace treadle
