// A checkpoint that lies with the master: its directory is here, its tensors are asked for when
// they are loaded (`--weights-from master`).
//
// Tensors have fixed places in a reserved range of addresses that takes memory only where something
// lies. A tensor is fetched by Require, checked against its SHA-256, and gone when those who
// fetched it fetch the next one: beside what is packed already, there is one at most for each rank.
//
// Thread safety: loading from a thread for each rank; Deliver and Fail from any other.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

namespace control {
class CheckpointDirectory;
class TensorChunk;
class TensorEntry;
class TensorRequest;
}  // namespace control

class ReceivedCheckpoint final : public Checkpoint {
 public:
  // Asks the master for a chunk. Must not block.
  using Ask = std::function<void(const control::TensorRequest&)>;

  // Loading fails with DeadlineExceeded when a chunk takes longer than `patience`. Errors: a
  // directory that contradicts itself; ResourceExhausted without addresses for it.
  static absl::StatusOr<std::unique_ptr<ReceivedCheckpoint>> Create(
      const control::CheckpointDirectory& directory, std::chrono::milliseconds patience, Ask ask);

  // Takes an answer of the master.
  void Deliver(const control::TensorChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // The master is gone: wakes the loading thread, for good.
  void Fail(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  absl::Status Fetch(const StoredTensor& tensor) const override;

 private:
  // Addresses for all tensors; memory comes with the first touch.
  struct Unmap {
    uint64_t bytes;
    void operator()(std::byte* begin) const;
  };
  // The transfer under way: one part of one tensor at a time.
  struct Transfer {
    uint32_t tensor = 0;
    bool constants = false;
    bool active = false;
    uint64_t asked = 0;  // bytes asked for; those before `arrived` are here
    uint64_t arrived = 0;
    uint64_t total = 0;  // known after the first chunk
    std::string sha256 = {};
    std::string bytes = {};  // of constants
    absl::Status error = {};
  };

  ReceivedCheckpoint(std::chrono::milliseconds patience, Ask ask);
  absl::Status Read(const control::CheckpointDirectory& directory);
  absl::Status AddEntry(const control::TensorEntry& entry, uint64_t& reserved,
                        std::vector<StoredTensor>& tensors);
  bool IsHere(uint32_t tensor) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(loading_);
  absl::StatusOr<std::string> Receive(uint32_t tensor, bool constants, uint64_t expected) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(loading_);
  absl::StatusOr<MatrixConstants> FetchConstants(uint32_t tensor) const;
  absl::Status Take(const control::TensorChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // An empty thing arrives with its hash alone.
  bool EmptyArrived() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !transfer_.sha256.empty() && transfer_.total == 0;
  }
  uint64_t RoomOf(const StoredTensor& tensor) const;

  const std::chrono::milliseconds patience_;
  const Ask ask_;
  const uint64_t page_;  // bytes
  std::unique_ptr<std::byte, Unmap> range_;
  std::vector<uint64_t> offsets_;  // of each tensor in range_

  mutable Mutex loading_;  // one rank fetches at a time
  // The tensor that each loading thread may read: these are here.
  mutable std::map<std::thread::id, uint32_t> readers_ ABSL_GUARDED_BY(loading_);

  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable Transfer transfer_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

// The master's side, for one worker while it is attached, which loads one tensor after the other.
// Thread safety: Answer from any thread.
class CheckpointSender {
 public:
  // `checkpoint` outlives the sender. `ranks`: the worker's.
  explicit CheckpointSender(const Checkpoint& checkpoint, int ranks = 1)
      : checkpoint_(checkpoint), ranks_(ranks), begun_(2 * checkpoint.tensors().size()) {}

  void Describe(control::CheckpointDirectory& directory) const;
  void Answer(const control::TensorRequest& request, control::TensorChunk& chunk);

 private:
  absl::Status Fill(const control::TensorRequest& request, control::TensorChunk& chunk)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const Checkpoint& checkpoint_;
  const int ranks_;
  Mutex mutex_;
  // How often each tensor, and its constants, were asked for from the first byte on.
  std::vector<int> begun_ ABSL_GUARDED_BY(mutex_);
  int64_t constants_of_ ABSL_GUARDED_BY(mutex_) = -1;  // whose constants_ are kept
  std::string constants_ ABSL_GUARDED_BY(mutex_);
  int64_t arranged_of_ ABSL_GUARDED_BY(mutex_) = -1;  // likewise, of StoredTensor::arranged
  std::vector<std::byte> arranged_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
