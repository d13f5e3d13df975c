// The engines that obey the one contract: in this process (local_kinds.cc) or over workers
// (remote/remote_kinds.cc), on one rank or several.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/local_engine.h"

namespace treadle {

struct EngineKind {
  int ranks = 1;      // tensor-parallel, of each stage
  int stages = 0;     // of RemoteEngine; 0: LocalEngine
  bool late = false;  // RemoteEngineOptions::late_plans
  // On an asynchronous device (tests/support/deferred_backend.h).
  bool deferred = false;
  // On emulated GPUs (tests/support/emulated_gpus.h): much slower.
  bool gpus = false;
  bool links = false;  // GPUs, and activations stay on them

  bool asynchronous() const { return deferred || gpus; }

  std::string Name() const {
    return (stages == 0 ? std::string("Local") : "Stages" + std::to_string(stages)) +
           (ranks == 1 ? "" : "Ranks" + std::to_string(ranks)) + (late ? "Late" : "") +
           (deferred ? "Deferred" : "") + (gpus ? "Gpus" : "") + (links ? "Links" : "");
  }
};

// Backend of one rank of that kind.
std::unique_ptr<Backend> MakeBackend(const EngineKind& kind);

// An engine of a kind that EngineKinds names: computes exact (GPUs: in f32), one thread per rank.
std::unique_ptr<Engine> MakeEngine(const EngineKind& kind, const std::string& model,
                                   const LocalEngineOptions& options);

std::vector<EngineKind> EngineKinds();

}  // namespace treadle
