#include "engine/remote/worker/worker_epoch.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/control.pb.h"
#include "kernels/collectives/gloo_communicator.h"

namespace treadle {
namespace {

// Plans that wait for the ranks. A master keeps at most 1024 in flight
// (RemoteEngineOptions::depth).
constexpr uint64_t kMaxPlansWaiting = 1 << 11;
// The bytes that the ranks of all stages tell each other in an epoch: an address or an id for each
// pair of 256 stages, several times over.
constexpr size_t kMaxRendezvousBytes = 64 << 20;

}  // namespace

control::WorkerMessage FailureOf(uint64_t epoch, const absl::Status& why) {
  control::WorkerMessage message;
  control::Failed& failed = *message.mutable_failed();
  failed.set_epoch(epoch);
  failed.set_code(static_cast<int>(why.code()));
  failed.set_message(std::string(why.message()));
  return message;
}

PipelineFactory GlooPipeline(const std::string& data_interface) {
  return [data_interface](const PipelineRequest& request, Rendezvous& rendezvous) {
    GlooOptions options;
    options.rank = request.rank;
    options.size = request.size;
    options.data_interface = data_interface;
    options.timeout = request.timeout;
    options.connect_timeout = std::min(request.timeout, options.connect_timeout);
    return CreateGlooCommunicator(options, rendezvous);
  };
}

WorkerEpoch::~WorkerEpoch() {
  MutexLock lock(mutex_);
  while (open_ > 0) closed_.Wait(mutex_);
}

// -- the master -----------------------------------------------------------------------------------

void WorkerEpoch::Attach(uint64_t master, MasterStream stream) {
  MutexLock lock(mutex_);
  master_ = master;
  to_master_ = std::move(stream);
  epoch_ = {};
}

void WorkerEpoch::Detach(const absl::Status& why) {
  MutexLock lock(mutex_);
  TakeDown(why);
  master_ = 0;
  to_master_ = nullptr;
  if (early_) early_->stream->Close(why);
  early_.reset();
}

void WorkerEpoch::SetPlace(const Place& place) {
  MutexLock lock(mutex_);
  place_ = place;
}

void WorkerEpoch::SetRanks(StageRanks* ranks) {
  MutexLock lock(ranks_mutex_);
  ranks_ = ranks;
}

StageRanks::Events WorkerEpoch::Events() {
  return {
      .done = [this](uint64_t number,
                     absl::StatusOr<IterationResult> result) { OnDone(number, std::move(result)); },
      .ready =
          [this](uint64_t number) {
            MutexLock lock(mutex_);
            if (epoch_.number != number) return;
            epoch_.ranks_ready = true;
            SayReady();
          }};
}

// -- beginning and end ----------------------------------------------------------------------------

void WorkerEpoch::Begin(const control::BeginEpoch& begin) {
  const uint64_t number = begin.epoch();
  MutexLock lock(mutex_);
  if (to_master_ == nullptr) return;  // it went while this was on its way
  TakeDown(absl::CancelledError("the epoch is over"));
  epoch_ = {};
  epoch_.number = number;
  epoch_.live = true;
  epoch_.late_plans = begin.late_plans();
  epoch_.rendezvous = std::make_shared<RelayedRendezvous>(
      [stream = to_master_, number](const std::string& key, const std::string& bytes) {
        stream->Tell([&](auto& message) {
          control::Rendezvous& rendezvous = *message.mutable_rendezvous();
          rendezvous.set_epoch(number);
          rendezvous.set_key(key);
          rendezvous.set_value(bytes);
        });
      });
  if (early_ && early_->epoch == number) AcceptPrevious(early_->stream);
  if (early_ && early_->epoch <= number) early_.reset();
  tasks_.Post([this, number, next = begin.next_address()] { Form(number, next); });
}

// On the task thread: joins this stage to its neighbours and lets the ranks begin.
void WorkerEpoch::Form(uint64_t number, const std::string& next_address) {
  Place place;
  std::shared_ptr<RelayedRendezvous> rendezvous;
  {
    MutexLock lock(mutex_);
    if (!IsLive(number)) return;
    place = place_;
    rendezvous = epoch_.rendezvous;
  }
  if (!OpenNext(number, place, next_address)) return;
  auto pipeline = JoinPipeline(number, place, std::move(rendezvous));
  if (!pipeline.ok()) return Fail(number, pipeline.status());
  {
    MutexLock lock(ranks_mutex_);
    {
      MutexLock epoch_lock(mutex_);
      if (!IsLive(number)) return;
    }
    if (ranks_ != nullptr) return ranks_->BeginEpoch(number, *std::move(pipeline));
  }
  Fail(number, absl::FailedPreconditionError("nothing is loaded"));
}

absl::StatusOr<StagePipeline> WorkerEpoch::JoinPipeline(uint64_t number, const Place& place,
                                                        std::shared_ptr<Rendezvous> rendezvous) {
  StagePipeline pipeline;
  if (place.stages == 1) return pipeline;
  pipeline.stage = place.stage;
  pipeline.stages = place.stages;
  pipeline.wire = place.wire;
  pipeline.timeout = place.deadline;
  if (place.data_plane == DataPlane::kNccl) {
    pipeline.link = joiners_.link;
    pipeline.rendezvous = std::move(rendezvous);
    return pipeline;
  }
  const PipelineRequest request{
      .epoch = number, .rank = place.stage, .size = place.stages, .timeout = place.deadline};
  TREADLE_ASSIGN_OR_RETURN(pipeline.communicator, joiners_.pipeline(request, *rendezvous));
  return pipeline;
}

// False if the epoch is over already.
bool WorkerEpoch::OpenNext(uint64_t number, const Place& place, const std::string& address) {
  MutexLock lock(mutex_);
  if (!IsLive(number)) return false;
  if (place.stage + 1 == place.stages) {
    epoch_.followed = true;
    return true;
  }
  StreamEvents<control::FollowAnswer> events;
  events.message = [this, number](control::FollowAnswer& answer) {
    MutexLock answer_lock(mutex_);
    if (!IsLive(number) || answer.epoch() != number) return;
    epoch_.followed = true;
    SayReady();
  };
  events.closed = [this, number, name = Str("stage ", place.stage + 1, " (", address, ")")](
                      const absl::Status& status) {
    const std::string why = status.ok() ? "it was closed" : std::string(status.message());
    Fail(number, absl::UnavailableError(Str("the stream to ", name, " broke: ", why)));
    MutexLock closed_lock(mutex_);
    --open_;
    closed_.NotifyAll();
  };
  ++open_;
  epoch_.next = OpenFollow(address, std::move(events), credentials_);
  epoch_.next->Tell([&, master = master_](auto& message) {
    message.mutable_hello()->set_master(master);
    message.mutable_hello()->set_epoch(number);
    message.mutable_hello()->set_stage(place.stage);
  });
  return true;
}

void WorkerEpoch::SayReady() {
  if (!Ready()) return;
  to_master_->Tell([number = epoch_.number](auto& message) { message.set_epoch_ready(number); });
}

void WorkerEpoch::End(uint64_t epoch, const absl::Status& why) {
  MutexLock lock(mutex_);
  if (epoch_.number == epoch) TakeDown(why);
}

void WorkerEpoch::Fail(uint64_t number, const absl::Status& why) {
  MutexLock lock(mutex_);
  if (!IsLive(number)) return;
  to_master_->Send(FailureOf(number, why));
  TakeDown(why);
}

void WorkerEpoch::TakeDown(const absl::Status& why) {
  if (!epoch_.live) return;
  epoch_.live = false;
  epoch_.rendezvous->Fail(why);
  if (epoch_.next) epoch_.next->Abort();
  if (epoch_.previous) epoch_.previous->Close(why);
  tasks_.Post([this, why] { EndRanks(why); });
}

void WorkerEpoch::EndRanks(const absl::Status& why) {
  MutexLock lock(ranks_mutex_);
  if (ranks_ != nullptr) ranks_->EndEpoch(why);
}

// -- the previous stage ---------------------------------------------------------------------------

StreamEvents<control::FollowMessage> WorkerEpoch::AcceptFollow(PreviousStream stream) {
  return {.message =
              [this, stream](control::FollowMessage& message) {
                if (message.has_hello()) return OnFollowHello(stream, message.hello());
                bool current = false;
                {
                  MutexLock lock(mutex_);
                  current = epoch_.previous == stream;
                }
                if (current) return OnPlan(*message.mutable_plan());
                // The stream is of an old epoch, or refused and closed, or not accepted yet.
                stream->Close(absl::FailedPreconditionError("this stage does not follow yours"));
              },
          .closed =
              [this, stream](const absl::Status& status) {
                uint64_t number = 0;
                int stage = 0;
                {
                  MutexLock lock(mutex_);
                  if (early_ && early_->stream == stream) early_.reset();
                  if (epoch_.previous != stream) return;
                  number = epoch_.number;
                  stage = place_.stage;
                }
                Fail(number,
                     absl::UnavailableError(Str("the stream from stage ", stage - 1, " broke")));
              }};
}

void WorkerEpoch::OnFollowHello(const PreviousStream& stream, const control::FollowHello& hello) {
  MutexLock lock(mutex_);
  const auto refuse = [&](const absl::Status& why) { stream->Close(why); };
  if (!to_master_ || hello.master() != master_) {
    return refuse(absl::FailedPreconditionError("this worker does not serve that master"));
  }
  if (hello.stage() != place_.stage - 1) {
    return refuse(InvalidArgument("this is stage ", place_.stage, ", stage ", hello.stage(),
                                  " does not precede it"));
  }
  if (hello.epoch() < epoch_.number) return refuse(absl::AbortedError("that epoch is over"));
  if (hello.epoch() > epoch_.number) {
    if (early_) early_->stream->Close(absl::AbortedError("another one came"));
    early_ = EarlyFollower{stream, hello.epoch()};
    return;
  }
  if (epoch_.previous) return refuse(absl::AlreadyExistsError("this stage is followed already"));
  if (!epoch_.live) return refuse(absl::AbortedError("that epoch is over"));
  AcceptPrevious(stream);
}

void WorkerEpoch::AcceptPrevious(const PreviousStream& stream) {
  epoch_.previous = stream;
  stream->Tell([number = epoch_.number](auto& answer) { answer.set_epoch(number); });
}

// -- plans ----------------------------------------------------------------------------------------

void WorkerEpoch::OnMasterPlan(proto::Plan& plan) {
  {
    MutexLock lock(mutex_);
    if (place_.stage != 0) return;
  }
  OnPlan(plan);
}

void WorkerEpoch::OnPlan(proto::Plan& message) {
  const uint64_t number = message.epoch();
  uint64_t expected = 0;
  bool room = true;
  {
    MutexLock lock(mutex_);
    if (!epoch_.live || number < epoch_.number) return;
    room = epoch_.received - epoch_.done < kMaxPlansWaiting;
    expected = epoch_.received++;
    if (number != epoch_.number) expected = message.iteration() + 1;  // cannot be
  }
  if (message.iteration() != expected) {
    return Fail(number, absl::DataLossError(Str("plan of iteration ", message.iteration(),
                                                " arrived, expected ", expected)));
  }
  if (!room) {
    return Fail(number, ResourceExhausted("plan of iteration ", expected, " arrived while ",
                                          kMaxPlansWaiting, " wait to be run"));
  }
  PassOn(message);
  absl::StatusOr<IterationPlan> plan = DecodePlan(message);
  if (!plan.ok()) return Fail(number, plan.status());
  MutexLock lock(ranks_mutex_);
  if (ranks_ != nullptr) ranks_->Submit(*std::move(plan));
}

// They may come before their plan, which the stages pass on; not long before, though.
void WorkerEpoch::OnMasks(const proto::Masks& message) {
  bool near = true;
  {
    MutexLock lock(mutex_);
    if (!IsLive(message.epoch())) return;
    near = place_.stage + 1 == place_.stages &&
           message.iteration() < epoch_.received + kMaxPlansWaiting;
  }
  const auto set = [&]() -> absl::Status {
    if (!near) {
      return InvalidArgument("masks of iteration ", message.iteration(),
                             " arrived, expected them at the last stage and near its plan");
    }
    TREADLE_ASSIGN_OR_RETURN(std::vector<OutputMask> masks, DecodeMasks(message));
    MutexLock lock(ranks_mutex_);
    if (ranks_ == nullptr) return absl::OkStatus();
    return ranks_->SetMasks(message.epoch(), message.iteration(), std::move(masks));
  };
  if (const absl::Status status = set(); !status.ok()) Fail(message.epoch(), status);
}

// Sends a plan to the next stage; a late plan only once OnDone has been told of it.
void WorkerEpoch::PassOn(const proto::Plan& plan) {
  std::shared_ptr<Stream<control::FollowMessage>> next;
  const auto forwarded = std::make_shared<control::FollowMessage>();
  {
    MutexLock lock(mutex_);
    if (!IsLive(plan.epoch()) || !epoch_.next) return;
    *forwarded->mutable_plan() = plan;
    if (epoch_.late_plans) return epoch_.held.push_back(forwarded);
    next = epoch_.next;
  }
  next->Send(std::move(*forwarded));
}

void WorkerEpoch::OnDone(uint64_t number, absl::StatusOr<IterationResult> result) {
  if (!result.ok()) {
    uint64_t iteration = 0;
    {
      MutexLock lock(mutex_);
      iteration = epoch_.done;
    }
    return Fail(number,
                {result.status().code(), Str("iteration ", iteration, " of epoch ", number, ": ",
                                             std::string(result.status().message()))});
  }
  MasterStream answers;
  std::shared_ptr<Stream<control::FollowMessage>> next;
  std::shared_ptr<control::FollowMessage> held;
  {
    MutexLock lock(mutex_);
    if (!IsLive(number)) return;
    ++epoch_.done;
    if (place_.stage + 1 == place_.stages) answers = to_master_;
    if (!epoch_.held.empty()) {
      next = epoch_.next;
      held = std::move(epoch_.held.front());
      epoch_.held.pop_front();
    }
  }
  if (held) next->Send(std::move(*held));
  if (!answers) return;
  answers->Tell([&](auto& message) { EncodeResult(*result, *message.mutable_result()); });
}

// -- the rest -------------------------------------------------------------------------------------

void WorkerEpoch::Deliver(const control::Rendezvous& message) {
  {
    MutexLock lock(mutex_);
    if (!IsLive(message.epoch())) return;
    epoch_.rendezvous_bytes += message.ByteSizeLong();
    if (epoch_.rendezvous_bytes <= kMaxRendezvousBytes) {
      return epoch_.rendezvous->Deliver(message.key(), message.value());
    }
  }
  Fail(message.epoch(), ResourceExhausted("the rendezvous of an epoch has more than ",
                                          kMaxRendezvousBytes, " bytes"));
}

void WorkerEpoch::Describe(control::WorkerHeartbeat& heartbeat) {
  MutexLock lock(mutex_);
  heartbeat.set_epoch(epoch_.number);
  heartbeat.set_plans_received(epoch_.received);
  heartbeat.set_plans_done(epoch_.done);
}

void WorkerEpoch::SetTracing(bool on) {
  MutexLock lock(ranks_mutex_);
  if (ranks_ != nullptr) ranks_->SetTracing(on);
}

std::vector<TraceEvent> WorkerEpoch::TakeTrace() {
  MutexLock lock(ranks_mutex_);
  return ranks_ == nullptr ? std::vector<TraceEvent>() : ranks_->TakeTrace();
}

}  // namespace treadle
