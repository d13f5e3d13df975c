// The activations' way between pipeline stages: a stage receives its input from the previous one
// and sends its output to the next, over Communicators.
//
// Both ends know a message's size from the plan, and its header (link_messages.h) repeats what the
// plan said, so that a message that is not the one the plan asks for is an error and never a wrong
// token.
//
// Buffers belong to the link: three of [max_batch_tokens, hidden] f32, with room for a header in
// front, so that with the fp32 wire messages are received into and sent from one place. One is
// received into while the second is computed with and the third is sent from. None is written to
// before its sending is complete. Where they lie (StagingPlace) says who has a link:
//   kHost    rank 0 of every stage, over one communicator of the pipeline. The memory is the ops'
//            own, or one that a device copies rows from and to. Sending begins when the ops before
//            it have been waited for.
//   kDevice  every rank of every stage, to the ranks of the same number, over a communicator of two
//            for each neighbour. Rows stay on devices, and no rank has to tell its neighbours what
//            it received. Sending begins behind the ops before it, without the host, and lasts
//            while later ones run; only f32. A receive is waited for by the host, which has looked
//            at the header before any op reads the rows.
//
// Errors: DataLoss for a message that is not the expected one; else the communicator's. An error is
// final. Thread safety: confined to the rank's thread, but for Abort.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/link_messages.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"

namespace treadle {

class ActivationLink {
 public:
  struct Options {
    int previous = -1;  // rank in the communicator to receive from; -1: first stage
    int next = -1;      // and to send to; -1: last stage
    int64_t hidden = 0;
    int64_t max_batch_tokens = 0;
    WireType wire = WireType::kF32;
  };

  // Bytes that a link allocates.
  static size_t BufferBytes(const Options& options);

  // A kHost link. It owns the communicator, which must be gone before the link's buffers are.
  // `backend` outlives the link. Errors: of allocation.
  static absl::StatusOr<std::unique_ptr<ActivationLink>> Create(
      Backend& backend, std::unique_ptr<Communicator> pipeline, const Options& options);
  // A kDevice link, on a backend with its own memory. As above, but `previous` and `next` of the
  // options are ranks of two communicators; null where there is no neighbour.
  static absl::StatusOr<std::unique_ptr<ActivationLink>> CreateOnDevice(
      Backend& backend, std::unique_ptr<Communicator> previous, std::unique_ptr<Communicator> next,
      const Options& options);

  StagingPlace place() const { return place_; }

  // Says that an iteration of so many rows will be received next, after those announced before, so
  // that its receive is begun when a buffer is free: one iteration ahead of what Receive returned.
  // A hint: Receive does without. Ignored if the iteration was announced already.
  absl::Status Announce(uint64_t epoch, uint64_t iteration, int64_t rows);

  // The next iteration's input, [rows, hidden] f32 of the link's buffers. First stage: a free one
  // for what will be sent. Valid until the second next call of Receive.
  absl::StatusOr<Tensor> Receive(uint64_t epoch, uint64_t iteration, int64_t rows);

  // Any thread; as Communicator::Abort.
  void Abort(const absl::Status& why);

  // Begins to send what Receive returned for that iteration, the last one or the one before, after
  // the layers ran over it. Not on the last stage.
  absl::Status Send(uint64_t epoch, uint64_t iteration, Tensor hidden);

 private:
  using Transfer = Communicator::Transfer;
  using About = LinkMessages::About;

  // One end of a way to a neighbour.
  struct Neighbour {
    std::shared_ptr<Communicator> communicator;  // null: there is none
    int rank = -1;                               // of the neighbour in it
  };
  // What is under way from or to a slot.
  struct Transfers {
    std::optional<Transfer> receive;
    std::optional<Transfer> send;
  };

  ActivationLink(StagingPlace place, const Options& options, std::unique_ptr<LinkMessages> messages,
                 Neighbour previous, Neighbour next);
  static absl::StatusOr<std::unique_ptr<ActivationLink>> Make(Backend& backend, StagingPlace place,
                                                              const Options& options,
                                                              Neighbour previous, Neighbour next);

  static size_t SlotOf(uint64_t message) { return message % LinkMessages::kSlots; }
  absl::Status CheckRows(int64_t rows) const;
  absl::Status FinishSend(size_t slot);
  absl::Status PostAnnounced();
  absl::Status Take(size_t slot, const About& expected);
  absl::Status Fail(absl::Status status);

  const StagingPlace place_;
  const Options options_;
  const std::unique_ptr<LinkMessages> messages_;
  const Neighbour previous_;  // these behind messages_: they go first
  const Neighbour next_;

  absl::Status error_;
  std::array<Transfers, LinkMessages::kSlots> transfers_;
  std::deque<About> announced_;  // not yet received; the first `posted_ - received_` posted
  std::optional<About> last_announced_;
  uint64_t posted_ = 0;    // receives so far
  uint64_t received_ = 0;  // calls of Receive: what it returned lies in SlotOf(received_ - 1)
};

}  // namespace treadle
