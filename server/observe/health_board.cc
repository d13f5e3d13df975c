#include "server/observe/health_board.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

struct Name {
  const char* service;
  Probe probe;
};
constexpr Name kNames[] = {{"started", Probe::kStarted},
                           {"ready", Probe::kReady},
                           {"live", Probe::kLive},
                           {"", Probe::kReady},
                           {"treadle.v1.Inference", Probe::kReady}};

// Probes are few, short, and each on a connection of its own; a message is a service's name.
constexpr DoorLimits kProbeLimits = {
    .connections = 64, .receiving = 65536, .http2 = {.message_bytes = 4096, .streams = 16}};

}  // namespace

void HealthBoard::Show(grpc::HealthCheckServiceInterface& service, Probe probe, bool serving) {
  for (const Name& name : kNames) {
    if (name.probe == probe) service.SetServingStatus(name.service, serving);
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

}  // namespace treadle
