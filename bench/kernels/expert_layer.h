// The experts of a model's first layer as its forward pass runs them: routing, products and sum.
// Rows are others in each call, so that weights come from memory, as far as all experts' exceed the
// caches.
//
// Thread safety: as the backend's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"
#include "models/checkpoints/checkpoint.h"
#include "models/expert_rows.h"

namespace treadle {

class ExpertLayer {
 public:
  // For up to `max_rows` rows; the router stays as it is stored. `checkpoint` names its tensors as
  // GGUF does. Errors: a tensor is missing; those of Quantize and of the backend.
  static absl::StatusOr<std::unique_ptr<ExpertLayer>> Create(const Checkpoint& checkpoint,
                                                             const QuantizeSpec& spec,
                                                             Backend& backend, int64_t max_rows);

  struct Call {
    double seconds = 0;
    double bytes = 0;  // of the weights of those experts that had rows
    double operations = 0;
  };
  absl::StatusOr<Call> Run(int64_t rows);

 private:
  ExpertLayer(Backend& backend, const ModelConfig& config, int64_t max_rows)
      : backend_(backend), config_(config), max_rows_(max_rows), activations_(backend, max_rows) {}
  absl::Status Load(const Checkpoint& checkpoint, const QuantizeSpec& spec);
  absl::StatusOr<Linear> Load(const Checkpoint& checkpoint, const std::string& name,
                              const QuantizeSpec* spec);

  Backend& backend_;
  const ModelConfig config_;
  const int64_t max_rows_;
  double bytes_ = 0;  // of all experts
  Activations activations_;
  ExpertRows rows_;
  AdapterRows adapters_;  // none
  Linear router_;
  std::vector<Linear> gate_, up_, down_;  // [experts]
  Buffer input_;                          // [more rows than a call's, hidden]
  Tensor output_;                         // [max_rows, hidden]
  int64_t next_ = 0;                      // of the input's rows
};

}  // namespace treadle
