#include "bench/quality/importance_of_text.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/quality/teacher_forcing.h"
#include "kernels/forwarding_backend.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

// Sees which matrix of the file is packed, and later what it is multiplied by.
class ImportanceBackend : public ForwardingBackend {
 public:
  ImportanceBackend(std::unique_ptr<Backend> below, const Checkpoint& checkpoint, Importance& sums)
      : ForwardingBackend(std::move(below)), sums_(sums) {
    const Architecture& architecture = ArchitectureOf(checkpoint.config());
    for (const StoredTensor& tensor : checkpoint.tensors()) {
      const TensorName name =
          ParseTensorName(architecture, checkpoint.kind(), tensor.name, &checkpoint.config());
      if (name.row == nullptr || !InLayer(name.row->part) || tensor.shape.size() != 2) continue;
      stored_[tensor.data] = SpellTensorName(architecture, Checkpoint::Kind::kGguf, name);
    }
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    auto packed = ForwardingBackend::Pack(source);
    const auto name = stored_.find(source.data);
    if (packed.ok() && name != stored_.end()) names_[packed->get()] = name->second;
    return packed;
  }
  // MatMul reads floats.
  DType InputType(std::span<const PackedMatrix* const>) const override { return DType::kF32; }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    for (const Projection& projection : projections) {
      const auto name = names_.find(projection.weight);
      const Tensor rows = x.Rows(projection.first_row, projection.out.rows);
      if (name == names_.end() || rows.rows == 0) continue;
      sums_.Add(name->second, rows.Row<float>(0), rows.rows, rows.cols, rows.stride);
    }
    ForwardingBackend::MatMul(x, projections);
  }

 private:
  Importance& sums_;
  std::map<const std::byte*, std::string> stored_;
  std::map<const PackedMatrix*, std::string> names_;
};

}  // namespace

absl::StatusOr<Importance> ImportanceOfText(const Checkpoint& checkpoint,
                                            std::unique_ptr<Backend> backend,
                                            std::span<const int32_t> tokens, int threads,
                                            std::function<void(double)> progress) {
  if (tokens.empty()) return InvalidArgument("no text to find the importance of columns in");
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t window = std::min({kImportanceChunk, checkpoint.config().context, count});
  Importance importance;
  TeacherForcedModel::Options reading = {.window = window, .chunk = window};
  reading.load.threads = threads;
  TREADLE_ASSIGN_OR_RETURN(
      const auto model, TeacherForcedModel::Create(checkpoint,
                                                   std::make_unique<ImportanceBackend>(
                                                       std::move(backend), checkpoint, importance),
                                                   reading));
  std::vector<float> storage(static_cast<size_t>(window * model->hidden_size()));
  for (int64_t begin = 0; begin < count; begin += window) {
    const int64_t some = std::min(window, count - begin);
    model->Forward(tokens.subspan(begin, some),
                   DenseTensor(storage.data(), DType::kF32, some, model->hidden_size()));
    if (progress) progress(static_cast<double>(begin + some) / static_cast<double>(count));
  }
  return importance;
}

}  // namespace treadle
