#include "server/cli/serve_doors.h"

#include <utility>

#include "base/status.h"
#include "net/address.h"
#include "server/access/tls_files.h"
#include "server/cli/daemon.h"

namespace treadle {

absl::StatusOr<Doors> OpenDoors(const ServeOptions& options, Log& log) {
  TREADLE_RETURN_IF_ERROR(
      OpenControlCredentials(options.control_tls, options.control_secret_file, log.sink())
          .status());
  Doors doors;
  if (!options.tls_cert.empty()) {
    const TlsFiles files = {
        .certificate = options.tls_cert, .key = options.tls_key, .ca = options.tls_client_ca};
    TREADLE_ASSIGN_OR_RETURN(doors.tls, OpenSocketTls(files, "h2", log.sink()));
    // Of one file it is enough to tell once that it was read anew.
    TREADLE_ASSIGN_OR_RETURN(doors.http_tls,
                             OpenSocketTls(files, "http/1.1", [](const LogEvent&) {}));
  }
  if (!options.api_keys_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(doors.keys, ApiKeys::Open(options.api_keys_file, log.sink()));
  }
  if (!options.metrics_tls_cert.empty()) {
    TREADLE_ASSIGN_OR_RETURN(doors.metrics_tls,
                             OpenSocketTls({.certificate = options.metrics_tls_cert,
                                            .key = options.metrics_tls_key,
                                            .ca = options.metrics_tls_client_ca},
                                           "http/1.1", log.sink()));
  }
  if (!options.metrics_token_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(
        doors.metrics_tokens,
        ApiKeys::Open(options.metrics_token_file, log.sink(), "--metrics-token-file"));
  }
  if (!options.durable.empty()) {
    TREADLE_ASSIGN_OR_RETURN(doors.requests, RequestTable::Open(options.durable));
  }
  if (options.health_listen != "none") {
    TREADLE_ASSIGN_OR_RETURN(doors.health_server,
                             HealthServer::Start(options.health_listen, *doors.health));
  }
  return doors;
}

ServiceOptions ServiceFrom(const ServeOptions& options, const Doors& doors, RequestStore* store,
                           Log& log) {
  ServiceOptions service;
  service.listen = options.listen;
  service.default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens);
  service.pooling = options.embedding_pooling;
  service.stream_stall_timeout = options.stream_stall_timeout;
  service.limits = {.connections = static_cast<size_t>(options.max_connections),
                    .per_address = static_cast<size_t>(options.max_connections_per_address),
                    .receiving = static_cast<uint64_t>(options.max_receive_memory),
                    .http2 = {.message_bytes = static_cast<uint64_t>(options.max_request_bytes),
                              .header_block_bytes = static_cast<uint64_t>(options.max_header_bytes),
                              .streams = static_cast<size_t>(options.max_calls_per_connection)}};
  service.work = {.entries = static_cast<size_t>(options.max_unread_requests),
                  .bytes = static_cast<size_t>(options.max_unread_bytes)};
  service.tls = doors.tls.get();
  service.keys = doors.keys.get();
  service.store = store;
  service.health = doors.health;
  if (options.log_requests) service.request_log = log.sink();
  service.on_ready = [&log] {
    log.Write({.name = "ready", .message = "ready: the first token has come out"});
  };
  return service;
}

HttpOptions HttpFrom(const ServeOptions& options, const Doors& doors) {
  return {.tls = doors.http_tls.get(),
          .head_bytes = static_cast<size_t>(options.max_header_bytes),
          .body_bytes = static_cast<uint64_t>(options.max_request_bytes),
          .receiving_bytes = static_cast<uint64_t>(options.max_receive_memory),
          .connections = static_cast<size_t>(options.max_connections),
          .per_address = static_cast<size_t>(options.max_connections_per_address),
          .allow_origins = options.http_allow_origins};
}

absl::StatusOr<std::string> ListenForOthers(const ServeOptions& options, const Doors& doors,
                                            Metrics& metrics) {
  std::string where = "no metrics";
  if (options.metrics_listen != "none") {
    TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(options.metrics_listen));
    const bool api_key = options.metrics_auth == MetricsAuth::kApiKey;
    const ApiKeys* keys = api_key ? doors.keys.get() : doors.metrics_tokens.get();
    const SocketTls* tls = doors.metrics_tls.get();
    TREADLE_ASSIGN_OR_RETURN(address.port, metrics.Listen(options.metrics_listen, keys, tls));
    where = Str("metrics at http", tls ? "s" : "", "://", ToString(address), "/metrics");
  }
  if (doors.health_server) where += ", probes at " + ToString(doors.health_server->address());
  return where;
}

}  // namespace treadle
