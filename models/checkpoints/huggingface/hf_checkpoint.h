// A Hugging Face folder as a Checkpoint. Thread safety: constant after Open.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/huggingface/hf_quantization.h"

namespace treadle {

class HuggingFaceCheckpoint : public Checkpoint {
 public:
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& folder);

 private:
  absl::Status Read(const std::string& folder);
  absl::Status ReadShards(const HfQuantization& quantization);
  absl::Status ReadTextSide();
};

}  // namespace treadle
