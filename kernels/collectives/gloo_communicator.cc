#include "kernels/collectives/gloo_communicator.h"

// Gloo's headers forget some of their own includes.
// clang-format off
#include <cstring>
#include <sstream>
#include <string>

#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
// clang-format on

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Gloo reads -1 ms as its own default of half a minute.
constexpr milliseconds kShortestWait{1};
// A pair waits five times its context's timeout for its connection.
constexpr int kGlooConnectFactor = 5;

// A message's place: Gloo matches both ends by it. The size is part of it, because a message that
// is larger than the posted buffer would end the process; like this it finds no buffer at all.
constexpr int kSizeBits = 40;
uint64_t SlotOf(uint64_t sequence, size_t bytes) {
  TREADLE_CHECK(bytes < size_t{1} << kSizeBits);
  return sequence << kSizeBits | bytes;
}

// Without the "[file:line] " that Gloo's messages begin with.
std::string Reason(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return text.starts_with('[') && end != std::string::npos ? text.substr(end + 2) : text;
}

// Gloo writes to sockets without MSG_NOSIGNAL.
void IgnoreSigpipe() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction current = {};
    if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
      std::signal(SIGPIPE, SIG_IGN);
    }
  });
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(const GlooOptions& options, std::shared_ptr<gloo::transport::Context> context)
      : rank_(options.rank),
        size_(options.size),
        timeout_(std::max(options.timeout, kShortestWait)),
        context_(std::move(context)),
        sent_(options.size, 0),
        received_(options.size, 0) {}

  // Order: pairs (no thread of Gloo's touches a buffer any more), buffers, context. Destroying a
  // buffer under an open pair would leave Gloo's thread spinning.
  ~GlooCommunicator() override {
    bool left = false;
    {
      const MutexLock lock(mutex_);
      left = !outstanding_.empty();
    }
    if (left) Abort(absl::CancelledError("the communicator was destroyed"));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool asynchronous() const override { return false; }

  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override;
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override;
  absl::Status Wait(Transfer transfer) override;
  void Abort(absl::Status why) override;

 private:
  using UnboundBuffer = gloo::transport::UnboundBuffer;
  enum class Kind { kSend, kRecv };
  struct Operation {
    Kind kind = Kind::kSend;
    int peer = 0;
    size_t bytes = 0;
    std::unique_ptr<UnboundBuffer> buffer;  // null: nothing to transfer
  };

  absl::StatusOr<Transfer> Post(Kind kind, void* data, size_t bytes, int peer, uint64_t slot);
  // Breaks the communicator; returns what broke it first.
  absl::Status Break(absl::Status why);
  absl::Status Failure(const Operation& operation, Clock::duration waited,
                       const std::exception& error) const;

  const int rank_;
  const int size_;
  const milliseconds timeout_;
  const std::shared_ptr<gloo::transport::Context> context_;

  // The rank's thread.
  std::vector<uint64_t> sent_;      // [size] messages so far
  std::vector<uint64_t> received_;  // [size]

  Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  Transfer next_ ABSL_GUARDED_BY(mutex_) = 1;
  // Operations are added and removed by the rank's thread only; Abort wakes those that are there.
  std::unordered_map<Transfer, Operation> outstanding_ ABSL_GUARDED_BY(mutex_);

  Mutex closing_;
  bool closed_ ABSL_GUARDED_BY(closing_) = false;
};

absl::StatusOr<Communicator::Transfer> GlooCommunicator::Post(Kind kind, void* data, size_t bytes,
                                                              int peer, uint64_t slot) {
  TREADLE_CHECK(peer >= 0 && peer < size_ && peer != rank_);
  Operation operation{kind, peer, bytes, nullptr};
  if (bytes > 0) operation.buffer = context_->createUnboundBuffer(data, bytes);
  UnboundBuffer* const buffer = operation.buffer.get();
  Transfer transfer = 0;
  {
    const MutexLock lock(mutex_);
    if (!status_.ok()) return status_;
    transfer = next_++;
    outstanding_.emplace(transfer, std::move(operation));
  }
  if (buffer == nullptr) return transfer;
  try {
    if (kind == Kind::kSend) {
      buffer->send(peer, slot);
    } else {
      buffer->recv(peer, slot);
    }
  } catch (const std::exception& error) {
    return Break(Failure({kind, peer, bytes, nullptr}, Clock::duration::zero(), error));
  }
  return transfer;
}

absl::StatusOr<Communicator::Transfer> GlooCommunicator::Send(const void* data, size_t bytes,
                                                              int to) {
  // Gloo reads from the buffer only.
  return Post(Kind::kSend, const_cast<void*>(data), bytes, to, SlotOf(sent_[to]++, bytes));
}

absl::StatusOr<Communicator::Transfer> GlooCommunicator::Recv(void* data, size_t bytes, int from) {
  return Post(Kind::kRecv, data, bytes, from, SlotOf(received_[from]++, bytes));
}

absl::Status GlooCommunicator::Wait(Transfer transfer) {
  const Operation* operation = nullptr;
  {
    const MutexLock lock(mutex_);
    if (!status_.ok()) return status_;
    const auto found = outstanding_.find(transfer);
    TREADLE_CHECK(found != outstanding_.end());
    operation = &found->second;  // stays in place: only this thread removes it
  }
  const Clock::time_point begin = Clock::now();
  if (operation->buffer != nullptr) {
    try {
      UnboundBuffer& buffer = *operation->buffer;
      const bool done = operation->kind == Kind::kSend ? buffer.waitSend(nullptr, timeout_)
                                                       : buffer.waitRecv(nullptr, timeout_);
      if (!done) {  // Abort
        const MutexLock lock(mutex_);
        return status_;
      }
    } catch (const std::exception& error) {
      return Break(Failure(*operation, Clock::now() - begin, error));
    }
  }
  const MutexLock lock(mutex_);
  outstanding_.erase(transfer);
  return absl::OkStatus();
}

absl::Status GlooCommunicator::Failure(const Operation& operation, Clock::duration waited,
                                       const std::exception& error) const {
  const bool send = operation.kind == Kind::kSend;
  const std::string what =
      Str("rank ", rank_, send ? " could not send " : " could not receive ", operation.bytes,
          " bytes ", send ? "to" : "from", " rank ", operation.peer);
  if (waited >= timeout_) {
    return absl::DeadlineExceededError(Str(what, " within ", timeout_.count(), " ms"));
  }
  return absl::UnavailableError(Str(what, ": ", Reason(error)));
}

void GlooCommunicator::Abort(absl::Status why) {
  TREADLE_CHECK(!why.ok());
  (void)Break(std::move(why));
}

absl::Status GlooCommunicator::Break(absl::Status why) {
  {
    const MutexLock lock(mutex_);
    if (status_.ok()) {
      status_ = std::move(why);
      for (auto& [transfer, operation] : outstanding_) {
        if (operation.buffer == nullptr) continue;
        operation.buffer->abortWaitRecv();
        operation.buffer->abortWaitSend();
      }
    }
    why = status_;
  }
  // Tells the peers, and lets go of the buffers; whoever comes second waits for it.
  const MutexLock lock(closing_);
  for (int peer = 0; peer < size_ && !closed_; ++peer) {
    if (peer == rank_) continue;
    try {
      context_->getPair(peer)->close();
    } catch (const std::exception&) {
      // Closed already, by what broke it.
    }
  }
  closed_ = true;
  return why;
}

std::string AddressKey(int rank, int peer) { return Str("gloo/", rank, "/", peer); }

// Every rank publishes one address per peer, and connects when it has seen all of its own: whoever
// is late or absent is noticed here, where the rendezvous' deadline holds.
absl::Status ConnectPairs(const GlooOptions& options, gloo::transport::Context& context,
                          Rendezvous& rendezvous) {
  const Clock::time_point deadline = Clock::now() + options.connect_timeout;
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    const std::vector<char> address = context.createPair(peer)->address().bytes();
    TREADLE_RETURN_IF_ERROR(rendezvous.Set(AddressKey(options.rank, peer),
                                           std::string(address.begin(), address.end())));
  }
  std::vector<std::vector<char>> addresses(options.size);
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    TREADLE_ASSIGN_OR_RETURN(const std::string address,
                             rendezvous.Get(AddressKey(peer, options.rank), deadline));
    addresses[peer].assign(address.begin(), address.end());
  }
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer != options.rank) context.getPair(peer)->connect(addresses[peer]);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options,
                                                                     Rendezvous& rendezvous) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return InvalidArgument("rank ", options.rank, " of ", options.size,
                           ": expected a rank from 0 to size - 1");
  }
  TREADLE_ASSIGN_OR_RETURN(const std::string address, ResolveDataInterface(options.data_interface));
  IgnoreSigpipe();
  const Clock::time_point begin = Clock::now();
  try {
    const std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str()));
    std::shared_ptr<gloo::transport::Context> context =
        device->createContext(options.rank, options.size);
    context->setTimeout(std::max(options.connect_timeout / kGlooConnectFactor, kShortestWait));
    TREADLE_RETURN_IF_ERROR(ConnectPairs(options, *context, rendezvous));
    return std::make_unique<GlooCommunicator>(options, std::move(context));
  } catch (const std::exception& error) {
    const std::string what = Str("rank ", options.rank, " of ", options.size, " at ", address,
                                 " could not connect: ", Reason(error));
    return Clock::now() - begin >= options.connect_timeout ? absl::DeadlineExceededError(what)
                                                           : absl::UnavailableError(what);
  }
}

}  // namespace treadle
