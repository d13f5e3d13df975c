#include "server/observe/health.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <utility>

#include "base/choice.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr Choice<Probe> kNames[] = {{"started", Probe::kStarted},
                                    {"ready", Probe::kReady},
                                    {"live", Probe::kLive},
                                    {"", Probe::kReady},
                                    {"treadle.v1.Inference", Probe::kReady},
                                    {"vllm.grpc.engine.VllmEngine", Probe::kReady}};

// Probes are few, short, and each on a connection of its own; a message is a service's name.
constexpr DoorLimits kProbeLimits = {
    .connections = 64,
    .receiving = 65536,
    .http2 = {.message_bytes = 4096, .streams = 16, .flags = false}};

using std::chrono::milliseconds;

constexpr milliseconds kPeriod{50};
constexpr milliseconds kWarmUpPeriod{2};  // until it has come out
constexpr milliseconds kWarmUpPause{200};
constexpr milliseconds kWakeAfter{1000};  // of a loop that waits

}  // namespace

void HealthBoard::Show(grpc::HealthCheckServiceInterface& service, Probe probe, bool serving) {
  for (const auto& [name, shown] : kNames) {
    if (shown == probe) service.SetServingStatus(std::string(name), serving);
  }
}

void HealthBoard::Set(Probe probe, bool serving) {
  MutexLock lock(mutex_);
  bool& now = serving_[static_cast<size_t>(probe)];
  if (std::exchange(now, serving) == serving) return;
  for (grpc::HealthCheckServiceInterface* service : services_) Show(*service, probe, serving);
}

bool HealthBoard::Get(Probe probe) const {
  MutexLock lock(mutex_);
  return serving_[static_cast<size_t>(probe)];
}

void HealthBoard::Attach(grpc::HealthCheckServiceInterface& service) {
  MutexLock lock(mutex_);
  services_.push_back(&service);
  for (size_t i = 0; i < serving_.size(); ++i) {
    Show(service, static_cast<Probe>(i), serving_[i]);
  }
}

void HealthBoard::Detach(grpc::HealthCheckServiceInterface& service) {
  MutexLock lock(mutex_);
  std::erase(services_, &service);
}

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen,
                                                                  HealthBoard& board) {
  std::unique_ptr<HealthServer> self(new HealthServer(board));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(self->nothing_.get());
  TREADLE_ASSIGN_OR_RETURN(self->server_,
                           GuardedServer::Listen(builder, listen, kProbeLimits, /*tls=*/nullptr));
  board.Attach(*self->server_->server().GetHealthCheckService());
  self->server_->Open();
  return self;
}

HealthServer::HealthServer(HealthBoard& board)
    : board_(board), nothing_(std::make_unique<grpc::CallbackGenericService>()) {}

HealthServer::~HealthServer() {
  if (!server_) return;
  board_.Detach(*server_->server().GetHealthCheckService());
}

LoopWatch::LoopWatch(ServingStack& stack, HealthBoard& board, const Options& options)
    : stack_(stack), board_(board), options_(options), warm_(!options.warm_up) {
  turned_ = woken_ = Clock::now();
  SubmitWarmUp();
  stack_.pool().Wake();  // a first turn, to tell whether the engine stands
  pulse_.emplace([this] { return Look(); });
}

LoopWatch::~LoopWatch() {
  Drain();
  pulse_.reset();
  board_.Set(Probe::kStarted, false);
}

void LoopWatch::Drain() {
  MutexLock lock(mutex_);
  draining_ = true;
  board_.Set(Probe::kReady, false);
  pulse_->Nudge();
}

Clock::time_point LoopWatch::Look() {
  if (!warm_) FollowWarmUp();
  const Clock::time_point now = Clock::now();
  board_.Set(Probe::kLive, LoopTurns(now));
  const bool stands = stack_.engine_stands();
  if (warm_ && stands && !std::exchange(told_, true) && options_.on_ready) options_.on_ready();
  MutexLock lock(mutex_);
  if (draining_ && warm_up_) {
    stack_.pool().Cancel(warm_up_->id, absl::UnavailableError("the server is draining"));
  }
  board_.Set(Probe::kReady, warm_ && stands && !draining_);
  return now + (warm_ || draining_ ? kPeriod : kWarmUpPeriod);
}

void LoopWatch::SubmitWarmUp() {
  if (warm_) return;
  next_warm_up_ = Clock::now() + kWarmUpPause;
  RequestSpec spec;
  spec.client_id = "warm-up";
  spec.internal = true;
  spec.prompt = {std::max(stack_.model().bos(), 0)};
  spec.sampling.temperature = 0;
  spec.max_new_tokens = 1;
  auto submitted = stack_.pool().Submit(std::move(spec));
  if (submitted.ok()) warm_up_ = *std::move(submitted);
}

void LoopWatch::FollowWarmUp() {
  if (!warm_up_) {
    if (stack_.engine_stands() && Clock::now() >= next_warm_up_) SubmitWarmUp();
    return;
  }
  const StreamBatch batch = warm_up_->stream->Take();
  if (!batch.ended) return;
  warm_ = batch.status.ok();
  warm_up_.reset();
}

bool LoopWatch::LoopTurns(Clock::time_point now) {
  const uint64_t turns = stack_.turns();
  if (turns != std::exchange(turns_, turns)) turned_ = now;
  if (now - std::max(turned_, woken_) >= std::min(kWakeAfter, options_.loop_patience / 4)) {
    stack_.pool().Wake();
    woken_ = now;
  }
  return now - turned_ < options_.loop_patience;
}

}  // namespace treadle
