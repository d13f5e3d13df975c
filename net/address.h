// host:port addresses of listeners. Pure, but for OpenListener and ProbeListen.
#pragma once

#include <string>
#include <string_view>

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

// Only processes of this machine can reach that host: "localhost", "::1", or 127.x.y.z in digits (a
// name may begin like that and lead elsewhere).
bool IsLoopback(std::string_view host);

// A socket that listens there, non-blocking; `address` gets the port that was taken. Unavailable
// names address and reason ("Address already in use").
absl::StatusOr<int> OpenListener(Address& address);

// Whether one can listen there now, with OpenListener's errors: for who will only later.
absl::Status ProbeListen(const Address& address);

}  // namespace treadle
