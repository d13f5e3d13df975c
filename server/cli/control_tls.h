// The control plane's mutual TLS from one folder, as Kubernetes mounts a TLS secret: tls.crt,
// tls.key and ca.crt. Everybody in it, master and workers, shows a certificate of that CA, and is
// called by a name that stands in it.
//
// Thread safety: as Tls.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/remote/control_streams.h"
#include "server/observe/log_event.h"

namespace treadle {

// Checks the files and watches them as long as the credentials are held; they must be held as long
// as they are used. Null ones for an empty `folder`.
absl::StatusOr<ControlCredentials> OpenControlTls(const std::string& folder, LogSink log);

}  // namespace treadle
