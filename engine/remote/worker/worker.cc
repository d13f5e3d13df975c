#include "engine/remote/worker/worker.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/status.h"
#include "base/version.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/thread_priority.h"
#include "engine/remote/worker/worker_state.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kIdlePulse{1000};
constexpr size_t kTraceBatch = 4096;  // events of one message
// Tasks that wait while one runs. A master asks for the next thing when it has the answer to the
// last one; only epochs may begin and end while a stage is being loaded.
constexpr size_t kMaxTasks = 1024;

}  // namespace

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
  if (options.version.empty()) options.version = kVersion;
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
