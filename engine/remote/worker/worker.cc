#include "engine/remote/worker/worker.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <utility>

#include "base/background.h"
#include "base/status.h"
#include "base/sync.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/adapter_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/host_delay.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/thread_priority.h"
#include "engine/remote/worker/held_stage.h"
#include "models/checkpoints/fingerprint.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kIdlePulse{1000};
constexpr size_t kTraceBatch = 4096;  // events of one message
// Tasks that wait while one runs. A master asks for the next thing when it has the answer to the
// last one; only epochs may begin and end while a stage is being loaded.
constexpr size_t kMaxTasks = 1024;

// The master that is attached. Sends from any thread; the rest is constant once it has said hello.
struct Master {
  std::shared_ptr<Stream<control::WorkerMessage>> stream;
  uint64_t id = 0;
  milliseconds silence{0};
  milliseconds heartbeat{0};
  bool weights_from_master = false;
  std::string files, fingerprint;  // FilesHere of its own, and their sum
  // Whether the worker asked to leave, once in an attachment. For its stream's events only.
  bool drains = false;
  bool configured = false;
  bool reserved = false;
};
using MasterPointer = std::shared_ptr<Master>;

}  // namespace

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
  void DescribeSelf(control::WorkerHello& out) const;
  absl::Status Greet(const MasterPointer& master);
  absl::Status Configure(const MasterPointer& master, const control::Configure& configuration);
  absl::StatusOr<LentStage> StageFor(const control::Configure& wanted, bool replace);
  StageSource SourceFor(const MasterPointer& master);
  absl::Status Reserve(const MasterPointer& master, const PageCounts& kv_pages);
  absl::Status LoadAdapter(const MasterPointer& master, control::Adapter&& adapter);
  absl::StatusOr<std::shared_ptr<const Checkpoint>> OpenCheckpoint(
      const MasterPointer& master, const control::Configure& configuration);

  SteadyClock::time_point Beat();  // the pulse thread
  void SendTrace(const Master& to);
  void Log(const std::string& line) {
    if (options_.log) options_.log(line);
  }
  HeldStage::Options HeldStageOptions();

  const WorkerOptions options_;

  Mutex mutex_;
  MasterPointer master_ ABSL_GUARDED_BY(mutex_);
  SteadyClock::time_point heard_ ABSL_GUARDED_BY(mutex_);
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

Worker::State::~State() {
  {
    MutexLock lock(mutex_);
    probed_ = nullptr;
  }
  server_.reset();  // ends the attachment
  pulse_.reset();
  tasks_.reset();
  held_.reset();  // its threads call epoch_ and the guest
}

HeldStage::Options Worker::State::HeldStageOptions() {
  return {.model_path = options_.model_path,
          .ranks = options_.ranks,
          .memory = options_.memory,
          .events = epoch_.Events(),
          .gone =
              [this] {
                if (guest_) guest_->OnStageGone();
                epoch_.SetRanks(nullptr);
              },
          .log = [this](const std::string& line) { Log(line); }};
}

absl::Status Worker::State::Listen() {
  ControlServer::Acceptors acceptors;
  acceptors.attach = [this](auto stream) { return Accept(std::move(stream)); };
  acceptors.follow = [this](auto stream) { return epoch_.AcceptFollow(std::move(stream)); };
  if (guest_) {
    acceptors.train = [this](auto stream) { return guest_->Accept(std::move(stream)); };
  }
  pulse_ = std::make_unique<PulseThread>([this] { return Beat(); });
  TREADLE_ASSIGN_OR_RETURN(
      server_, ControlServer::Start(options_.listen, std::move(acceptors), options_.credentials));
  MutexLock lock(mutex_);
  probed_ = server_.get();
  return absl::OkStatus();
}

// -- messages of the master -----------------------------------------------------------------------

StreamEvents<control::MasterMessage> Worker::State::Accept(
    std::shared_ptr<Stream<control::WorkerMessage>> stream) {
  const auto master = std::make_shared<Master>();
  master->stream = std::move(stream);
  return {
      .message = [this, master](control::MasterMessage& message) { OnMessage(master, message); },
      .closed =
          [this, master](const absl::Status& status) {
            Detach(master, status.ok() ? absl::CancelledError("the master detached")
                                       : absl::UnavailableError("the master is gone"));
            if (master->drains) options_.leave();  // the answer is on its way
          }};
}

void Worker::State::OnMessage(const MasterPointer& master, control::MasterMessage& message) {
  if (message.has_hello()) return OnHello(master, message.hello());
  if (message.has_drain()) return OnDrain(master);
  bool current = false;
  {
    MutexLock lock(mutex_);
    current = master_ == master;
    if (current) heard_ = SteadyClock::now();
  }
  if (current) return Dispatch(master, message);
  // It has not said hello; or it was refused, or given up, and the stream is closed already.
  master->stream->Close(absl::FailedPreconditionError("a master says hello first"));
}

void Worker::State::OnHello(const MasterPointer& master, const control::MasterHello& hello) {
  const std::string version = hello.version();
  if (hello.protocol() != kControlProtocol || version != options_.version) {
    master->stream->Close(absl::FailedPreconditionError(
        Str("this worker is version ", options_.version, " (protocol ", kControlProtocol,
            "), the master is ", version, " (protocol ", hello.protocol(), ")")));
    return;
  }
  {
    MutexLock lock(mutex_);
    if (master_ != nullptr) {
      master->stream->Close(absl::AlreadyExistsError("this worker serves another master"));
      return;
    }
    master->id = hello.master();
    master->silence = milliseconds(std::max<uint32_t>(hello.silence_ms(), 1));
    master->heartbeat = milliseconds(std::max<uint32_t>(hello.heartbeat_ms(), 1));
    master->weights_from_master = hello.weights_from_master();
    master->files = hello.files();
    master->fingerprint = hello.fingerprint();
    master_ = master;
    heard_ = SteadyClock::now();
    epoch_.Attach(master->id, master->stream);
  }
  Log("a master attached");
  pulse_->Nudge();
  Post(master, [this, master] { return Greet(master); });
}

void Worker::State::OnDrain(const MasterPointer& master) {
  if (!options_.leave) {
    return master->stream->Close(absl::UnimplementedError("this worker does not leave its stage"));
  }
  master->drains = true;
  Log("asked to leave its stage to another worker");
  master->stream->Close(absl::OkStatus());
}

void Worker::State::Dispatch(const MasterPointer& master, control::MasterMessage& message) {
  const auto refuse = [&](const char* what) {
    master->stream->Close(absl::FailedPreconditionError(Str("the master ", what)));
  };
  if (tasks_->waiting() > kMaxTasks) return refuse("asks for more than this worker can keep");
  switch (message.kind_case()) {
    case control::MasterMessage::kPlan:
      return epoch_.OnMasterPlan(*message.mutable_plan());
    case control::MasterMessage::kMasks:
      return epoch_.OnMasks(message.masks());
    case control::MasterMessage::kConfigure:
      if (std::exchange(master->configured, true)) return refuse("configures a stage twice");
      return Post(master, [this, master, configuration = std::move(*message.mutable_configure())] {
        return Configure(master, configuration);
      });
    case control::MasterMessage::kReserve:
      if (std::exchange(master->reserved, true)) return refuse("reserves a cache twice");
      return Post(master, [this, master, pages = DecodePages(message.reserve())] {
        return Reserve(master, pages);
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
    case control::MasterMessage::kLoadAdapter:
      return Post(master, [this, master,
                           adapter = std::make_shared<control::Adapter>(
                               std::move(*message.mutable_load_adapter()))] {
        return LoadAdapter(master, std::move(*adapter));
      });
    case control::MasterMessage::kUnloadAdapter:
      return Post(master, [this, id = message.unload_adapter()] {
        if (held_->ranks() != nullptr) held_->ranks()->UnloadAdapter(id);
        return absl::OkStatus();
      });
    case control::MasterMessage::kTracing:
      tracing_.store(message.tracing());
      return epoch_.SetTracing(message.tracing());
    default:
      return;  // a heartbeat
  }
}

void Worker::State::Detach(const MasterPointer& master, const absl::Status& why) {
  {
    MutexLock lock(mutex_);
    if (master_ != master) return;
    master_ = nullptr;
    if (receiving_) receiving_->Fail(why);
    // Here, so that it is never the next master whom this concerns.
    epoch_.Detach(why);
    tracing_.store(false);
  }
  master->stream->Abort();
  Log(std::string(why.message()));
}

// -- tasks ----------------------------------------------------------------------------------------

// An error is the end of the attachment's usefulness; the master closes it.
void Worker::State::Post(const MasterPointer& master, std::function<absl::Status()> task) {
  tasks_->Post([this, master, task = std::move(task)] {
    if (!IsCurrent(master)) return;
    if (const absl::Status status = task(); !status.ok()) {
      Log(std::string(status.message()));
      master->stream->Send(FailureOf(0, status));
    }
  });
}

// All but the state of its file and of what it has loaded.
void Worker::State::DescribeSelf(control::WorkerHello& out) const {
  out.set_protocol(kControlProtocol);
  out.set_version(options_.version);
  out.set_model_path(options_.model_path);
  out.set_compute(options_.compute);
  out.set_device(options_.device);
  out.set_dtype(options_.dtype);
  out.set_deterministic(options_.deterministic);
  DescribeMachine(options_.ranks.gpus, out);
}

absl::Status Worker::State::Greet(const MasterPointer& master) {
  control::WorkerMessage message;
  control::WorkerHello& hello = *message.mutable_hello();
  DescribeSelf(hello);
  hello.set_fingerprint(held_->fingerprint());
  if (!master->weights_from_master && !options_.model_path.empty() &&
      held_->fingerprint().empty()) {
    const auto checkpoint = Checkpoint::Open(options_.model_path);
    if (checkpoint.ok() && !master->files.empty() && FilesHere(**checkpoint) == master->files) {
      hello.set_fingerprint(master->fingerprint);
    } else {
      const auto sum = checkpoint.ok() ? held_->FingerprintOf(**checkpoint) : checkpoint.status();
      if (!sum.ok()) hello.set_problem(std::string(sum.status().message()));
      if (sum.ok()) hello.set_fingerprint(*sum);
    }
  }
  hello.set_held_bytes(held_->stage() == nullptr ? 0 : held_->stage()->weight_bytes());
  master->stream->Send(std::move(message));
  return absl::OkStatus();
}

absl::Status Worker::State::Configure(const MasterPointer& master,
                                      const control::Configure& configuration) {
  TREADLE_RETURN_IF_ERROR(held_->Configure(configuration, SourceFor(master)));
  const WorkerStage& stage = *held_->stage();
  epoch_.SetPlace({.stage = configuration.stage(),
                   .stages = configuration.stages(),
                   .deadline = milliseconds(configuration.iteration_deadline_ms()),
                   .wire = ValueOf(kWireTypes, configuration.wire()).value_or(WireType::kF32),
                   .data_plane = ValueOf(kDataPlanes, configuration.data_plane()).value()});
  TREADLE_ASSIGN_OR_RETURN(const uint64_t available, stage.AvailableBytes());
  control::WorkerMessage message;
  control::Loaded& loaded = *message.mutable_loaded();
  loaded.set_weight_bytes(stage.weight_bytes());
  loaded.set_memory_available(available);
  loaded.set_memory_pool(stage.memory_pool());
  loaded.set_kv_heads(stage.kv_heads());
  loaded.set_backend(stage.backend());
  EncodePages(stage.kv_pages(), *loaded.mutable_kv_pages());
  master->stream->Send(std::move(message));
  return absl::OkStatus();
}

StageSource Worker::State::SourceFor(const MasterPointer& master) {
  return {.open =
              [this, master](const control::Configure& configuration) {
                return OpenCheckpoint(master, configuration);
              },
          .progress =
              [master, reported = 0.0](double fraction) mutable {
                if (fraction < reported + 0.01 && fraction < 1) return;
                reported = fraction;
                master->stream->Tell([&](auto& message) { message.set_progress(fraction); });
              },
          .loaded =
              [this] {
                MutexLock lock(mutex_);
                receiving_ = nullptr;
              }};
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> Worker::State::OpenCheckpoint(
    const MasterPointer& master, const control::Configure& configuration) {
  if (!configuration.has_directory()) {
    TREADLE_ASSIGN_OR_RETURN(auto opened, Checkpoint::Open(options_.model_path));
    return std::shared_ptr<const Checkpoint>(std::move(opened));
  }
  TREADLE_ASSIGN_OR_RETURN(
      const std::shared_ptr<ReceivedCheckpoint> received,
      ReceivedCheckpoint::Create(configuration.directory(), master->silence,
                                 [stream = master->stream](const control::TensorRequest& request) {
                                   stream->Tell(
                                       [&](auto& message) { *message.mutable_tensor() = request; });
                                 }));
  MutexLock lock(mutex_);
  if (master_ != master) return absl::CancelledError("the master is gone");
  receiving_ = received;
  return std::shared_ptr<const Checkpoint>(received);
}

absl::Status Worker::State::Reserve(const MasterPointer& master, const PageCounts& kv_pages) {
  TREADLE_RETURN_IF_ERROR(held_->Reserve(kv_pages, SourceFor(master)));
  held_->ranks()->UnloadAdapters();  // an earlier master's
  epoch_.SetRanks(held_->ranks());
  epoch_.SetTracing(tracing_.load());
  master->stream->Tell([memory = held_->stage()->memory().For(master->id)](auto& message) {
    message.mutable_reserved()->set_memory(memory);
  });
  return absl::OkStatus();
}

// A failure is the adapter's, not the attachment's.
absl::Status Worker::State::LoadAdapter(const MasterPointer& master, control::Adapter&& adapter) {
  if (held_->ranks() == nullptr) {
    return absl::FailedPreconditionError("an adapter comes before the cache is reserved");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto file,
                           DecodeAdapter(std::move(adapter), held_->stage()->config()));
  const absl::Status status = held_->ranks()->LoadAdapter(*file);
  master->stream->Tell([&](auto& message) {
    control::AdapterLoaded& loaded = *message.mutable_adapter_loaded();
    loaded.set_id(file->id());
    loaded.set_code(static_cast<int32_t>(status.code()));
    loaded.set_message(std::string(status.message()));
  });
  return absl::OkStatus();
}

// -- the guest ------------------------------------------------------------------------------------

void Worker::State::Lend(control::Configure&& wanted, bool replace,
                         std::function<void(absl::StatusOr<LentStage>)> then) {
  tasks_->Post([this, wanted = std::move(wanted), replace, then = std::move(then)] {
    then(StageFor(wanted, replace));
  });
}

absl::StatusOr<LentStage> Worker::State::StageFor(const control::Configure& wanted, bool replace) {
  bool attached = false;
  {
    MutexLock lock(mutex_);
    attached = master_ != nullptr;
  }
  TREADLE_RETURN_IF_ERROR(held_->ForGuest(wanted, replace, attached));
  return LentStage{held_->configuration(), held_->ranks(), held_->for_guest(), options_.ranks};
}

// -- the pulse ------------------------------------------------------------------------------------

SteadyClock::time_point Worker::State::Beat() {
  const auto now = SteadyClock::now();
  MasterPointer master;
  bool silent = false;
  milliseconds most{0};
  const bool stands = epoch_.Stands();
  if (guest_) guest_->OnPulse();
  {
    MutexLock lock(mutex_);
    if (probed_ != nullptr) probed_->SetReady(stands);
    master = master_;
    const auto next = now + (master == nullptr ? kIdlePulse : master->heartbeat);
    heard_ = std::min(now, heard_ + delay_.Wake(now, next));
    most =
        std::chrono::ceil<milliseconds>((master ? master->silence : kIdlePulse) + delay_.slack());
    silent = master != nullptr && now - heard_ > most;
  }
  if (master == nullptr) return now + kIdlePulse;
  if (silent) {
    Detach(master,
           absl::UnavailableError(Str("nothing heard from the master for ", most.count(), " ms")));
    return now + kIdlePulse;
  }
  master->stream->Tell([&](auto& message) {
    epoch_.Describe(*message.mutable_heartbeat());
    message.mutable_heartbeat()->set_busy(tasks_->busy());
  });
  if (tracing_.load()) SendTrace(*master);
  return now + master->heartbeat;
}

void Worker::State::SendTrace(const Master& to) {
  const std::vector<TraceEvent> events = epoch_.TakeTrace();
  for (size_t begin = 0; begin < events.size(); begin += kTraceBatch) {
    const size_t count = std::min(kTraceBatch, events.size() - begin);
    to.stream->Tell([&](auto& message) {
      for (const TraceEvent& event : std::span(events).subspan(begin, count)) {
        control::TraceEvent& out = *message.mutable_trace()->add_event();
        out.set_epoch(event.epoch);
        out.set_iteration(event.iteration);
        out.set_rank(event.rank);
        out.set_kind(static_cast<uint32_t>(event.kind));
        out.set_begin(event.begin);
        out.set_end(event.end);
      }
    });
  }
}

Worker::Worker(std::unique_ptr<State> state) : state_(std::move(state)) {}
Worker::~Worker() = default;

const std::string& Worker::address() const { return state_->address(); }

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(WorkerOptions options) {
  MakeMessageThread();  // and all that gRPC starts from here on
  if (!options.model_path.empty()) {
    TREADLE_RETURN_IF_ERROR(Checkpoint::Open(options.model_path).status());
  }
  if (options.version.empty()) options.version = TREADLE_VERSION;
  if (!options.pipeline) options.pipeline = GlooPipeline(options.data_interface);
  auto state = std::make_unique<State>(std::move(options));
  TREADLE_RETURN_IF_ERROR(state->Listen());
  return std::unique_ptr<Worker>(new Worker(std::move(state)));
}

absl::Status DrainWorker(const std::string& address, const ControlCredentials& credentials,
                         milliseconds patience) {
  const auto closed = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> answer = closed->get_future();
  const auto stream =
      OpenAttach(address,
                 {.message = [](control::WorkerMessage&) {},
                  .closed = [closed](const absl::Status& status) { closed->set_value(status); }},
                 credentials);
  stream->Tell([](auto& message) { message.mutable_drain(); });
  if (answer.wait_for(patience) == std::future_status::ready) return answer.get();
  stream->Abort();
  return absl::DeadlineExceededError(Str("no answer for ", patience.count(), " ms"));
}

}  // namespace treadle
