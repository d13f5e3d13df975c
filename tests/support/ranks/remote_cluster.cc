#include "tests/support/ranks/remote_cluster.h"

#include <signal.h>
#include <unistd.h>

#include <utility>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"

namespace treadle {
namespace {

// A loopback address that no other test process has. The port of a worker that a test has lost may
// at once become another process' worker's, and a master that looks for the lost one would end that
// one's epoch.
std::string OwnLoopback() {
  const auto pid = static_cast<uint32_t>(getpid());
  return Str("127.", 1 + (pid >> 16) % 128, ".", (pid >> 8) % 256, ".", pid % 256);
}

}  // namespace

RemoteEngineOptions ClusterOptions::QuickOptions() {
  RemoteEngineOptions options;
  options.max_batch_tokens = 64;
  options.compute = ComputeMode::kExact;
  options.page_size = 16;
  options.kv_pages = 64;
  options.kv_dtype = DType::kF32;
  const std::chrono::milliseconds deadline{kInstrumented ? 20'000 : 5'000};
  options.iteration_deadline = deadline;
  options.silence = deadline;
  options.connect_deadline = deadline;
  return options;
}

WorkerOptions ClusterOptions::QuietWorker() {
  WorkerOptions options;
  options.listen = Str(OwnLoopback(), ":0");
  options.ranks.threads = 1;
  return options;
}

std::vector<LayerRange> EvenLayers(int64_t layers, int stages) {
  std::vector<LayerRange> ranges;
  for (int64_t i = 0; i < stages; ++i) {
    ranges.push_back({layers * i / stages, layers * (i + 1) / stages});
  }
  return ranges;
}

absl::StatusOr<RemoteEngineOptions> EngineOptionsFor(const ClusterOptions& options,
                                                     const std::vector<std::string>& addresses) {
  RemoteEngineOptions engine = options.engine;
  TREADLE_ASSIGN_OR_RETURN(engine.checkpoint, Checkpoint::Open(options.model));
  const std::vector<LayerRange> layers =
      EvenLayers(engine.checkpoint->config().layers, static_cast<int>(addresses.size()));
  engine.stages.clear();
  for (size_t i = 0; i < addresses.size(); ++i) {
    const std::string address =
        options.reach ? options.reach(static_cast<int>(i), addresses[i]) : addresses[i];
    engine.stages.push_back({.address = address, .layers = layers[i]});
  }
  return engine;
}

absl::StatusOr<ThreadCluster> StartThreadCluster(const ClusterOptions& options) {
  ThreadCluster cluster;
  std::vector<std::string> addresses;
  for (int i = 0; i < options.stages; ++i) {
    WorkerOptions worker = options.worker;
    if (!options.engine.weights_from_master) worker.model_path = options.model;
    TREADLE_ASSIGN_OR_RETURN(cluster.workers.emplace_back(), Worker::Start(std::move(worker)));
    addresses.push_back(cluster.workers.back()->address());
  }
  TREADLE_ASSIGN_OR_RETURN(RemoteEngineOptions engine, EngineOptionsFor(options, addresses));
  TREADLE_ASSIGN_OR_RETURN(cluster.engine, RemoteEngine::Create(std::move(engine)));
  return cluster;
}

WorkerProcess::WorkerProcess(const std::string& listen, const std::string& model) {
  process_ =
      std::make_unique<ChildProcess>(std::vector<std::string>{TREADLE_TEST_WORKER, listen, model});
  const std::string said = "listening on ";
  const std::string line = process_->WaitForLine(said);
  if (const size_t at = line.find(said); at != std::string::npos) {
    address_ = line.substr(at + said.size());
  }
}

void WorkerProcess::Kill() {
  process_->Signal(SIGKILL);
  process_->Wait();
}

absl::StatusOr<ProcessCluster> StartProcessCluster(const ClusterOptions& options) {
  ProcessCluster cluster;
  std::vector<std::string> addresses;
  for (int i = 0; i < options.stages; ++i) {
    cluster.workers.push_back(std::make_unique<WorkerProcess>(
        options.worker.listen, options.engine.weights_from_master ? "" : options.model));
    if (cluster.workers.back()->address().empty()) return Internal("a worker did not come up");
    addresses.push_back(cluster.workers.back()->address());
  }
  TREADLE_ASSIGN_OR_RETURN(RemoteEngineOptions engine, EngineOptionsFor(options, addresses));
  TREADLE_ASSIGN_OR_RETURN(cluster.engine, RemoteEngine::Create(std::move(engine)));
  return cluster;
}

}  // namespace treadle
