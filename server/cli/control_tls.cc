#include "server/cli/control_tls.h"

#include <memory>
#include <utility>

#include "base/status.h"
#include "server/access/tls.h"

namespace treadle {
namespace {

// Holds `tls` with it.
template <typename Credentials>
std::shared_ptr<Credentials> With(std::shared_ptr<Tls> tls,
                                  std::shared_ptr<Credentials> credentials) {
  Credentials* const plain = credentials.get();
  return {std::make_shared<std::pair<std::shared_ptr<Tls>, std::shared_ptr<Credentials>>>(
              std::move(tls), std::move(credentials)),
          plain};
}

}  // namespace

absl::StatusOr<ControlCredentials> OpenControlTls(const std::string& folder, LogSink log) {
  if (folder.empty()) return ControlCredentials{};
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<Tls> tls, Tls::Open({.certificate = folder + "/tls.crt",
                                                                .key = folder + "/tls.key",
                                                                .ca = folder + "/ca.crt"},
                                                               std::move(log)));
  return ControlCredentials{.server = With(tls, tls->ForServer()),
                            .channel = With(tls, tls->ForChannel())};
}

}  // namespace treadle
