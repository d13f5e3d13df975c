// A checkpoint that lies with the master: its directory is here, its tensors are asked for when
// they are loaded (`--weights-from master`).
//
// Tensors have fixed places in a reserved range of addresses that takes memory only where something
// lies. A tensor is fetched by Require, checked against its SHA-256, and gone when the next one is
// fetched: beside what is packed already, there is never more than one.
//
// Thread safety: loading from one thread; Deliver and Fail from any other.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

namespace control {
class CheckpointDirectory;
class TensorChunk;
}  // namespace control

class ReceivedCheckpoint : public Checkpoint {
 public:
  // Asks the master for the chunk at `offset` of a tensor, or of its constants. Must not block.
  using Ask = std::function<void(uint32_t tensor, bool constants, uint64_t offset)>;

  // Loading fails with DeadlineExceeded when a chunk takes longer than `patience`. Errors: a
  // directory that contradicts itself; ResourceExhausted without addresses for it.
  static absl::StatusOr<std::unique_ptr<ReceivedCheckpoint>> Create(
      const control::CheckpointDirectory& directory, std::chrono::milliseconds patience, Ask ask);

  // What the master answered.
  virtual void Deliver(const control::TensorChunk& chunk) = 0;
  // The master is gone: wakes the loading thread, for good.
  virtual void Fail(const absl::Status& why) = 0;
};

// The master's side. Thread safety: Answer from any thread.
class CheckpointSender {
 public:
  // `checkpoint` outlives the sender.
  static std::unique_ptr<CheckpointSender> Create(const Checkpoint& checkpoint);
  virtual ~CheckpointSender() = default;

  virtual void Describe(control::CheckpointDirectory& directory) const = 0;
  virtual void Answer(uint32_t tensor, bool constants, uint64_t offset,
                      control::TensorChunk& chunk) = 0;
};

}  // namespace treadle
