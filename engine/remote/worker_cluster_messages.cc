// What workers say, and what the master makes of it.

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/stage_description.h"
#include "engine/remote/worker_cluster.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

// For the loss behind a neighbour's failure to be noticed.
constexpr std::chrono::milliseconds kSuspicion{100};

// Failures that a lost neighbour may have caused.
bool MayBeOfAnother(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kCancelled || code == absl::StatusCode::kDeadlineExceeded;
}

}  // namespace

void WorkerCluster::OnMessage(size_t stage, uint64_t attempt, control::WorkerMessage& message) {
  double progress = -1;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[stage];
    if (peer.attempt != attempt || peer.state == State::kDown) return;
    peer.heard = SteadyClock::now();
    if (!message.has_heartbeat() || message.heartbeat().busy()) peer.busy = peer.heard;
    peer.reached = true;
    if (!message.has_result() && !message.has_tensor()) {
      Dispatch(stage, message);
      Advance();
    }
    if (message.has_progress()) progress = MeanProgress();
  }
  if (message.has_result() && stage + 1 == options_.stages.size()) {
    callbacks_.result(message.result());
  }
  if (message.has_tensor()) Answer(stage, message);
  if (progress >= 0 && options_.progress) options_.progress(progress);
  TellNews();
}

void WorkerCluster::Dispatch(size_t stage, control::WorkerMessage& message) {
  Peer& peer = peers_[stage];
  absl::Status status;
  switch (message.kind_case()) {
    case control::WorkerMessage::kHello:
      status = OnHello(stage, message.hello());
      break;
    case control::WorkerMessage::kProgress:
      peer.progress = message.progress().fraction();
      break;
    case control::WorkerMessage::kLoaded:
      OnLoaded(stage, message.loaded());
      break;
    case control::WorkerMessage::kReserved:
      if (peer.state == State::kReserving) peer.state = State::kIdle;
      break;
    case control::WorkerMessage::kEpochReady:
      if (message.epoch_ready().epoch() == epoch_ && peer.state == State::kForming) {
        peer.state = State::kReady;
      }
      break;
    case control::WorkerMessage::kFailed:
      OnFailed(stage, message.failed());
      break;
    case control::WorkerMessage::kRendezvous:
      Relay(stage, message.rendezvous());
      break;
    case control::WorkerMessage::kHeartbeat:
      if (message.heartbeat().epoch() != epoch_) break;
      peer.received = message.heartbeat().plans_received();
      peer.done = message.heartbeat().plans_done();
      break;
    case control::WorkerMessage::kTrace:
      status = OnTrace(stage, message.trace());
      break;
    default:
      break;
  }
  if (!status.ok()) Lose(stage, status);
}

absl::Status WorkerCluster::OnHello(size_t stage, const control::WorkerHello& hello) {
  Peer& peer = peers_[stage];
  if (peer.state != State::kGreeting) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckHello(options_, fingerprint_, stage, hello));
  peer.memory_pool = hello.machine();
  peer.progress = 0;
  peer.state = State::kLoading;
  if (tracing_) {
    peer.stream->Tell([](auto& message) { message.mutable_set_tracing()->set_on(true); });
  }
  peer.stream->Tell([&](auto& message) {
    DescribeStage(options_, stage, fingerprint_, *message.mutable_configure());
    if (!options_.weights_from_master) return;
    sender_.Describe(*message.mutable_configure()->mutable_directory());
  });
  return absl::OkStatus();
}

void WorkerCluster::OnLoaded(size_t stage, const control::Loaded& loaded) {
  Peer& peer = peers_[stage];
  if (peer.state != State::kLoading) return;
  peer.state = State::kLoaded;
  peer.progress = 1;
  peer.weight_bytes = loaded.weight_bytes();
  peer.memory_available = loaded.memory_available();
  if (!loaded.memory_pool().empty()) peer.memory_pool = loaded.memory_pool();
  peer.kv_heads = std::max<int64_t>(loaded.kv_heads(), 1);
  peer.kv_pages = loaded.kv_pages();
  peer.backend = loaded.backend();
}

absl::Status WorkerCluster::OnTrace(size_t stage, const control::Trace& trace) {
  for (const control::TraceEvent& event : trace.event()) {
    if (event.kind() >= std::size(TraceEvent::kNames)) {
      return InvalidArgument("trace: kind is ", event.kind());
    }
    trace_.push_back({.epoch = event.epoch(),
                      .iteration = event.iteration(),
                      .stage = static_cast<int32_t>(stage),
                      .rank = event.rank(),
                      .kind = static_cast<TraceEvent::Kind>(event.kind()),
                      .begin = event.begin(),
                      .end = event.end()});
  }
  return absl::OkStatus();
}

void WorkerCluster::OnFailed(size_t stage, const control::Failed& failed) {
  auto code = static_cast<absl::StatusCode>(failed.code());
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kUnknown;
  const absl::Status status(code, failed.message());
  if (failed.epoch() == 0) return Lose(stage, status);
  if (failed.epoch() != epoch_ || !wanted_ || !begun_) return;
  if (!MayBeOfAnother(code)) return End(Named(stage, status));
  if (!suspicion_.ok()) return;
  suspicion_ = Named(stage, status);
  suspicion_due_ = SteadyClock::now() + kSuspicion;
  pulse_->Nudge();
}

void WorkerCluster::Relay(size_t stage, const control::Rendezvous& message) {
  if (message.epoch() != epoch_ || !begun_) return;
  for (size_t other = 0; other < peers_.size(); ++other) {
    if (other == stage || peers_[other].state < State::kForming) continue;
    peers_[other].stream->Tell([&](auto& relayed) { *relayed.mutable_rendezvous() = message; });
  }
}

void WorkerCluster::Answer(size_t stage, control::WorkerMessage& message) {
  control::MasterMessage answer;
  sender_.Answer(message.tensor(), *answer.mutable_tensor());
  MutexLock lock(mutex_);
  if (peers_[stage].state != State::kDown) peers_[stage].stream->Send(std::move(answer));
}

double WorkerCluster::MeanProgress() const {
  double sum = 0;
  for (const Peer& peer : peers_) sum += peer.progress;
  return sum / static_cast<double>(peers_.size());
}

}  // namespace treadle
