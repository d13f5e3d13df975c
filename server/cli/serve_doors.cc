#include "server/cli/serve_doors.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "base/status.h"
#include "net/address.h"
#include "net/door.h"
#include "server/access/tls_files.h"
#include "server/cli/daemon.h"

namespace treadle {
namespace {

constexpr size_t kPollerFiles = 4;  // of gRPC: two pollers, each an epoll and what wakes it
// A file that was changed (TLS, keys) is read while the system is asked about memory.
constexpr size_t kPassingFiles = 2;
constexpr size_t kJournalFiles =
    4;  // the lock, a segment and the one before it, their folder for a moment
// The recording and, where it is full, its next file.
constexpr size_t kRecordingFiles = 2;
constexpr size_t kSupervisorFiles = 1;  // the lock of the folder of sockets
// The supervisor's pipe, its other end while the worker starts, the memory that is kept for it.
constexpr size_t kLocalWorkerFiles = 3;
// The connection, and the one that takes its place.
constexpr size_t kWorkerConnections = 2;

// Files of the model that are open at once.
size_t ModelFiles(const std::string& path) {
  std::error_code error;
  size_t count = 1;  // the only one; in a folder, a file of settings beside those of tensors
  for (std::filesystem::directory_iterator file(path, error), end; !error && file != end;
       file.increment(error)) {
    if (file->path().extension() == ".safetensors") ++count;
  }
  return count;
}

}  // namespace

std::vector<FileNeed> FilesOf(const ServeOptions& options) {
  const size_t local = options.remote() && options.workers.empty()
                           ? static_cast<size_t>(options.stages() + options.spares)
                           : 0;
  const auto port = [](const std::string& listen, size_t files) {
    return listen == "none" ? 0 : files;
  };
  return {
      {"gRPC", kPollerFiles + Door::kMinFiles},
      {"the HTTP API", port(options.http_listen, HttpServer::kMinFiles)},
      {"metrics", port(options.metrics_listen, HttpServer::kMinFiles)},
      {"probes", port(options.health_listen, Door::kMinFiles)},
      {"the model", ModelFiles(options.model)},
      {"workers", (local > 0 ? kSupervisorFiles : 0) +
                      local * (kLocalWorkerFiles + kWorkerConnections) +
                      options.workers.size() * kWorkerConnections},
      {"the ledger", options.ledger_file.empty() ? size_t{0} : 1},
      {"the recording", options.record.empty() ? 0 : kRecordingFiles},
      {"stored requests", options.durable.empty() ? 0 : kJournalFiles},
      {"files that are read in passing", kPassingFiles},
  };
}

absl::StatusOr<Doors> OpenDoors(const ServeOptions& options, Log& log) {
  TREADLE_RETURN_IF_ERROR(
      OpenControlCredentials(options.control_tls, options.control_secret_file, log.sink())
          .status());
  Doors doors;
  if (!options.tls_cert.empty()) {
    const TlsFiles files = {
        .certificate = options.tls_cert, .key = options.tls_key, .ca = options.tls_client_ca};
    TREADLE_ASSIGN_OR_RETURN(doors.tls, OpenSocketTls(files, "h2", log.sink()));
    // Silent: the log has heard from the line above that a file was read again.
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
    TREADLE_ASSIGN_OR_RETURN(doors.requests,
                             RequestJournal::Open(options.durable, {.log = log.sink()}));
  }
  if (options.health_listen != "none") {
    TREADLE_ASSIGN_OR_RETURN(doors.health_server,
                             HealthServer::Start(options.health_listen, *doors.health));
  }
  return doors;
}

ServiceOptions ServiceFrom(const ServeOptions& options, const Doors& doors,
                           const ServedModel& model, Speculate speculate, RequestStore* store,
                           Log& log) {
  ServiceOptions service;
  service.listen = options.listen;
  service.default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens);
  service.pooling = options.embedding_pooling;
  service.speculate = speculate;
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
  service.on_ready = [&log, constraints = model.constraints.get()] {
    log.Write({.name = "ready", .message = "ready: the first token has come out"});
    // Not before: it would hold up who never asks for a constraint.
    if (constraints == nullptr) return;
    constraints->ReadAhead([&log] {
      log.Write({.name = "constraints_ready", .message = "constraints: the vocabulary is read"});
    });
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
