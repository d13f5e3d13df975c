// TLS material from PEM files: read as a whole, checked, and read anew when the files change.
//
// A change that does not pass the checks is reported, and what was there stays in use.
//
// Thread safety: pure, but for the files.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "net/client_socket.h"
#include "server/access/file_watcher.h"
#include "server/observe/log_event.h"

namespace treadle {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate;  // chain, the own one first; empty: none
  std::string key;
  std::string ca;  // who may be at the other end

  bool empty() const { return certificate.empty() && key.empty() && ca.empty(); }
};

// Their contents at one time, checked: the parts belong together.
struct TlsMaterial {
  std::string certificate, key, ca;
  // A server of TLS 1.2 or newer with that certificate; with `ca` for those who show a certificate
  // of it. Null without a certificate.
  std::shared_ptr<ssl_ctx_st> server;
  // A client that believes those whose certificate is of `ca`, and shows its own, if it has one.
  // Null without `ca`.
  std::shared_ptr<ssl_ctx_st> client;
};

// Reads and checks: readable, PEM, key and certificate belong together, valid today, and strong
// enough for OpenSSL. InvalidArgument names file and reason.
absl::StatusOr<TlsMaterial> ReadTlsFiles(const TlsFiles& files);

// Reads the files for the first time, and hands them and every later version that passes the checks
// to `take`, one after the other.
absl::StatusOr<std::unique_ptr<FileWatcher>> WatchTlsFiles(
    const TlsFiles& files, LogSink log, std::function<void(const TlsMaterial&)> take);

// The TLS of a server's sockets by them. Requires a certificate; with `ca`, clients must show one
// from it. A pair of key and certificate that changes is taken over as one. `protocol`: as
// SocketTls.
absl::StatusOr<std::shared_ptr<const SocketTls>> OpenSocketTls(const TlsFiles& files,
                                                               std::string_view protocol,
                                                               LogSink log);

}  // namespace treadle
