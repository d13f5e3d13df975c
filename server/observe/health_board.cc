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

struct HealthServer::State {
  explicit State(HealthBoard& shown) : board(shown) {}

  HealthBoard& board;
  Address address;
  // gRPC wants some service besides its own; this one answers UNIMPLEMENTED.
  grpc::CallbackGenericService nothing;
  std::unique_ptr<grpc::Server> server;
};

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Start(const std::string& listen,
                                                                  HealthBoard& board) {
  TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(listen));
  TREADLE_RETURN_IF_ERROR(ProbeListen(address));
  auto state = std::make_unique<State>(board);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(4096);  // a service's name
  builder.AddListeningPort(ToString(address), grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&state->nothing);
  state->server = builder.BuildAndStart();
  if (!state->server || port == 0) {
    return absl::UnavailableError(Str("cannot listen on ", ToString(address)));
  }
  state->address = {address.host, port};
  board.Attach(*state->server->GetHealthCheckService());
  return std::unique_ptr<HealthServer>(new HealthServer(std::move(state)));
}

HealthServer::HealthServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

HealthServer::~HealthServer() {
  state_->board.Detach(*state_->server->GetHealthCheckService());
  state_->server->Shutdown(std::chrono::system_clock::now());
}

const Address& HealthServer::address() const { return state_->address; }

}  // namespace treadle
