// host:port addresses of listeners. Pure, but for OpenListener and ProbeListen.
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

// A socket that listens there, non-blocking; `address` gets the port that was taken. Unavailable
// names address and reason ("Address already in use").
absl::StatusOr<int> OpenListener(Address& address);

// Whether one can listen there now, with OpenListener's errors: for who will only later.
absl::Status ProbeListen(const Address& address);

}  // namespace treadle
