#include "bench/quality/planted_outliers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

// Whether a layer's matrix reads what the norm leaves.
bool Reads(const TensorRow& matrix, Part norm) {
  const bool attention = matrix.rows == Extent::kQueries || matrix.rows == Extent::kKeys;
  return matrix.columns == Extent::kHidden &&
         (norm == Part::kAttentionNorm ? attention : matrix.rows == Extent::kInner);
}

// Memory that loading may drop from the process and read again, as it does with files.
struct Unmap {
  size_t bytes;
  void operator()(float* values) const { munmap(values, bytes); }
};
using SharedFloats = std::unique_ptr<float[], Unmap>;

class PlantedCheckpoint : public Checkpoint {
 public:
  absl::Status Plant(const Checkpoint& base, const OutlierPlan& plan);

 private:
  // `tensor` as floats of its own. [rows, cols]
  absl::StatusOr<std::span<float>> Own(StoredTensor& tensor);

  std::vector<SharedFloats> owned_;
};

absl::StatusOr<std::span<float>> PlantedCheckpoint::Own(StoredTensor& tensor) {
  const int64_t rows = tensor.shape.size() == 2 ? tensor.shape[0] : 1;
  const int64_t cols = tensor.shape.back();
  MatrixConstants constants;
  TREADLE_ASSIGN_OR_RETURN(const MatrixSource source, SourceOf(tensor, rows, cols, constants));
  const size_t bytes = static_cast<size_t>(rows * cols) * sizeof(float);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return ResourceExhausted("no memory for ", bytes, " bytes of weights");
  owned_.emplace_back(static_cast<float*>(data), Unmap{bytes});
  const std::span<float> values(owned_.back().get(), static_cast<size_t>(rows * cols));
  for (int64_t row = 0; row < rows; ++row) {
    DecodeSourceRow(source, row, values.data() + row * cols);
  }
  tensor.format = FindWeightFormat("f32");
  tensor.data = reinterpret_cast<const std::byte*>(values.data());
  tensor.bytes = bytes;
  tensor.constants = {};
  return values;
}

absl::Status PlantedCheckpoint::Plant(const Checkpoint& base, const OutlierPlan& plan) {
  kind_ = base.kind();
  path_ = base.path();
  model_name_ = base.model_name() + " with planted outlier features";
  config_ = base.config();
  if (base.tokenizer() != nullptr) tokenizer_ = *base.tokenizer();
  chat_template_ = base.chat_template();
  file_bytes_ = base.file_bytes();
  const Architecture& architecture = ArchitectureOf(config_);
  std::vector<StoredTensor> tensors = base.tensors();
  std::map<std::string_view, StoredTensor*> by_name;
  for (StoredTensor& tensor : tensors) by_name[tensor.name] = &tensor;

  for (StoredTensor& norm : tensors) {
    const TensorName name = ParseTensorName(architecture, kind_, norm.name);
    if (name.row == nullptr ||
        (name.row->part != Part::kAttentionNorm && name.row->part != Part::kFfnNorm)) {
      continue;
    }
    TREADLE_ASSIGN_OR_RETURN(const std::span<float> weights, Own(norm));
    std::vector<size_t> order(weights.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(
        order, [&](size_t a, size_t b) { return std::abs(weights[a]) > std::abs(weights[b]); });
    order.resize(static_cast<size_t>(plan.features));
    for (const size_t feature : order) weights[feature] *= plan.factor;

    for (const TensorRow& row : architecture.tensors) {
      if (!Reads(row, name.row->part)) continue;
      const std::string reader =
          SpellTensorName(architecture, kind_, {&row, name.layer, name.suffix});
      if (!by_name.contains(reader))
        return InvalidArgument(path_, ": tensor '", reader, "' is missing");
      TREADLE_ASSIGN_OR_RETURN(const std::span<float> matrix, Own(*by_name[reader]));
      for (size_t row = 0; row < matrix.size(); row += weights.size()) {
        for (const size_t feature : order) matrix[row + feature] /= plan.factor;
      }
    }
  }
  AddTensors(std::move(tensors));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> PlantOutliers(const Checkpoint& checkpoint,
                                                          const OutlierPlan& plan) {
  const ModelConfig& config = checkpoint.config();
  if (ArchitectureOf(config).norm != NormKind::kRms) {
    return Unimplemented("outlier features are planted behind RMS norms only, ", checkpoint.path(),
                         " is ", config.architecture);
  }
  int exponent = 0;
  if (plan.features < 1 || plan.features > config.hidden ||
      std::frexp(plan.factor, &exponent) != 0.5f) {
    return InvalidArgument("planting ", plan.features, " features of ", config.hidden, " by ",
                           plan.factor, ": expected some of them, and a power of two");
  }
  auto planted = std::make_unique<PlantedCheckpoint>();
  TREADLE_RETURN_IF_ERROR(planted->Plant(checkpoint, plan));
  return planted;
}

}  // namespace treadle
