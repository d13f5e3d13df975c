// A LocalEngine on one rank.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/local_engine.h"

namespace treadle {

inline absl::StatusOr<std::unique_ptr<LocalEngine>> OneRankEngine(
    std::unique_ptr<Backend> backend, std::unique_ptr<Model> model,
    const LocalEngineOptions& options) {
  std::vector<StageRanks::Rank> ranks;
  ranks.push_back({std::move(backend), std::move(model)});
  return LocalEngine::Create(std::move(ranks), options);
}

}  // namespace treadle
