// From a checkpoint's tensors to weights on a backend: checks shapes, packs matrices, converts
// vectors to float, drops the file's pages behind it, and reports progress.
//
// Thread safety: confined to the loading thread.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "models/checkpoint.h"
#include "models/linear.h"

namespace treadle {

class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, Backend& backend,
               std::function<void(double)> progress);

  enum class Bias { kNone, kIfPresent, kRequired };
  // Tensors NAME.weight [n, k] ([k, n] if `transposed`, where the file keeps it so) and NAME.bias
  // [n]. If set, row i of the layer is row row_order[i] of the file's.
  struct LinearSpec {
    std::string name;
    int64_t n = 0;
    int64_t k = 0;
    Bias bias = Bias::kNone;
    std::span<const int32_t> row_order = {};
    bool transposed = false;
  };
  absl::StatusOr<Linear> LoadLinear(const LinearSpec& spec);

  // [n] f32 on the device.
  absl::StatusOr<Buffer> LoadVector(const std::string& name, int64_t n,
                                    std::span<const int32_t> row_order = {});
  absl::StatusOr<Buffer> Upload(std::span<const float> values);

  uint64_t weight_bytes() const { return weight_bytes_; }
  void Finish() const;  // progress 1

 private:
  void Consumed(const StoredTensor& tensor);

  const Checkpoint& checkpoint_;
  Backend& backend_;
  const std::function<void(double)> progress_;
  uint64_t total_ = 0;     // bytes of all tensors
  uint64_t consumed_ = 0;  // bytes of those loaded
  uint64_t weight_bytes_ = 0;
};

// Values of a 1-D tensor.
std::vector<float> DecodeVector(const StoredTensor& tensor);

}  // namespace treadle
