// The engines that obey the one contract: in this process (local_kinds.cc) or over workers
// (remote/remote_kinds.cc), on one rank or several.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/local_engine.h"

namespace treadle {

struct EngineKind {
  int ranks = 1;   // tensor-parallel, of each stage
  int stages = 0;  // of RemoteEngine; 0: LocalEngine
  // On an asynchronous device (tests/support/deferred_backend.h).
  bool deferred = false;

  std::string Name() const {
    return (stages == 0 ? std::string("Local") : "Stages" + std::to_string(stages)) +
           (ranks == 1 ? "" : "Ranks" + std::to_string(ranks)) + (deferred ? "Deferred" : "");
  }
};

// Of a kind that EngineKinds names. Computes exact, on one thread per rank.
std::unique_ptr<Engine> MakeEngine(const EngineKind& kind, const std::string& model,
                                   const LocalEngineOptions& options);

std::vector<EngineKind> EngineKinds();

}  // namespace treadle
