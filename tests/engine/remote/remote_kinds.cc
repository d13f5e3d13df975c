#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/engine_kinds.h"
#include "tests/support/emulated_gpus.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

// An engine and its workers, which outlive it.
class EngineWithWorkers final : public Engine {
 public:
  explicit EngineWithWorkers(ThreadCluster cluster)
      : cluster_(std::move(cluster)), engine_(*cluster_.engine) {}

  absl::Status Start(std::function<void()> wake) override { return engine_.Start(std::move(wake)); }
  int stages() const override { return engine_.stages(); }
  int depth() const override { return engine_.depth(); }
  uint64_t epoch() const override { return engine_.epoch(); }
  bool HasRoom() const override { return engine_.HasRoom(); }
  void Submit(IterationPlan plan) override { engine_.Submit(std::move(plan)); }
  void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) override {
    engine_.SetMasks(epoch, iteration, std::move(masks));
  }
  absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) override {
    return engine_.LoadAdapter(std::move(adapter));
  }
  void UnloadAdapter(uint64_t id) override { engine_.UnloadAdapter(id); }
  std::vector<IterationResult> TakeResults() override { return engine_.TakeResults(); }
  absl::Status status() const override { return engine_.status(); }
  void Restart() override { engine_.Restart(); }
  void SetTracing(bool on) override { engine_.SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return engine_.TakeTrace(); }

 private:
  ThreadCluster cluster_;
  Engine& engine_;
};

}  // namespace

std::unique_ptr<Backend> MakeBackend(const EngineKind& kind) {
  auto backend = kind.gpus ? EmulatedGpu(0, DType::kF32)
                           : CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

std::unique_ptr<Engine> MakeEngine(const EngineKind& kind, const std::string& model,
                                   const LocalEngineOptions& options) {
  ClusterOptions cluster;
  cluster.model = model;
  cluster.stages = kind.stages;
  cluster.engine.tensor_parallel = kind.ranks;
  cluster.engine.late_plans = kind.late;
  cluster.engine.max_batch_tokens = options.max_batch_tokens;
  cluster.engine.page_size = options.page_size;
  cluster.engine.kv_pages = options.kv_pages;
  cluster.engine.kv_dtype = options.kv_dtype;
  cluster.engine.compute = kind.gpus ? ComputeMode::kAuto : ComputeMode::kExact;
  if (kind.gpus) {
    cluster.engine.backend = "cuda";
    cluster.engine.dtype = DType::kF32;
    cluster.engine.deterministic = true;
    cluster.worker.ranks.gpus = EmulatedGpus(2);
    if (kind.links) cluster.engine.data_plane = DataPlane::kNccl;
  }
  cluster.engine.iteration_deadline = std::chrono::minutes(kInstrumented ? 10 : 1);
  auto started = StartThreadCluster(cluster);
  if (!started.ok()) std::fprintf(stderr, "%s\n", started.status().ToString().c_str());
  TREADLE_CHECK(started.ok());
  return std::make_unique<EngineWithWorkers>(*std::move(started));
}

std::vector<EngineKind> EngineKinds() {
  std::vector<EngineKind> kinds;
  for (const int stages : {1, 2, 3, 4}) kinds.push_back({.stages = stages});
  for (const int stages : {1, 2}) kinds.push_back({.ranks = 2, .stages = stages});
  for (const int ranks : {1, 2}) kinds.push_back({.ranks = ranks, .stages = 2, .gpus = true});
  kinds.push_back({.ranks = 2, .stages = 2, .gpus = true, .links = true});
  kinds.push_back({.stages = 3, .late = true});
  kinds.push_back({.ranks = 2, .stages = 2, .late = true});
  return kinds;
}

}  // namespace treadle
