// A worker process: owns one stage and serves one master at a time.
//
// A master attaches, says what the stage shall be, and begins epochs; the worker loads its layers,
// forms the pipeline with its neighbours, passes every plan on to the next stage before it submits
// it to its own ranks, and reports results (last stage) and failures. When the master goes away,
// or is silent for too long, the epoch ends and the worker waits for the next one, with what it has
// loaded: a master that asks for the same stage again finds it there.
//
// A guest of the stage may run on it whenever no plan waits, for its own clients (StageGuest).
//
// Its address also serves grpc.health.v1: "" is SERVING as long as it listens, "ready" while a
// stage is loaded and an epoch stands.
//
// Errors go to the master with their reason, and end the epoch or, while loading, the attachment.
// Thread safety: Start and destruction from the owner's thread. Pings and plans have threads of
// their own, which never wait for a load or for the ranks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/remote/control_streams.h"
#include "engine/remote/worker/worker_epoch.h"
#include "engine/remote/worker/worker_stage.h"

namespace treadle {

// A worker's stage, lent to a guest: valid until StageGuest::OnStageGone returns.
struct LentStage {
  const control::Configure& configuration;  // if there are ranks
  StageRanks* ranks;                        // null: nothing is loaded
  bool for_guest;                           // it was loaded for the guest, and may be replaced
  const RankOptions& options;
};

// Lends the stage. Thread safety: any thread.
class StageLender {
 public:
  virtual ~StageLender() = default;
  // Calls `then` on the task thread with the stage that the worker has. Where it has none, and no
  // master, it loads what `wanted` says, if that has layers; so it does, too, if `replace` and the
  // stage that it has was loaded for the guest and lacks them. Errors: Unavailable while a master's
  // stage is being loaded; FailedPrecondition: another model than `wanted` names, or none of its
  // own; WorkerStage's.
  virtual void Lend(control::Configure&& wanted, bool replace,
                    std::function<void(absl::StatusOr<LentStage>)> then) = 0;
};

// A service on a worker's control port, that runs on its stage between plans.
class StageGuest {
 public:
  virtual ~StageGuest() = default;
  // As ControlServer::Acceptors.
  virtual StreamEvents<control::TrainRequest> Accept(
      std::shared_ptr<Stream<control::TrainAnswer>> stream) = 0;
  // The stage is about to be destroyed: nothing more may be given to its ranks. On the task thread.
  virtual void OnStageGone() = 0;
  // Every second or more often, on a thread of its own.
  virtual void OnPulse() = 0;
};

struct WorkerOptions {
  std::string listen = "127.0.0.1:0";  // host:port, or unix:path
  std::string model_path;              // empty: weights come from the master
  // Masters that ask for something else are refused; empty: anything will do.
  std::string device;         // cpu or cuda
  std::string dtype;          // of products on a GPU: bf16, f16 or f32
  std::string deterministic;  // on a GPU: on or off
  std::string compute;
  RankOptions ranks;
  // The descriptor of a file for memory that outlives this process (KeptMemory), for stages on the
  // CPU; -1: none.
  int memory = -1;
  std::string data_interface = "lo";
  ControlCredentials credentials;  // of the control plane, towards the next stage as well
  std::string version;             // empty: this program's
  PipelineFactory pipeline;        // empty: Gloo over data_interface
  std::function<std::unique_ptr<StageGuest>(StageLender&)> guest;  // empty: there is none
  std::function<void(std::string)> log;  // a line for what happens, on any thread; may be empty
  // Called when somebody who may attach has asked the worker to leave (DrainWorker) and has had the
  // answer: the worker ends.
  // On a gRPC thread; must not block. Empty: it stays.
  std::function<void()> leave;
};

class Worker {
 public:
  // Listens. The calling thread, and those that it starts later, get priority over compute threads
  // (thread_priority.h). Unavailable if the address is taken; errors of opening the checkpoint.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(WorkerOptions options);
  // Ends the attachment, waits for a load or an iteration that runs.
  ~Worker();

  // With the port that was taken.
  const std::string& address() const;

 private:
  class State;
  explicit Worker(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

// Asks the worker at `address` to leave its stage, as SIGTERM would: a spare takes it, or the next
// worker at that address, and what runs goes on there. Ok: it leaves. Otherwise why not: the
// worker's status; DeadlineExceeded after `patience` without an answer.
absl::Status DrainWorker(const std::string& address, const ControlCredentials& credentials,
                         std::chrono::milliseconds patience);

}  // namespace treadle
