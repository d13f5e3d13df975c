// Workers for tests, and a RemoteEngine over them: in this process, or in processes of their own.
//
// Thread safety: one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/remote/remote_engine.h"
#include "engine/remote/worker/worker.h"
#include "tests/server/cli/child_process.h"

namespace treadle {

struct ClusterOptions {
  std::string model;  // GGUF file or folder, of the master and, unless they get it sent, of workers
  int stages = 1;
  // Stages, checkpoint and addresses are filled in. Short deadlines, f32 cache, exact.
  RemoteEngineOptions engine = QuickOptions();
  WorkerOptions worker = QuietWorker();  // as all workers are started; model_path is filled in
  // Where the master and the previous stage find a worker that listens at `address`: itself, or
  // something between.
  std::function<std::string(int stage, const std::string& address)> reach;

  static RemoteEngineOptions QuickOptions();
  static WorkerOptions QuietWorker();
};

// Layers [0, layers) in `stages` parts that differ by one at most.
std::vector<LayerRange> EvenLayers(int64_t layers, int stages);

// The engine's options for workers at these addresses.
absl::StatusOr<RemoteEngineOptions> EngineOptionsFor(const ClusterOptions& options,
                                                     const std::vector<std::string>& addresses);

struct ThreadCluster {
  std::vector<std::unique_ptr<Worker>> workers;
  std::unique_ptr<RemoteEngine> engine;  // last: ends before the workers
};
// Workers in this process, their engine ready to be started.
absl::StatusOr<ThreadCluster> StartThreadCluster(const ClusterOptions& options);

// A worker in a process of its own, killed with its object, or with this process.
class WorkerProcess {
 public:
  // `listen`: as WorkerOptions; `model` may be empty.
  WorkerProcess(const std::string& listen, const std::string& model);
  // Empty if it did not come up.
  const std::string& address() const { return address_; }
  void Signal(int signal) const { process_->Signal(signal); }
  // SIGKILL, and waits until it is gone.
  void Kill();

 private:
  std::unique_ptr<ChildProcess> process_;
  std::string address_;
};

struct ProcessCluster {
  std::vector<std::unique_ptr<WorkerProcess>> workers;
  std::unique_ptr<RemoteEngine> engine;
};
absl::StatusOr<ProcessCluster> StartProcessCluster(const ClusterOptions& options);

}  // namespace treadle
