#include "engine/remote/worker_cluster.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/adapter_messages.h"
#include "engine/remote/control.pb.h"
#include "models/adapters/adapter_file.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kRetry{25};     // between attempts to reach a worker
constexpr milliseconds kGoodbye{300};  // for workers to let go, before streams are cut

// A few in a deadline, at least one a second.
milliseconds HeartbeatFor(const RemoteEngineOptions& options) {
  const milliseconds shortest = std::min(options.silence, options.iteration_deadline);
  return std::clamp(shortest / 8, milliseconds(10), milliseconds(1000));
}

uint64_t DrawId() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// Trying again will not help.
bool IsFinal(absl::StatusCode code) {
  return code != absl::StatusCode::kUnavailable && code != absl::StatusCode::kAlreadyExists &&
         code != absl::StatusCode::kCancelled && code != absl::StatusCode::kDeadlineExceeded;
}

}  // namespace

WorkerCluster::WorkerCluster(const RemoteEngineOptions& options, ModelIdentity identity,
                             Callbacks callbacks)
    : options_(options),
      identity_(std::move(identity)),
      files_(FilesHere(*options.checkpoint)),
      callbacks_(std::move(callbacks)),
      heartbeat_(HeartbeatFor(options)),
      master_(DrawId()),
      peers_(options.stages.size()),
      spares_(options.spares.begin(), options.spares.end()),
      kv_pages_(options.kv_pages) {
  for (const RemoteEngineOptions::Place& place : options.stages) {
    addresses_.push_back(place.address);
  }
  pulse_ = std::make_unique<PulseThread>([this] { return Beat(); });
}

WorkerCluster::~WorkerCluster() {
  pulse_.reset();
  MutexLock lock(mutex_);
  wanted_ = false;
  for (Peer& peer : peers_) {
    if (peer.stream) peer.stream->Close(absl::OkStatus());
  }
  const TimePoint patience = SteadyClock::now() + kGoodbye;
  while (open_streams_ > 0 && changed_.WaitUntil(mutex_, patience)) {
  }
  for (Peer& peer : peers_) {
    if (peer.stream) peer.stream->Abort();
  }
  while (open_streams_ > 0) changed_.Wait(mutex_);
}

std::string WorkerCluster::StageName(size_t stage) const {
  return Str("stage ", stage, " (", addresses_[stage], ")");
}

absl::Status WorkerCluster::Named(size_t stage, const absl::Status& status) const {
  return {status.code(), Str(StageName(stage), ": ", std::string(status.message()))};
}

// -- epochs ---------------------------------------------------------------------------------------

void WorkerCluster::BeginEpoch(uint64_t epoch) {
  MutexLock lock(mutex_);
  End(absl::CancelledError("the next epoch begins"));
  epoch_ = epoch;
  status_ = absl::OkStatus();
  wanted_ = true;
  const bool lost_some = std::exchange(lost_some_, false);
  if (!std::exchange(stood_, false) && !lost_some && epoch > 1 && options_.replace_worker) {
    const std::string why = Str("epoch ", epoch - 1, " did not come to stand");
    for (const std::string& address : addresses_) options_.replace_worker(address, why);
  }
  wanted_since_ = SteadyClock::now();
  lost_all_ |= !lost_some;
  for (Peer& peer : peers_) peer.retry = wanted_since_;
  news_ = false;
  Advance();
  pulse_->Nudge();
}

void WorkerCluster::EndEpoch(uint64_t epoch, absl::Status why) {
  {
    MutexLock lock(mutex_);
    if (epoch != epoch_ || !wanted_) return;
    End(std::move(why));
  }
  TellNews();
}

absl::Status WorkerCluster::WaitUntilStanding() {
  MutexLock lock(mutex_);
  while (wanted_ && !standing_) changed_.Wait(mutex_);
  return status_;
}

// Goes as far towards the wanted epoch as the workers' states allow.
void WorkerCluster::Advance() {
  if (!wanted_) return;
  const TimePoint now = SteadyClock::now();
  for (size_t stage = 0; stage < peers_.size(); ++stage) {
    if (peers_[stage].state == State::kDown && now >= peers_[stage].retry) Open(stage);
  }
  if (!AllAtLeast(State::kLoaded)) return;
  if (kv_pages_ == PageCounts()) {
    if (absl::Status planned = PlanPages(); !planned.ok()) return End(std::move(planned));
  }
  for (Peer& peer : peers_) {
    if (peer.state != State::kLoaded) continue;
    peer.stream->Tell(
        [pages = kv_pages_](auto& message) { EncodePages(pages, *message.mutable_reserve()); });
    peer.state = State::kReserving;
  }
  if (!AllAtLeast(State::kIdle)) return;
  const bool loading =
      std::ranges::any_of(peers_, [](const Peer& peer) { return !peer.adapters.empty(); });
  if (!begun_ && loading) return;
  if (!begun_) {
    begun_ = true;
    begun_at_ = now;
    for (size_t stage = 0; stage < peers_.size(); ++stage) {
      peers_[stage].stream->Tell([&, epoch = epoch_](auto& message) {
        control::BeginEpoch& begin = *message.mutable_begin_epoch();
        begin.set_epoch(epoch);
        begin.set_late_plans(options_.late_plans);
        if (stage + 1 < addresses_.size()) {
          begin.set_next_address(addresses_[stage + 1]);
        }
      });
      peers_[stage].state = State::kForming;
      peers_[stage].received = peers_[stage].done = 0;
    }
  }
  if (!AllAtLeast(State::kReady) || standing_) return;
  for (Peer& peer : peers_) peer.lost |= std::exchange(peer.held, peer.memory) != peer.memory;
  standing_ = stood_ = news_ = true;
  changed_.NotifyAll();
}

StageRange WorkerCluster::TakeLost() {
  MutexLock lock(mutex_);
  StageRange lost = std::exchange(lost_all_, false) ? StageRange() : kNoStages;
  for (int32_t stage = 0; stage < std::ssize(peers_); ++stage) {
    if (std::exchange(peers_[stage].lost, false)) lost = lost.Around({stage, stage + 1});
  }
  return lost;
}

bool WorkerCluster::AllAtLeast(State state) const {
  return std::ranges::all_of(peers_, [&](const Peer& peer) { return peer.state >= state; });
}

// The wanted epoch is over, or cannot be had; workers that were told of it are told so.
void WorkerCluster::End(absl::Status why) {
  if (!wanted_) return;
  for (Peer& peer : peers_) {
    if (peer.state < State::kForming) continue;
    peer.stream->Tell([&, epoch = epoch_](auto& message) {
      message.mutable_end_epoch()->set_epoch(epoch);
      message.mutable_end_epoch()->set_reason(std::string(why.message()));
    });
    peer.state = State::kIdle;
  }
  status_ = std::move(why);
  suspicion_ = absl::OkStatus();
  wanted_ = begun_ = standing_ = false;
  news_ = true;
  changed_.NotifyAll();
}

// -- streams --------------------------------------------------------------------------------------

void WorkerCluster::Open(size_t stage) {
  Peer& peer = peers_[stage];
  const uint64_t attempt = ++peer.attempt;
  peer.state = State::kGreeting;
  peer.heard = peer.busy = SteadyClock::now();
  peer.reached = false;
  peer.adapters.clear();
  ++open_streams_;
  peer.stream = OpenAttach(
      addresses_[stage],
      {.message = [this, stage, attempt](
                      control::WorkerMessage& message) { OnMessage(stage, attempt, message); },
       .closed = [this, stage,
                  attempt](const absl::Status& status) { OnClosed(stage, attempt, status); }},
      options_.credentials);
  peer.stream->Tell([&](auto& message) {
    control::MasterHello& hello = *message.mutable_hello();
    hello.set_protocol(kControlProtocol);
    hello.set_version(options_.version);
    hello.set_master(master_);
    hello.set_silence_ms(static_cast<uint32_t>(options_.silence.count()));
    hello.set_heartbeat_ms(static_cast<uint32_t>(heartbeat_.count()));
    hello.set_weights_from_master(options_.weights_from_master);
    hello.set_files(files_);
  });
}

void WorkerCluster::OnClosed(size_t stage, uint64_t attempt, const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (peers_[stage].attempt == attempt && peers_[stage].state != State::kDown) {
      Break(stage, status.ok() ? absl::UnavailableError("it closed the connection") : status);
    }
  }
  TellNews();
  MutexLock lock(mutex_);
  --open_streams_;
  changed_.NotifyAll();
}

// Its stream broke. A worker that has not been reached yet may still come.
void WorkerCluster::Break(size_t stage, const absl::Status& why) {
  const Peer& peer = peers_[stage];
  if (!peer.reached) return Lose(stage, why);
  const char* what = peer.state < State::kIdle ? "lost while loading: " : "lost: ";
  Lose(stage, {why.code(), Str(what, std::string(why.message()))});
}

void WorkerCluster::Lose(size_t stage, const absl::Status& why) {
  Peer& peer = peers_[stage];
  peer.state = State::kDown;
  peer.adapters.clear();
  changed_.NotifyAll();
  lost_some_ |= peer.reached;
  peer.retry = SteadyClock::now() + kRetry;
  peer.last_error = why;
  peer.stream->Abort();
  if (peer.reached || IsFinal(why.code())) End(Named(stage, why));
  if (spares_.empty()) return;
  spares_.push_back(std::exchange(addresses_[stage], spares_.front()));
  spares_.pop_front();
}

bool WorkerCluster::Missing(uint64_t adapter) const {
  return std::ranges::any_of(peers_,
                             [&](const Peer& peer) { return peer.adapters.contains(adapter); });
}

absl::Status WorkerCluster::LoadAdapter(const std::shared_ptr<const AdapterFile>& adapter) {
  const uint64_t id = adapter->id();
  const TimePoint deadline = SteadyClock::now() + options_.iteration_deadline;
  std::vector<control::MasterMessage> messages(options_.stages.size());  // long ones: made unlocked
  for (size_t stage = 0; stage < messages.size(); ++stage) {
    TREADLE_RETURN_IF_ERROR(EncodeAdapter(*adapter, options_.stages[stage].layers,
                                          *messages[stage].mutable_load_adapter()));
  }
  MutexLock lock(mutex_);
  adapters_[id] = adapter;
  refused_[id] = absl::OkStatus();
  for (size_t stage = 0; stage < messages.size(); ++stage) {
    if (peers_[stage].state < State::kIdle) continue;
    peers_[stage].stream->Send(std::move(messages[stage]));
    peers_[stage].adapters.insert(id);
  }
  absl::Status status;
  while (status.ok() && Missing(id)) {
    if (changed_.WaitUntil(mutex_, deadline)) continue;
    status =
        absl::DeadlineExceededError(Str(adapter->path(), ": a worker has not loaded it within ",
                                        options_.iteration_deadline.count(), " ms"));
  }
  if (status.ok()) status = refused_[id];
  refused_.erase(id);
  if (!status.ok()) Unload(id);
  return status;
}

void WorkerCluster::UnloadAdapter(uint64_t id) {
  MutexLock lock(mutex_);
  Unload(id);
}

void WorkerCluster::Unload(uint64_t adapter) {
  adapters_.erase(adapter);
  for (Peer& peer : peers_) {
    peer.adapters.erase(adapter);
    if (peer.state < State::kIdle) continue;
    peer.stream->Tell([adapter](auto& message) { message.set_unload_adapter(adapter); });
  }
}

void WorkerCluster::SendPlan(proto::Plan&& plan) {
  control::MasterMessage message;
  *message.mutable_plan() = std::move(plan);
  MutexLock lock(mutex_);
  if (standing_) peers_[0].stream->Send(std::move(message));
}

void WorkerCluster::SendMasks(proto::Masks&& masks) {
  control::MasterMessage message;
  *message.mutable_masks() = std::move(masks);
  MutexLock lock(mutex_);
  if (standing_) peers_.back().stream->Send(std::move(message));
}

// -- time -----------------------------------------------------------------------------------------

WorkerCluster::TimePoint WorkerCluster::Beat() {
  const TimePoint now = SteadyClock::now();
  TimePoint next = now + heartbeat_;
  {
    MutexLock lock(mutex_);
    for (Peer& peer : peers_) {
      if (peer.state == State::kDown) continue;
      peer.stream->Tell([](auto& message) { message.mutable_heartbeat(); });
    }
    NoteDelay(now, next);
    CheckTimes(now);
    Advance();
    if (wanted_ && !standing_) next = std::min(next, now + kRetry);
    if (!suspicion_.ok()) next = std::min(next, suspicion_due_);
  }
  callbacks_.beat();
  TellNews();
  return next;
}

// While this thread waited for a processor, nobody can say that workers were silent.
void WorkerCluster::NoteDelay(TimePoint now, TimePoint next) {
  const auto late = delay_.Wake(now, next);
  for (Peer& peer : peers_) {
    peer.heard = std::min(now, peer.heard + late);
    peer.busy = std::min(now, peer.busy + late);
  }
}

void WorkerCluster::CheckTimes(TimePoint now) {
  for (size_t stage = 0; stage < peers_.size(); ++stage) CheckPeer(stage, now);
  if (!suspicion_.ok() && now >= suspicion_due_) End(suspicion_);
  const milliseconds patience = std::min(options_.join_deadline, options_.iteration_deadline);
  if (!wanted_ || !begun_ || standing_ || now - begun_at_ <= patience) return;
  for (size_t stage = 0; stage < peers_.size(); ++stage) {
    if (peers_[stage].state == State::kReady) continue;
    return End(absl::DeadlineExceededError(Str(StageName(stage), " did not join epoch ", epoch_,
                                               " within ", patience.count(), " ms")));
  }
}

void WorkerCluster::CheckPeer(size_t stage, TimePoint now) {
  Peer& peer = peers_[stage];
  const auto most = std::chrono::ceil<milliseconds>(options_.silence + delay_.slack());
  if (peer.state != State::kDown && now - peer.heard > most) {
    const std::string why = Str("nothing heard for ", most.count(), " ms");
    if (options_.replace_worker) options_.replace_worker(addresses_[stage], why);
    Break(stage, absl::DeadlineExceededError(why));
  }
  // It lives, but what it was asked, or what it answered, did not arrive.
  const bool owes = peer.state != State::kDown && peer.state < State::kIdle;
  if (owes && peer.state != State::kLoaded && now - peer.busy > most) {
    Break(stage,
          absl::DeadlineExceededError(Str("no answer for ", most.count(), " ms, and it is idle")));
  }
  if (!wanted_ || peer.reached || peer.state > State::kGreeting) return;
  // Another master's worker is free when that one has been silent for long enough.
  const bool taken = peer.last_error.code() == absl::StatusCode::kAlreadyExists;
  const milliseconds patience =
      taken ? std::min(options_.connect_deadline, options_.silence) : options_.connect_deadline;
  if (now - wanted_since_ <= patience) return;
  const absl::Status why =
      peer.last_error.ok() ? absl::DeadlineExceededError("no answer") : peer.last_error;
  End(Named(stage, {why.code(), Str("not to be had within ", patience.count(),
                                    " ms: ", std::string(why.message()))}));
}

std::string WorkerCluster::WhoIsLate(uint64_t iteration) const {
  MutexLock lock(mutex_);
  const TimePoint now = SteadyClock::now();
  for (size_t stage = 0; stage < peers_.size(); ++stage) {
    const auto silent = std::chrono::duration_cast<milliseconds>(now - peers_[stage].heard);
    if (silent > 4 * heartbeat_) {
      return Str(StageName(stage), " has said nothing for ", silent.count(), " ms");
    }
  }
  for (size_t stage = 0; stage < peers_.size(); ++stage) {
    if (peers_[stage].received <= iteration) return Str(StageName(stage), " has not got its plan");
    if (peers_[stage].done <= iteration) return Str(StageName(stage), " has not finished it");
  }
  return Str("the result of ", StageName(peers_.size() - 1), " has not come");
}

// Calls back without the lock.
void WorkerCluster::TellNews() {
  {
    MutexLock lock(mutex_);
    if (!std::exchange(news_, false)) return;
  }
  callbacks_.news();
}

// -- the rest -------------------------------------------------------------------------------------

void WorkerCluster::SetTracing(bool on) {
  MutexLock lock(mutex_);
  tracing_ = on;
  for (Peer& peer : peers_) {
    if (peer.state < State::kLoading) continue;
    peer.stream->Tell([&](auto& message) { message.set_tracing(on); });
  }
}

std::vector<TraceEvent> WorkerCluster::TakeTrace() {
  std::vector<TraceEvent> trace;
  {
    MutexLock lock(mutex_);
    trace = std::exchange(trace_, {});
  }
  std::ranges::stable_sort(trace, {}, &TraceEvent::begin);
  return trace;
}

std::vector<uint64_t> WorkerCluster::weight_bytes() const {
  MutexLock lock(mutex_);
  std::vector<uint64_t> bytes;
  for (const Peer& peer : peers_) bytes.push_back(peer.weight_bytes);
  return bytes;
}

}  // namespace treadle
