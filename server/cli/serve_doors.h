// The doors of `treadle serve`: its ports, who may come in, and where requests are stored.
//
// Thread safety: one thread; what Doors holds says it of itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "net/client_socket.h"
#include "net/open_files.h"
#include "server/access/api_keys.h"
#include "server/configuration.h"
#include "server/durable/request_store.h"
#include "server/grpc/service.h"
#include "server/http/http_server.h"
#include "server/observe/health.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/session/served_model.h"

namespace treadle {

// Opened before minutes of loading, for what is wrong with the files.
struct Doors {
  std::shared_ptr<const SocketTls> tls, http_tls;
  std::unique_ptr<ApiKeys> keys;
  std::shared_ptr<const SocketTls> metrics_tls;
  std::unique_ptr<ApiKeys> metrics_tokens;
  std::shared_ptr<HealthBoard> health = std::make_shared<HealthBoard>();
  std::unique_ptr<HealthServer> health_server;
  std::unique_ptr<RequestJournal> requests;  // null: they are not stored
};

// The files that the server opens at once at least, with the fewest connections that its ports make
// do with, for ReserveFiles: before anything else is opened. A GPU's driver opens more.
std::vector<FileNeed> FilesOf(const ServeOptions& options);

// InvalidArgument names the file that is wrong, Unavailable the port.
absl::StatusOr<Doors> OpenDoors(const ServeOptions& options, Log& log);

// The options of the front ends. `doors`, `model`, `store` (null: nothing is stored) and `log`
// outlive them.
ServiceOptions ServiceFrom(const ServeOptions& options, const Doors& doors,
                           const ServedModel& model, Speculate speculate, RequestStore* store,
                           Log& log);
HttpOptions HttpFrom(const ServeOptions& options, const Doors& doors);

// Opens the port for scrapes; what to tell of it, and of the one for probes.
absl::StatusOr<std::string> ListenForOthers(const ServeOptions& options, const Doors& doors,
                                            Metrics& metrics);

}  // namespace treadle
