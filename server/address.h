// host:port addresses of listeners. Pure, but for ProbeListen, which opens and closes a socket.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

struct Address {
  std::string host;
  int port = 0;
};

// "127.0.0.1:50051", "localhost:0", "[::1]:50051". InvalidArgument otherwise.
absl::StatusOr<Address> ParseAddress(const std::string& text);
std::string ToString(const Address& address);

// Whether one can listen there now: Unavailable names address and reason ("Address already in
// use"), which gRPC itself does not tell.
absl::Status ProbeListen(const Address& address);

}  // namespace treadle
