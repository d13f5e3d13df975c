#include "models/expert_rows.h"

#include <algorithm>

#include "base/status.h"
#include "models/architectures/architecture.h"

namespace treadle {

absl::Status ExpertRows::Allocate(Activations& activations, const ModelConfig& config,
                                  int64_t inner, int64_t max_rows) {
  per_row_ = config.experts_per_token;
  limit_ = ArchitectureOf(config).swiglu_limit;
  geglu_ = ArchitectureOf(config).geglu;
  gated_ = ArchitectureOf(config).gated_rows;
  const int64_t items = max_rows * per_row_;
  const auto add = [&](Tensor& tensor, int64_t rows, int64_t cols) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(tensor, activations.Add(rows / max_rows * cols));
    tensor = DenseTensor(tensor.data, DType::kF32, rows, cols);
    return absl::OkStatus();
  };
  TREADLE_RETURN_IF_ERROR(add(logits_, max_rows, config.experts));
  TREADLE_RETURN_IF_ERROR(add(ids_, max_rows, per_row_));
  TREADLE_RETURN_IF_ERROR(add(weights_, max_rows, per_row_));
  TREADLE_RETURN_IF_ERROR(add(rows_, items, config.hidden));
  TREADLE_RETURN_IF_ERROR(add(gate_, items, inner));
  TREADLE_RETURN_IF_ERROR(add(up_, items, inner));
  if (gated_) TREADLE_RETURN_IF_ERROR(add(logit_, items, 1));
  first_.resize(static_cast<size_t>(config.experts) + 1);
  host_ids_.reserve(static_cast<size_t>(items));
  order_.reserve(static_cast<size_t>(items));
  places_.reserve(static_cast<size_t>(items));
  logits_of_.reserve(static_cast<size_t>(items));
  linear_.reserve(2 * static_cast<size_t>(config.experts));
  return absl::OkStatus();
}

void ExpertRows::MatMul(Backend& backend, Tensor x) { adapters_.MatMul(backend, x, linear_); }

absl::Status ExpertRows::Route(Backend& backend, const Linear& router, const Routing& routing,
                               Tensor x, AdapterRows& adapters, ExpertUse& use) {
  const LinearProduct product[] = {router.To(logits_.Rows(0, x.rows))};
  adapters.MatMul(backend, x, product);
  ids_.rows = weights_.rows = x.rows;
  backend.Route(product[0].out, routing, ids_, weights_);
  const auto items = static_cast<size_t>(x.rows * per_row_);
  host_ids_.assign(items, 0);
  TREADLE_RETURN_IF_ERROR(backend.Synchronize());
  backend.CopyToHost(host_ids_.data(), ids_.data, items * sizeof(float));

  const auto experts = static_cast<size_t>(std::ssize(first_) - 1);
  std::ranges::fill(first_, 0);
  for (const float id : host_ids_) {
    // Nothing but a failure of the device.
    if (!(id >= 0 && id < static_cast<float>(experts))) {
      return Internal("a row goes to expert ", id, " of ", experts);
    }
    ++first_[static_cast<size_t>(id) + 1];
  }
  use.rows += static_cast<int64_t>(items);
  ++use.layers;
  for (size_t i = 0; i < experts; ++i) {
    use.used += first_[i + 1] > 0 ? 1 : 0;
    use.most_rows = std::max<int64_t>(use.most_rows, first_[i + 1]);
    first_[i + 1] += first_[i];
  }
  order_.resize(items);
  places_.resize(items);
  for (size_t i = 0; i < items; ++i) {  // an expert's rows ascend
    const int32_t place = first_[static_cast<size_t>(host_ids_[i])]++;
    order_[place] = static_cast<int32_t>(static_cast<int64_t>(i) / per_row_);
    places_[i] = place;
  }
  logits_of_.resize(gated_ ? items : 0);
  for (size_t i = 0; i < logits_of_.size(); ++i) {
    logits_of_[static_cast<size_t>(places_[i])] = static_cast<int32_t>(
        static_cast<int64_t>(i) / per_row_ * logits_.cols + static_cast<int64_t>(host_ids_[i]));
  }
  std::shift_right(first_.begin(), first_.end(), 1);  // each has become the next one's
  first_[0] = 0;
  row_adapters_.clear();
  for (size_t i = 0; i < items && !adapters.empty(); ++i) {
    row_adapters_.push_back(adapters.of_rows()[static_cast<size_t>(order_[i])]);
  }
  adapters_.Sort(row_adapters_);
  return absl::OkStatus();
}

void ExpertRows::Run(Backend& backend, std::span<const Linear> gate, std::span<const Linear> up,
                     std::span<const Linear> down, Tensor x) {
  const bool gates = !gate.empty();
  const auto for_each = [&](const auto& add) {
    linear_.clear();
    for (size_t i = 0; i + 1 < first_.size(); ++i) {
      if (first_[i + 1] > first_[i]) add(i, first_[i], first_[i + 1] - first_[i]);
    }
  };
  backend.Gather(x, order_, Chosen(rows_));
  if (gated_) {
    const Tensor logits = DenseTensor(logits_.data, DType::kF32, x.rows * logits_.cols, 1);
    backend.Gather(logits, logits_of_, Chosen(logit_));
    backend.SigmoidGate(Chosen(logit_), Chosen(rows_), Chosen(rows_));
  }
  for_each([&](size_t expert, int64_t first, int64_t count) {
    if (gates) linear_.push_back(gate[expert].To(gate_.Rows(first, count)));
    linear_.push_back(up[expert].To(up_.Rows(first, count)));
    for (Projection& product : std::span(linear_).last(gates ? 2 : 1)) product.first_row = first;
  });
  if (gates && limit_ == 0) {
    adapters_.GatedMatMul(backend, Chosen(rows_), linear_,
                          geglu_ ? Backend::Gate::kGeGlu : Backend::Gate::kSwiGlu, Chosen(gate_),
                          Chosen(up_), Chosen(gate_));
  } else {
    MatMul(backend, Chosen(rows_));
    if (gates) {
      backend.ClampedSwiGlu(Chosen(gate_), Chosen(up_), limit_, Chosen(gate_));
    } else {
      SquaredRelu(backend, Chosen(up_), Chosen(gate_));
    }
  }
  for_each([&](size_t expert, int64_t first, int64_t count) {
    linear_.push_back(down[expert].To(rows_.Rows(first, count)));
    linear_.back().first_row = first;
  });
  MatMul(backend, Chosen(gate_));
}

void ExpertRows::Mix(Backend& backend, bool accumulate, Tensor out) const {
  backend.Mix(Chosen(rows_), places_, weights_, accumulate, out);
}

}  // namespace treadle
