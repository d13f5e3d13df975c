#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/engine_kinds.h"
#include "tests/support/deferred_backend.h"

namespace treadle {
namespace {

std::unique_ptr<Engine> MakeLocal(const EngineKind& kind, const std::string& path,
                                  const LocalEngineOptions& options) {
  auto checkpoint = Checkpoint::Open(path).value();
  std::vector<StageRanks::Rank> made;
  for (int rank = 0; rank < kind.ranks; ++rank) {
    std::unique_ptr<Backend> backend = MakeBackend(kind);
    if (kind.deferred) {
      backend = std::make_unique<DeferredBackend>(std::move(backend),
                                                  std::make_shared<DeferredBackend::Counts>());
    }
    LoadOptions load;
    load.shard = {rank, kind.ranks};
    load.max_batch_tokens = options.max_batch_tokens;
    load.threads = 1;
    auto model = Model::Load(*checkpoint, *backend, load).value();
    made.push_back({std::move(backend), std::move(model)});
  }
  return LocalEngine::Create(std::move(made), options).value();
}

}  // namespace

std::unique_ptr<Backend> MakeBackend(const EngineKind&) {
  return CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact}).value();
}

std::unique_ptr<Engine> MakeEngine(const EngineKind& kind, const std::string& model,
                                   const LocalEngineOptions& options) {
  return MakeLocal(kind, model, options);
}

std::vector<EngineKind> EngineKinds() {
  return {{.ranks = 1}, {.ranks = 2}, {.ranks = 4}, {.ranks = 1, .deferred = true}};
}

}  // namespace treadle
