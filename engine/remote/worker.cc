#include "engine/remote/worker.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/remote/background.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"
#include "engine/remote/fingerprint.h"
#include "engine/remote/gloo_pipeline.h"
#include "engine/remote/machine.h"
#include "engine/remote/plan_messages.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/thread_priority.h"
#include "engine/remote/trace_messages.h"
#include "engine/remote/worker_epoch.h"
#include "engine/remote/worker_hello.h"
#include "engine/remote/worker_session.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kIdlePulse{1000};
constexpr size_t kTraceBatch = 4096;  // events of one message

class StageWorker final : public Worker {
 public:
  explicit StageWorker(WorkerOptions options)
      : options_(std::move(options)), machine_(MachineId()) {}
  ~StageWorker() override;

  absl::Status Listen();
  const std::string& address() const override { return server_->address(); }

 private:
  // gRPC's threads.
  StreamEvents<control::MasterMessage> Accept(
      std::shared_ptr<Stream<control::WorkerMessage>> stream);
  void OnMessage(const SessionPointer& session, control::MasterMessage& message);
  void OnHello(const SessionPointer& session, const control::MasterHello& hello);
  void Dispatch(const SessionPointer& session, control::MasterMessage& message);
  void Detach(const SessionPointer& session, const absl::Status& why);
  bool IsCurrent(const SessionPointer& session) {
    MutexLock lock(mutex_);
    return session_ == session;
  }

  // The task thread.
  void Post(const SessionPointer& session, std::function<absl::Status()> task);
  absl::Status Greet(const SessionPointer& session);
  absl::Status Configure(const SessionPointer& session, const control::Configure& configuration);
  absl::Status Load(const SessionPointer& session);
  absl::Status Reserve(const SessionPointer& session, int64_t kv_pages);
  absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenCheckpoint(const SessionPointer& session);

  SteadyClock::time_point Beat();  // the pulse thread
  void SendTrace(Session& session);
  void Log(const std::string& line) {
    if (options_.log) options_.log(line);
  }

  const WorkerOptions options_;
  const std::string machine_;

  // Confined to the task thread.
  std::string configured_;  // what stage_ is, serialized; empty: nothing is loaded
  control::Configure configuration_;
  std::unique_ptr<WorkerStage> stage_;
  std::string fingerprint_;

  Mutex mutex_;
  SessionPointer session_ ABSL_GUARDED_BY(mutex_);
  SteadyClock::time_point heard_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ReceivedCheckpoint> receiving_ ABSL_GUARDED_BY(mutex_);
  ControlServer* probed_ ABSL_GUARDED_BY(mutex_) = nullptr;  // where readiness is shown
  std::atomic<bool> tracing_ = false;

  std::unique_ptr<TaskThread> tasks_ = std::make_unique<TaskThread>();
  WorkerEpoch epoch_{{options_.pipeline, options_.ranks.gpus.link}, options_.credentials, *tasks_};
  std::unique_ptr<PulseThread> pulse_;
  std::unique_ptr<ControlServer> server_;
};

StageWorker::~StageWorker() {
  {
    MutexLock lock(mutex_);
    probed_ = nullptr;
  }
  server_.reset();  // ends the attachment
  pulse_.reset();
  tasks_.reset();
  epoch_.SetRanks(nullptr);
  stage_.reset();  // its threads call epoch_
}

absl::Status StageWorker::Listen() {
  ControlServer::Acceptors acceptors;
  acceptors.attach = [this](auto stream) { return Accept(std::move(stream)); };
  acceptors.follow = [this](auto stream) { return epoch_.AcceptFollow(std::move(stream)); };
  pulse_ = std::make_unique<PulseThread>([this] { return Beat(); });
  TREADLE_ASSIGN_OR_RETURN(
      server_, ControlServer::Start(options_.listen, std::move(acceptors), options_.credentials));
  MutexLock lock(mutex_);
  probed_ = server_.get();
  return absl::OkStatus();
}

// -- messages of the master -----------------------------------------------------------------------

StreamEvents<control::MasterMessage> StageWorker::Accept(
    std::shared_ptr<Stream<control::WorkerMessage>> stream) {
  const auto session = std::make_shared<Session>();
  session->stream = std::move(stream);
  return {
      .message = [this, session](control::MasterMessage& message) { OnMessage(session, message); },
      .closed =
          [this, session](const absl::Status& status) {
            Detach(session, status.ok() ? absl::CancelledError("the master detached")
                                        : absl::UnavailableError("the master is gone"));
          }};
}

void StageWorker::OnMessage(const SessionPointer& session, control::MasterMessage& message) {
  if (message.has_hello()) return OnHello(session, message.hello());
  {
    MutexLock lock(mutex_);
    if (session_ != session) return;  // refused, or given up
    heard_ = SteadyClock::now();
  }
  Dispatch(session, message);
}

void StageWorker::OnHello(const SessionPointer& session, const control::MasterHello& hello) {
  const std::string version = hello.version();
  if (hello.protocol() != kControlProtocol || version != options_.version) {
    session->stream->Close(absl::FailedPreconditionError(
        Str("this worker is version ", options_.version, " (protocol ", kControlProtocol,
            "), the master is ", version, " (protocol ", hello.protocol(), ")")));
    return;
  }
  session->master = hello.master();
  session->silence = milliseconds(std::max<uint32_t>(hello.silence_ms(), 1));
  session->heartbeat = milliseconds(std::max<uint32_t>(hello.heartbeat_ms(), 1));
  session->weights_from_master = hello.weights_from_master();
  {
    MutexLock lock(mutex_);
    if (session_ != nullptr) {
      session->stream->Close(absl::AlreadyExistsError("this worker serves another master"));
      return;
    }
    session_ = session;
    heard_ = SteadyClock::now();
  }
  Log("a master attached");
  epoch_.Attach(session->master,
                [stream = session->stream](auto&& message) { stream->Send(std::move(message)); });
  pulse_->Nudge();
  Post(session, [this, session] { return Greet(session); });
}

void StageWorker::Dispatch(const SessionPointer& session, control::MasterMessage& message) {
  switch (message.kind_case()) {
    case control::MasterMessage::kPlan:
      return epoch_.OnMasterPlan(*message.mutable_plan());
    case control::MasterMessage::kConfigure:
      return Post(session,
                  [this, session, configuration = std::move(*message.mutable_configure())] {
                    return Configure(session, configuration);
                  });
    case control::MasterMessage::kReserve:
      return Post(session, [this, session, pages = message.reserve().kv_pages()] {
        return Reserve(session, pages);
      });
    case control::MasterMessage::kBeginEpoch:
      return epoch_.Begin(message.begin_epoch());
    case control::MasterMessage::kEndEpoch:
      return epoch_.End(message.end_epoch().epoch(),
                        absl::CancelledError(message.end_epoch().reason()));
    case control::MasterMessage::kRendezvous:
      return epoch_.Deliver(message.rendezvous());
    case control::MasterMessage::kTensor: {
      std::shared_ptr<ReceivedCheckpoint> receiving;
      {
        MutexLock lock(mutex_);
        receiving = receiving_;
      }
      if (receiving) receiving->Deliver(message.tensor());
      return;
    }
    case control::MasterMessage::kSetTracing:
      tracing_.store(message.set_tracing().on());
      return epoch_.SetTracing(message.set_tracing().on());
    default:
      return;  // a heartbeat
  }
}

void StageWorker::Detach(const SessionPointer& session, const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (session_ != session) return;
    session_ = nullptr;
    if (receiving_) receiving_->Fail(why);
  }
  session->stream->Abort();
  epoch_.Detach(why);
  tracing_.store(false);
  Log(std::string(why.message()));
}

// -- tasks ----------------------------------------------------------------------------------------

// An error is the end of the attachment's usefulness; the master closes it.
void StageWorker::Post(const SessionPointer& session, std::function<absl::Status()> task) {
  tasks_->Post([this, session, task = std::move(task)] {
    if (!IsCurrent(session)) return;
    if (const absl::Status status = task(); !status.ok()) {
      Log(std::string(status.message()));
      session->Fail(0, status);
    }
  });
}

absl::Status StageWorker::Greet(const SessionPointer& session) {
  control::WorkerMessage message;
  control::WorkerHello& hello = *message.mutable_hello();
  DescribeWorker(options_, machine_, hello);
  if (!session->weights_from_master && !options_.model_path.empty() && fingerprint_.empty()) {
    const auto checkpoint = Checkpoint::Open(options_.model_path);
    const auto sum = checkpoint.ok() ? Fingerprint(**checkpoint) : checkpoint.status();
    if (!sum.ok()) hello.set_problem(std::string(sum.status().message()));
    if (sum.ok()) fingerprint_ = *sum;
  }
  hello.set_fingerprint(fingerprint_);
  hello.set_held_bytes(stage_ == nullptr ? 0 : stage_->weight_bytes());
  session->Send(std::move(message));
  return absl::OkStatus();
}

absl::Status StageWorker::Configure(const SessionPointer& session,
                                    const control::Configure& configuration) {
  const std::string configured = configuration.SerializeAsString();
  if (stage_ == nullptr || configured != configured_) {
    configuration_ = configuration;
    configured_.clear();
    TREADLE_RETURN_IF_ERROR(Load(session));
    configured_ = configured;
  }
  epoch_.SetPlace({.stage = configuration.stage(),
                   .stages = configuration.stages(),
                   .deadline = milliseconds(configuration.iteration_deadline_ms()),
                   .wire = WireFrom(configuration.wire()),
                   .data_plane = DataPlaneFrom(configuration.data_plane()).value()});
  TREADLE_ASSIGN_OR_RETURN(const uint64_t available, stage_->AvailableBytes());
  control::WorkerMessage message;
  control::Loaded& loaded = *message.mutable_loaded();
  loaded.set_weight_bytes(stage_->weight_bytes());
  loaded.set_memory_available(available);
  loaded.set_memory_pool(stage_->memory_pool());
  loaded.set_kv_heads(stage_->kv_heads());
  loaded.set_backend(stage_->backend());
  loaded.set_kv_pages(stage_->kv_pages());
  session->Send(std::move(message));
  return absl::OkStatus();
}

absl::Status StageWorker::Load(const SessionPointer& session) {
  epoch_.SetRanks(nullptr);
  stage_.reset();
  Log(Str("loading layers ", configuration_.first_layer(), " to ", configuration_.end_layer()));
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                           OpenCheckpoint(session));
  double reported = 0;
  const auto progress = [&](double fraction) {
    if (fraction < reported + 0.01 && fraction < 1) return;
    reported = fraction;
    control::WorkerMessage message;
    message.mutable_progress()->set_fraction(fraction);
    session->Send(std::move(message));
  };
  auto loaded = WorkerStage::Load(configuration_, *checkpoint, options_.ranks, progress);
  {
    MutexLock lock(mutex_);
    receiving_ = nullptr;
  }
  TREADLE_ASSIGN_OR_RETURN(stage_, std::move(loaded));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> StageWorker::OpenCheckpoint(
    const SessionPointer& session) {
  if (!configuration_.has_directory()) {
    TREADLE_ASSIGN_OR_RETURN(auto opened, Checkpoint::Open(options_.model_path));
    return std::shared_ptr<const Checkpoint>(std::move(opened));
  }
  TREADLE_ASSIGN_OR_RETURN(
      const std::shared_ptr<ReceivedCheckpoint> received,
      ReceivedCheckpoint::Create(configuration_.directory(), session->silence,
                                 [session](uint32_t tensor, bool constants, uint64_t offset) {
                                   control::WorkerMessage message;
                                   control::TensorRequest& request = *message.mutable_tensor();
                                   request.set_tensor(tensor);
                                   request.set_constants(constants);
                                   request.set_offset(offset);
                                   session->Send(std::move(message));
                                 }));
  MutexLock lock(mutex_);
  if (session_ != session) return absl::CancelledError("the master is gone");
  receiving_ = received;
  return std::shared_ptr<const Checkpoint>(received);
}

absl::Status StageWorker::Reserve(const SessionPointer& session, int64_t kv_pages) {
  if (stage_ == nullptr) return absl::FailedPreconditionError("nothing is loaded");
  // A cache of another size: the ranks are made of what was loaded, so that goes too.
  if (stage_->ranks() != nullptr && stage_->kv_pages() != kv_pages) {
    TREADLE_RETURN_IF_ERROR(Load(session));
  }
  if (stage_->ranks() == nullptr) {
    if (const absl::Status status = stage_->Reserve(kv_pages, epoch_.Events()); !status.ok()) {
      configured_.clear();
      stage_.reset();
      return status;
    }
  }
  epoch_.SetRanks(stage_->ranks());
  epoch_.SetTracing(tracing_.load());
  control::WorkerMessage message;
  message.mutable_reserved();
  session->Send(std::move(message));
  return absl::OkStatus();
}

// -- the pulse ------------------------------------------------------------------------------------

SteadyClock::time_point StageWorker::Beat() {
  const auto now = SteadyClock::now();
  SessionPointer session;
  bool silent = false;
  const bool stands = epoch_.Stands();
  {
    MutexLock lock(mutex_);
    if (probed_ != nullptr) probed_->SetReady(stands);
    session = session_;
    silent = session != nullptr && now - heard_ > session->silence;
  }
  if (session == nullptr) return now + kIdlePulse;
  if (silent) {
    Detach(session, absl::UnavailableError(Str("nothing heard from the master for ",
                                               session->silence.count(), " ms")));
    return now + kIdlePulse;
  }
  control::WorkerMessage message;
  epoch_.Describe(*message.mutable_heartbeat());
  message.mutable_heartbeat()->set_busy(tasks_->busy());
  session->Send(std::move(message));
  if (tracing_.load()) SendTrace(*session);
  return now + session->heartbeat;
}

void StageWorker::SendTrace(Session& to) {
  const std::vector<TraceEvent> events = epoch_.TakeTrace();
  for (size_t begin = 0; begin < events.size(); begin += kTraceBatch) {
    const size_t count = std::min(kTraceBatch, events.size() - begin);
    control::WorkerMessage message;
    EncodeTrace(std::span(events).subspan(begin, count), *message.mutable_trace());
    to.Send(std::move(message));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(WorkerOptions options) {
  MakeMessageThread();  // and all that gRPC starts from here on
  if (!options.model_path.empty()) {
    TREADLE_RETURN_IF_ERROR(Checkpoint::Open(options.model_path).status());
  }
  if (options.version.empty()) options.version = TREADLE_VERSION;
  if (!options.pipeline) options.pipeline = GlooPipeline(options.data_interface);
  auto worker = std::make_unique<StageWorker>(std::move(options));
  TREADLE_RETURN_IF_ERROR(worker->Listen());
  return worker;
}

}  // namespace treadle
