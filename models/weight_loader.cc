#include "models/weight_loader.h"

#include "kernels/status.h"
#include "models/mapped_file.h"

namespace treadle {

WeightLoader::WeightLoader(const Checkpoint& checkpoint, Backend& backend,
                           std::function<void(double)> progress)
    : checkpoint_(checkpoint), backend_(backend), progress_(std::move(progress)) {
  for (const StoredTensor& tensor : checkpoint.tensors()) total_ += tensor.bytes;
}

absl::StatusOr<Linear> WeightLoader::LoadLinear(const LinearSpec& spec) {
  const std::string name = spec.name + ".weight";
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                           spec.transposed ? checkpoint_.Require(name, {spec.k, spec.n})
                                           : checkpoint_.Require(name, {spec.n, spec.k}));
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<PackedMatrix> weight,
                           backend_.Pack({.format = tensor->format,
                                          .data = tensor->data,
                                          .n = spec.n,
                                          .k = spec.k,
                                          .row_order = spec.row_order,
                                          .transposed = spec.transposed}));
  weight_bytes_ += weight->bytes();
  Consumed(*tensor);
  Buffer bias;
  const std::string bias_name = spec.name + ".bias";
  if (spec.bias == Bias::kRequired ||
      (spec.bias == Bias::kIfPresent && checkpoint_.Find(bias_name) != nullptr)) {
    TREADLE_ASSIGN_OR_RETURN(bias, LoadVector(bias_name, spec.n, spec.row_order));
  }
  return Linear(std::move(weight), std::move(bias));
}

absl::StatusOr<Buffer> WeightLoader::LoadVector(const std::string& name, int64_t n,
                                                std::span<const int32_t> row_order) {
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint_.Require(name, {n}));
  std::vector<float> values = DecodeVector(*tensor);
  if (!row_order.empty()) {
    const std::vector<float> stored = values;
    for (size_t i = 0; i < values.size(); ++i) values[i] = stored[row_order[i]];
  }
  Consumed(*tensor);
  return Upload(values);
}

absl::StatusOr<Buffer> WeightLoader::Upload(std::span<const float> values) {
  TREADLE_ASSIGN_OR_RETURN(Buffer buffer, backend_.Allocate(values.size_bytes()));
  backend_.CopyToDevice(buffer.data(), values.data(), values.size_bytes());
  weight_bytes_ += values.size_bytes();
  return buffer;
}

void WeightLoader::Consumed(const StoredTensor& tensor) {
  DropMappedPages(tensor.data, tensor.bytes);
  consumed_ += tensor.bytes;
  if (progress_) progress_(static_cast<double>(consumed_) / static_cast<double>(total_));
}

void WeightLoader::Finish() const {
  if (progress_) progress_(1);
}

std::vector<float> DecodeVector(const StoredTensor& tensor) {
  const int64_t blocks = static_cast<int64_t>(tensor.bytes) / tensor.format->block_bytes;
  std::vector<float> values(static_cast<size_t>(blocks * tensor.format->block));
  tensor.format->decode(tensor.data, blocks, values.data());
  return values;
}

}  // namespace treadle
