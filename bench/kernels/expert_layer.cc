#include "bench/kernels/expert_layer.h"

#include <algorithm>
#include <chrono>

#include "base/status.h"
#include "kernels/op_cases/random.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

// So many that all experts have had rows before the first come again.
constexpr int64_t kInputs = 2048;

}  // namespace

absl::StatusOr<Linear> ExpertLayer::Load(const Checkpoint& checkpoint, const std::string& name,
                                         const QuantizeSpec* spec) {
  const StoredTensor* const tensor = checkpoint.Find(Str("blk.0.", name, ".weight"));
  if (tensor == nullptr || tensor->shape.size() != 2) {
    return InvalidArgument(checkpoint.path(), ": has no matrix 'blk.0.", name, ".weight'");
  }
  MatrixConstants constants;
  TREADLE_ASSIGN_OR_RETURN(MatrixSource source,
                           SourceOf(*tensor, tensor->shape[0], tensor->shape[1], constants));
  QuantizedMatrix quantized;
  if (spec != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(
        quantized, Quantize(*spec, DecodeVector(*tensor), source.n, source.k, SplitOverThreads(0)));
    source = quantized.source();
    bytes_ += static_cast<double>(source.format->MatrixBytes(source.n, source.k)) +
              4.0 * static_cast<double>(quantized.constants.scales.size());
  }
  source.of_layer = true;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<PackedMatrix> packed, backend_.Pack(source));
  return Linear(std::move(packed), Buffer());
}

absl::Status ExpertLayer::Load(const Checkpoint& checkpoint, const QuantizeSpec& spec) {
  TREADLE_ASSIGN_OR_RETURN(router_, Load(checkpoint, "ffn_gate_inp", nullptr));
  const std::pair<const char*, std::vector<Linear>*> parts[] = {
      {"ffn_gate_exps.", &gate_}, {"ffn_up_exps.", &up_}, {"ffn_down_exps.", &down_}};
  for (const auto& [name, linears] : parts) {
    for (int64_t i = 0; i < config_.experts; ++i) {
      TREADLE_ASSIGN_OR_RETURN(Linear linear, Load(checkpoint, Str(name, i), &spec));
      linears->push_back(std::move(linear));
    }
  }
  TREADLE_RETURN_IF_ERROR(rows_.Allocate(activations_, config_, config_.ffn_hidden, max_rows_));
  TREADLE_ASSIGN_OR_RETURN(output_, activations_.Add(config_.hidden));
  // Rows that have nothing in common, so that they go to experts alike.
  std::vector<float> values(static_cast<size_t>((kInputs + max_rows_) * config_.hidden));
  std::ranges::generate(values, [random = Random(1)]() mutable { return random.Normal(); });
  TREADLE_ASSIGN_OR_RETURN(input_, backend_.Allocate(values.size() * sizeof(float)));
  backend_.CopyToDevice(input_.data(), values.data(), values.size() * sizeof(float));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ExpertLayer>> ExpertLayer::Create(const Checkpoint& checkpoint,
                                                                 const QuantizeSpec& spec,
                                                                 Backend& backend,
                                                                 int64_t max_rows) {
  std::unique_ptr<ExpertLayer> layer(new ExpertLayer(backend, checkpoint.config(), max_rows));
  TREADLE_RETURN_IF_ERROR(layer->Load(checkpoint, spec));
  return layer;
}

absl::StatusOr<ExpertLayer::Call> ExpertLayer::Run(int64_t rows) {
  const Tensor inputs =
      DenseTensor(input_.data(), DType::kF32, kInputs + max_rows_, config_.hidden);
  const Tensor x = inputs.Rows(next_, rows);
  next_ = (next_ + rows) % kInputs;
  ExpertUse use;
  const auto begin = Clock::now();
  const Routing routing = {.normalize = config_.normalized_experts};
  TREADLE_RETURN_IF_ERROR(rows_.Route(backend_, router_, routing, x, adapters_, use));
  rows_.Run(backend_, gate_, up_, down_, x);
  rows_.Mix(backend_, /*accumulate=*/true, output_.Rows(0, rows));
  TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const double weights = 3.0 * static_cast<double>(config_.hidden * config_.ffn_hidden);
  return Call{
      .seconds = seconds,
      .bytes = bytes_ / static_cast<double>(config_.experts) * static_cast<double>(use.used),
      .operations = 2 * weights * static_cast<double>(use.rows)};
}

}  // namespace treadle
