#include "bench/quality/weight_bits.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "kernels/formats/quantize.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

absl::StatusOr<double> BitsPerWeight(const QuantizeSpec& spec, int64_t n, int64_t k) {
  // Any values do; these have no block of zeros.
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) - 125;
  const ParallelFor here = [](int64_t count, const auto& body) { body(0, count); };
  TREADLE_ASSIGN_OR_RETURN(const QuantizedMatrix matrix, Quantize(spec, values, n, k, here));
  return matrix.BitsPerWeight();
}

absl::StatusOr<double> StoredBits(const StoredTensor& tensor) {
  double bits = 8.0 * static_cast<double>(tensor.bytes);
  if (!tensor.constants) return bits;
  TREADLE_ASSIGN_OR_RETURN(const MatrixConstants constants, tensor.constants());
  return bits + 32.0 * static_cast<double>(constants.scales.size());
}

}  // namespace

absl::StatusOr<WeightBits> CountWeightBits(const Checkpoint& checkpoint, const WeightPlan& plan) {
  const ModelConfig& config = checkpoint.config();
  std::map<std::tuple<std::string, int64_t, int64_t>, double> known;
  WeightBits sum;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    int64_t count = 1;
    for (const int64_t extent : tensor.shape) count *= extent;
    const bool matrix = tensor.shape.size() == 2;
    const QuantizeSpec* spec = matrix ? plan.For(tensor.name, config.tied_head) : nullptr;
    if (spec == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(const double bits, StoredBits(tensor));
      sum.kept += count;
      sum.kept_bits += bits;
      continue;
    }
    int64_t n = tensor.shape[0], k = tensor.shape[1];
    const bool transposed = checkpoint.kind() == Checkpoint::Kind::kHuggingFace &&
                            TransposedInFolder(config, tensor) && !tensor.constants;
    if (transposed) std::swap(n, k);
    const auto key = std::make_tuple(spec->name, n, k);
    if (!known.contains(key)) {
      TREADLE_ASSIGN_OR_RETURN(known[key], BitsPerWeight(*spec, n, k));
    }
    sum.converted += count;
    sum.converted_bits += known[key] * static_cast<double>(count);
  }
  return sum;
}

}  // namespace treadle
