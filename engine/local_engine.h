// The engine inside this process: one stage with all layers, on one rank thread.
//
// Thread safety: as Engine. The rank thread owns the backend, the model and the K/V cache.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

struct LocalEngineOptions {
  int64_t max_batch_tokens = 512;
  int64_t page_size = 32;
  int64_t kv_pages = 0;
  DType kv_dtype = DType::kF16;
  // Plans in flight: 2 lets a sequence's next step use the previous sample without waiting for the
  // host (DESIGN section 3, Algorithm 1).
  int depth = 2;
  std::chrono::milliseconds iteration_deadline{120'000};
};

class LocalEngine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(std::unique_ptr<Backend> backend,
                                                        std::unique_ptr<Model> model,
                                                        const LocalEngineOptions& options);
};

}  // namespace treadle
