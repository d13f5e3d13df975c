// The queues at either end of a stream of the control plane: messages to be sent, and the pieces of
// one that arrives. Large messages travel in pieces (MessagePart), small ones as they are.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "engine/remote/control_streams.h"

namespace treadle {

inline constexpr size_t kMaxMessageBytes = 256 << 20;  // of a large model's directory of tensors
// The size of one gRPC message: a chunk of a tensor, which is the bulk of what is sent, and its
// fields. Whatever is larger goes in pieces.
inline constexpr size_t kMaxWireBytes = (1 << 20) + (64 << 10);
inline constexpr size_t kPieceBytes = 1 << 20;
// The bytes of messages that a peer has yet to take, before no more are read from it: several times
// the chunks that a worker asks for ahead.
inline constexpr size_t kMaxQueuedBytes = 32 << 20;
inline constexpr size_t kQueueEntryBytes = 256;  // that any message takes

template <typename Message>
inline constexpr bool kHasParts = requires(Message message) {
  message.mutable_part();
};

// Messages to be sent, in order.
template <typename Message>
class ControlOutbox {
 public:
  void Push(Message&& message) {
    if constexpr (kHasParts<Message>) {
      if (message.ByteSizeLong() > kMaxWireBytes) return PushParts(message);
    }
    Append(std::move(message));
  }
  void PushFirst(Message&& message) {
    queue_.push_front(std::move(message));
    sizes_.push_front(kQueueEntryBytes);
    bytes_ += kQueueEntryBytes;
  }
  void PopFirst() {
    bytes_ -= sizes_.front();
    queue_.pop_front();
    sizes_.pop_front();
  }
  // All but the first `keep`.
  void Drop(size_t keep) {
    for (; queue_.size() > keep; queue_.pop_back(), sizes_.pop_back()) bytes_ -= sizes_.back();
  }
  const Message& first() const { return queue_.front(); }
  bool empty() const { return queue_.empty(); }
  bool full() const { return bytes_ > kMaxQueuedBytes; }

 private:
  void Append(Message&& message) {
    sizes_.push_back(message.ByteSizeLong() + kQueueEntryBytes);
    bytes_ += sizes_.back();
    queue_.push_back(std::move(message));
  }
  void PushParts(const Message& message) {
    const std::string bytes = message.SerializeAsString();
    for (size_t begin = 0; begin < bytes.size(); begin += kPieceBytes) {
      Message piece;
      piece.mutable_part()->set_data(bytes.substr(begin, kPieceBytes));
      piece.mutable_part()->set_last(bytes.size() - begin <= kPieceBytes);
      Append(std::move(piece));
    }
  }

  std::deque<Message> queue_;
  std::deque<size_t> sizes_;
  size_t bytes_ = 0;
};

// Makes messages of what arrives.
template <typename Message>
class ControlInbox {
 public:
  // True if `message` is one, or the last piece of one, which it then becomes; false if more pieces
  // have to come. Errors: what no peer may send.
  absl::StatusOr<bool> Take(Message& message) {
    if (std::exchange(first_, false)) {
      const size_t bytes = message.ByteSizeLong();
      if (bytes <= kMaxFirstBytes && !IsPart(message)) return true;
      return ResourceExhausted("the first message has ", bytes, " bytes, expected a hello of at ",
                               "most ", kMaxFirstBytes);
    }
    if constexpr (kHasParts<Message>) {
      if (message.has_part()) return TakePart(message);
    }
    return true;
  }

 private:
  static bool IsPart(const Message& message) {
    if constexpr (kHasParts<Message>) return message.has_part();
    return false;
  }
  absl::StatusOr<bool> TakePart(Message& message) {
    const std::string& data = message.part().data();
    if (data.size() > kMaxMessageBytes - pieces_.size()) {
      return ResourceExhausted("a message of more than ", kMaxMessageBytes, " bytes");
    }
    pieces_ += data;
    if (!message.part().last()) return false;
    const bool parsed = message.ParseFromString(pieces_);
    pieces_ = {};
    if (parsed && !IsPart(message)) return true;
    return InvalidArgument("pieces that are no message");
  }

  bool first_ = true;
  std::string pieces_;
};

}  // namespace treadle
