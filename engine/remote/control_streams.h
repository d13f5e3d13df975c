// The bidirectional streams of control.proto, without gRPC's types: one end is a Stream to send
// into, and StreamEvents that say what came.
//
// Thread safety: Send, Close and Abort from any thread; they never block. Events of one stream come
// one at a time, on a thread of gRPC's: `message` for each message in order, then `closed` exactly
// once. They may call the stream's methods but must not wait for other streams.
//
// The memory that a peer can make an end keep is bounded: without the secret nothing of it is read,
// the first message is small (kMaxFirstBytes), large ones come in pieces and only after it, a peer
// that does not take what is sent to it is not listened to until it does, and of streams that have
// said nothing yet a server keeps the newest. A port is behind a door (net/door.h), where TLS ends:
// it refuses what is larger by its announced length, and limits connections, calls and headers. A
// unix socket is not: who may open it is trusted so far.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace treadle {

class SocketTls;

namespace control {
class FollowAnswer;
class FollowMessage;
class MasterMessage;
class TrainAnswer;
class TrainRequest;
class WorkerMessage;
}  // namespace control

inline constexpr uint32_t kControlProtocol = 8;
inline constexpr size_t kMaxFirstBytes = 64 << 10;  // many times a hello

// The identity of one end, and whom it trusts; null: plaintext. Unix sockets are always plaintext.
struct ControlCredentials {
  std::shared_ptr<const SocketTls> server;
  std::shared_ptr<grpc::ChannelCredentials> channel;
  // Both ends prove that they have it before an event comes (control_secret.h); empty: neither
  // does. An end that has one and meets an end that has none, or another, ends the stream with
  // Unauthenticated.
  std::string secret = {};
};

template <typename Out>
class Stream {
 public:
  virtual ~Stream() = default;

  // Queues a message; dropped if the stream has ended.
  virtual void Send(Out&& message) = 0;
  // Sends what `fill` makes of an empty message.
  template <typename Fill>
  void Tell(const Fill& fill) {
    Out message;
    fill(message);
    Send(std::move(message));
  }
  // Ends the stream after what is queued. On the server's end `status` is what the client gets.
  virtual void Close(absl::Status status) = 0;
  // Ends it now.
  virtual void Abort() = 0;
};

template <typename In>
struct StreamEvents {
  std::function<void(In&)> message;
  // Ok: the other end closed in order. Otherwise why: the server's status, or Unavailable.
  std::function<void(const absl::Status&)> closed;
};

// Where one address is served, with grpc.health.v1: "" says that it listens, "ready" what SetReady
// was told last. The destructor ends all streams and waits for their `closed`.
class ControlServer {
 public:
  // Called for each stream that a client opens, on a thread of gRPC's.
  struct Acceptors {
    std::function<StreamEvents<control::MasterMessage>(
        std::shared_ptr<Stream<control::WorkerMessage>>)>
        attach;
    std::function<StreamEvents<control::FollowMessage>(
        std::shared_ptr<Stream<control::FollowAnswer>>)>
        follow;
    std::function<StreamEvents<control::TrainRequest>(
        std::shared_ptr<Stream<control::TrainAnswer>>)>
        train;  // empty: Unimplemented
  };

  // `listen`: host:port (port 0: a free one) or unix:path. Unavailable if it cannot be had.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Start(
      const std::string& listen, Acceptors acceptors, const ControlCredentials& credentials = {});
  ~ControlServer();
  // With the port that was taken.
  const std::string& address() const;
  void SetReady(bool ready);

 private:
  class State;
  explicit ControlServer(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

// Opens a stream on a connection of its own; failing to connect is a `closed` with Unavailable.
std::shared_ptr<Stream<control::MasterMessage>> OpenAttach(
    const std::string& address, StreamEvents<control::WorkerMessage> events,
    const ControlCredentials& credentials = {});
std::shared_ptr<Stream<control::FollowMessage>> OpenFollow(
    const std::string& address, StreamEvents<control::FollowAnswer> events,
    const ControlCredentials& credentials = {});

std::shared_ptr<Stream<control::TrainRequest>> OpenTrain(
    const std::string& address, StreamEvents<control::TrainAnswer> events,
    const ControlCredentials& credentials = {});

}  // namespace treadle
