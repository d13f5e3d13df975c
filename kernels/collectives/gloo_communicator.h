// A communicator between processes, for transfers, over Gloo's TCP transport with unbound buffers.
//
// Beyond what Gloo does, every wait is bounded and can be broken off by Abort; a peer
// that asks for another number of bytes than we send meets a deadline (Gloo would end the process);
// no exception leaves; SIGPIPE is ignored from the first Create on. One limit of Gloo
// stays: a peer that is lost in the middle of a message is noticed by Abort or the timeout only (a
// peer that is lost between messages is noticed at once), and whoever can reach the data
// interface's ports can disturb an epoch or end the process: it must be a trusted network.
//
// A receive that is posted before its message is sent saves the way back and forth of Gloo's
// announcement, so post early. A send is complete when the peer posted its receive and the bytes
// left this process. A message sent and waited for arrives even if the communicator is then
// destroyed, unless it was broken. When Abort returns (tens of milliseconds per peer at most),
// nothing writes to or reads from this rank's buffers any more.
//
// The transport has one thread per communicator. It inherits affinity and priority from the caller
// of Create and sleeps when nothing arrives. The destructor takes some ten milliseconds.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::string data_interface = "lo";  // a network interface's name, or an address of this machine
  std::chrono::milliseconds timeout{120'000};         // of every wait
  std::chrono::milliseconds connect_timeout{10'000};  // until all ranks are there and connected
};

// Joins `size` ranks, each of which calls this with its own rank and the same, fresh rendezvous.
// Returns when this rank is connected with all others. Errors: InvalidArgument (an interface that
// is not there), DeadlineExceeded (a rank did not come), the rendezvous' own.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options,
                                                                     Rendezvous& rendezvous);

// The numeric address of `name`: an interface's name, one of this machine's addresses, or a host
// name that resolves to one. IPv4 is preferred. InvalidArgument, naming what there is. Pure
// function of the machine's interfaces.
absl::StatusOr<std::string> ResolveDataInterface(const std::string& name);

}  // namespace treadle
