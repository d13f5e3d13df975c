// Where `treadle quantize` writes: a GGUF file, or a Hugging Face folder. Nothing is there under
// its name before Finish.
//
// Thread safety: confined to one thread.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/weight_plan.h"

namespace treadle {

// What an output says of itself: "treadle.source_sha256" and so on.
using Provenance = std::map<std::string, std::string>;

class CheckpointOutput {
 public:
  virtual ~CheckpointOutput() = default;

  // What becomes of a tensor here. Errors: this output cannot hold it.
  virtual absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const = 0;
  // Every tensor of the checkpoint, in its order.
  virtual absl::Status Add(const ConvertedTensor& tensor) = 0;
  // Bytes of tensors with their constants.
  virtual absl::StatusOr<uint64_t> Finish(const Provenance& provenance) = 0;
  // Lines for the user.
  virtual std::vector<std::string> Notices() const { return {}; }
};

struct OutputOptions {
  std::string path;
  WeightPlan weights;
  // Written beside LLM.int8() matrices. Unset: what the source says, else 6.
  std::optional<float> outlier_threshold;
};

// From either kind. A GGUF file's metadata is copied as it is, but for the keys of the file's type.
// A value of `provenance` that is still unknown stands there as long as it will be.
absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateGgufOutput(const Checkpoint& source,
                                                                   const OutputOptions& options,
                                                                   const Provenance& provenance);
// From either kind; of GGUF, architectures whose folders keep no matrix transposed. Other files of
// a folder are copied.
absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateHuggingFaceOutput(
    const Checkpoint& source, const OutputOptions& options);

}  // namespace treadle
