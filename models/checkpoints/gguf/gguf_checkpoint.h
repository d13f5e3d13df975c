// A GGUF file as a Checkpoint. Thread safety: constant after Open.
#pragma once

#include <memory>
#include <string>

#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/gguf/gguf_file.h"

namespace treadle {

class GgufCheckpoint : public Checkpoint {
 public:
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);

 private:
  absl::Status Read(const std::string& path);
  absl::Status ReadConfig();
  absl::Status ReadRope(const std::string& prefix);
  std::unique_ptr<GgufFile> file_;
};

}  // namespace treadle
