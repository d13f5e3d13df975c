// TLS from files: checked before anything is loaded, taken over again when they change.
//
// A change that does not pass the checks is reported, and what was there stays in use; connections
// that stand are never touched. gRPC sees only what has passed: it reads copies in memory.
//
// Thread safety: Open and destruction from the owner's thread, the latter after every server and
// channel that uses the credentials is gone.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace treadle {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate;  // chain, the own one first; empty: none
  std::string key;
  std::string ca;  // who may be at the other end; empty: see Tls' methods

  bool empty() const { return certificate.empty() && key.empty() && ca.empty(); }
};

// Reads and checks: readable, PEM, key and certificate belong together, valid today. Errors name
// file and reason.
absl::Status CheckTlsFiles(const TlsFiles& files);

class Tls {
 public:
  using Log = std::function<void(const std::string&)>;  // on any thread

  static absl::StatusOr<std::unique_ptr<Tls>> Open(const TlsFiles& files, Log log);
  virtual ~Tls() = default;

  // With `ca`, clients must show a certificate from it. Requires a certificate.
  virtual std::shared_ptr<grpc::ServerCredentials> ForServer() const = 0;
  // Verifies the server's name and its certificate, from `ca`. Requires one.
  virtual std::shared_ptr<grpc::ChannelCredentials> ForChannel() const = 0;
};

}  // namespace treadle
