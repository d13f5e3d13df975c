// The state of a Worker: what its master says, on gRPC's threads (worker.cc), and what it does
// about it, on the task thread (worker_tasks.cc).
//
// Thread safety: as said of each group of methods.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/background.h"
#include "base/sync.h"
#include "engine/remote/host_delay.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/worker/held_stage.h"
#include "engine/remote/worker/worker.h"

namespace treadle {

namespace control {
class Adapter;
class MasterHello;
}  // namespace control

// The master that is attached. Sends from any thread; the rest is constant once it has said hello.
struct Master {
  std::shared_ptr<Stream<control::WorkerMessage>> stream;
  uint64_t id = 0;
  std::chrono::milliseconds silence{0};
  std::chrono::milliseconds heartbeat{0};
  bool weights_from_master = false;
  std::string files;  // FilesHere of the model that it opened
  // Whether the worker asked to leave, once in an attachment. For its stream's events only.
  bool drains = false;
  bool configured = false;
  bool reserved = false;
};
using MasterPointer = std::shared_ptr<Master>;

class Worker::State final : public StageLender {
 public:
  explicit State(WorkerOptions options) : options_(std::move(options)) {}
  ~State() override;

  absl::Status Listen();
  const std::string& address() const { return server_->address(); }
  void Lend(control::Configure&& wanted, bool replace,
            std::function<void(absl::StatusOr<LentStage>)> then) override;

 private:
  // gRPC's threads.
  StreamEvents<control::MasterMessage> Accept(
      std::shared_ptr<Stream<control::WorkerMessage>> stream);
  void OnMessage(const MasterPointer& master, control::MasterMessage& message);
  void OnHello(const MasterPointer& master, const control::MasterHello& hello);
  void OnDrain(const MasterPointer& master);
  void Dispatch(const MasterPointer& master, control::MasterMessage& message);
  void Detach(const MasterPointer& master, const absl::Status& why);
  bool IsCurrent(const MasterPointer& master) {
    MutexLock lock(mutex_);
    return master_ == master;
  }

  // The task thread.
  void Post(const MasterPointer& master, std::function<absl::Status()> task);
  absl::Status Greet(const MasterPointer& master);
  absl::Status Configure(const MasterPointer& master, const control::Configure& configuration);
  absl::StatusOr<LentStage> StageFor(const control::Configure& wanted, bool replace);
  StageSource SourceFor(const MasterPointer& master);
  absl::Status Reserve(const MasterPointer& master, const PageCounts& kv_pages);
  absl::Status LoadAdapter(const MasterPointer& master, control::Adapter&& adapter);
  absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
      const MasterPointer& master, const control::Configure& configuration);

  std::chrono::steady_clock::time_point Beat();  // the pulse thread
  void SendTrace(const Master& to);
  void Log(const std::string& line) {
    if (options_.log) options_.log(line);
  }
  HeldStage::Options HeldStageOptions();

  const WorkerOptions options_;

  Mutex mutex_;
  MasterPointer master_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point heard_ ABSL_GUARDED_BY(mutex_);
  HostDelay delay_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ReceivedCheckpoint> receiving_ ABSL_GUARDED_BY(mutex_);
  ControlServer* probed_ ABSL_GUARDED_BY(mutex_) = nullptr;  // where readiness is shown
  std::atomic<bool> tracing_ = false;

  std::unique_ptr<TaskThread> tasks_ = std::make_unique<TaskThread>();
  WorkerEpoch epoch_{{options_.pipeline, options_.ranks.gpus.link}, options_.credentials, *tasks_};
  std::unique_ptr<StageGuest> guest_ = options_.guest ? options_.guest(*this) : nullptr;
  // For the task thread alone.
  std::unique_ptr<HeldStage> held_ = std::make_unique<HeldStage>(HeldStageOptions());
  std::unique_ptr<PulseThread> pulse_;
  std::unique_ptr<ControlServer> server_;
};

}  // namespace treadle
