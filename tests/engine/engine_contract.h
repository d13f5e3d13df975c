// An engine of each kind on a tiny Llama, for the promises of every Engine (engine/engine.h).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "models/adapters/adapter_file.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/engine_kinds.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {

// A tiny model of four layers, so that four stages have one each, and of heads and K/V heads that
// two and four ranks divide. `window`: of all layers; `sharing`: layers that read K/V of others.
inline const std::string& TinyPath(const char* architecture = "llama", int64_t window = 0,
                                   int64_t sharing = 0) {
  static std::map<std::string, std::string> paths;
  const std::string name = Str(architecture, window, sharing);
  std::string& path = paths[name];
  if (path.empty()) {
    const TinyModelOptions options{.layers = 4, .window = window, .shared_kv_layers = sharing};
    path =
        WriteTinyGguf(*FindArchitecture(architecture), OwnFolder().Folder(name), options).value();
  }
  return path;
}

inline LocalEngineOptions Options() {
  return {.max_batch_tokens = 64, .page_size = 16, .kv_pages = 48, .kv_dtype = DType::kF32};
}

inline IterationPlan OneRequest(uint64_t epoch, uint64_t iteration, SequenceId id = 1) {
  return PlanOf(epoch, iteration)
      .Start(StartOf(id, 3, {static_cast<int32_t>(id)}))
      .Step(SampleOf(StepOf(id, 0, {1, 2, 3})));
}

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

// An adapter of tests/testdata, and the model that it is of.
inline const std::string kAdapterBase = TREADLE_TESTDATA "/models/llama-grouped";
inline std::shared_ptr<const AdapterFile> OpenAdapter(const char* name) {
  const auto base = Checkpoint::Open(kAdapterBase);
  return AdapterFile::Open(Str(TREADLE_TESTDATA "/adapters/", name), base.value()->config())
      .value();
}

class EngineContract : public testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (kThreadSanitized && GetParam().gpus) {
      GTEST_SKIP() << "minutes for an iteration under ThreadSanitizer; RemoteGpus has such stages";
    }
    runner_ = std::make_unique<EngineRunner>(MakeEngine(GetParam(), TinyPath(), Options()));
    runner_->WaitForRoom();
  }
  Engine& engine() { return runner_->engine(); }
  int stages() const { return std::max(1, GetParam().stages); }
  // The base of the adapters can be cut so.
  bool HasAdapters() const { return GetParam().stages <= 2 && GetParam().ranks <= 2; }

  std::unique_ptr<EngineRunner> runner_;
};

}  // namespace treadle
