// The activations' way between pipeline stages: a stage receives its input from the previous one
// and sends its output to the next, over Communicators.
//
// Both ends know a message's size from the plan (no rows, where the plan is not for the receiver),
// and its header (LinkMessages) repeats what the plan said, so that a message that is not the one
// the plan asks for is an error and never a wrong token.
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
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/wire_codec.h"
#include "kernels/backend.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

// Bytes of one message of `rows` rows, header included.
size_t WireBytes(WireType wire, int64_t rows, int64_t hidden);

// Writes a message's encoded rows.
using EncodedRows = std::function<void(std::byte* rows)>;

// The messages of an ActivationLink: where they lie, and how they are sealed and opened.
//
// A message is a header {magic, wire type, rows, epoch, iteration, checksum} and the encoded rows
// behind it, wherever it lies. One message and one way: a header that travelled apart from its rows
// could be taken for the header of others.
//
// In the host's memory the checksum is of header and rows. On a device the host writes and reads
// the header by copies of its own (32 bytes), and the checksum is of the header alone: reading the
// rows would cost what the device's way saves, and the way itself has checks (those of NVLink, PCIe
// and InfiniBand). A header of old or foreign memory, of another epoch or another plan is found in
// both places.
//
// Thread safety: confined to the rank's thread.
class LinkMessages {
 public:
  static constexpr size_t kSlots = 3;

  struct Shape {
    int64_t hidden = 0;
    int64_t max_batch_tokens = 0;
    WireType wire = WireType::kF32;  // on a device: f32
  };
  // The subject of a message.
  struct About {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    int64_t rows = 0;
  };
  // Room for one message.
  struct Slot {
    std::byte* message = nullptr;
    float* rows = nullptr;  // [max_batch_tokens, hidden]; with f32, behind the message's header
  };

  static size_t Bytes(const Shape& shape);
  // `backend` outlives it. kDevice: of a backend with staging. Errors: of allocation.
  static absl::StatusOr<std::unique_ptr<LinkMessages>> Create(Backend& backend, StagingPlace place,
                                                              const Shape& shape);

  const Slot& slot(size_t index) const { return slots_[index]; }
  size_t MessageBytes(int64_t rows) const { return WireBytes(shape_.wire, rows, shape_.hidden); }

  // Makes the slot's rows a message. In the host's memory: now, so the rows must be there. On a
  // device: in the order of ops; the slot's header must not be sealed again before that has run.
  // With `encoded`, in the host's memory: that writes the rows as they go over the wire.
  void Seal(size_t slot, const About& about, const EncodedRows& encoded);
  // Checks the message in the slot, which is there, and leaves its rows in slot().rows. DataLoss:
  // it is damaged, or about something else. On a device: the device's own errors, too.
  absl::Status Open(size_t slot, const About& expected);

 private:
  LinkMessages(Backend& backend, const Shape& shape, Buffer memory, Buffer headers);
  bool on_device() const { return headers_.data() != nullptr; }
  size_t Encoded(const About& about) const {
    return EncodedBytes(shape_.wire, about.rows, shape_.hidden);
  }
  Tensor RowsOf(size_t slot, const About& about) const {
    return DenseTensor(slots_[slot].rows, DType::kF32, about.rows, shape_.hidden);
  }

  Backend& backend_;
  const Shape shape_;
  const Buffer memory_;
  const Buffer headers_;  // [kSlots] for uploads from page-locked memory; none in the host's
  std::array<Slot, kSlots> slots_;
};

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
  // the layers ran over it; or, with `encoded` (kHost), as many rows as `hidden` has, which that
  // writes. Not on the last stage.
  absl::Status Send(uint64_t epoch, uint64_t iteration, Tensor hidden,
                    const EncodedRows& encoded = {});

 private:
  using Transfer = Communicator::Transfer;
  using About = LinkMessages::About;

  // One end of a way to a neighbour.
  struct Neighbour {
    std::shared_ptr<Communicator> communicator;  // null: there is none
    int rank = -1;                               // of the neighbour in it
  };
  // Transfers under way from or to a slot.
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

// The default: a single stage.
struct StagePipeline {
  int stage = 0;
  int stages = 1;
  WireType wire = WireType::kF32;
  // Activations go through the hosts: rank 0's communicator, in which stage s is rank s.
  std::unique_ptr<Communicator> communicator;
  // Or they stay on devices: `link` joins rank r of a stage (as rank 0, which sends) and rank r of
  // the next (as rank 1, which receives). Every stage makes the way to the previous stage first, so
  // that they come about one after the other, from the first stage on.
  RankJoiner link;
  std::shared_ptr<Rendezvous> rendezvous;  // of all ranks of all stages
  std::chrono::milliseconds timeout{0};    // of every wait, and of joining
};

// The link of one rank; null if it has none. `communicator` is the pipeline's, on rank 0. Called on
// each rank's thread, at the same time as on the others'. Errors: the joiner's, ActivationLink's.
absl::StatusOr<std::unique_ptr<ActivationLink>> JoinNeighbours(
    const StagePipeline& pipeline, std::unique_ptr<Communicator> communicator, int rank,
    Backend& backend, int64_t hidden, int64_t max_batch_tokens);

}  // namespace treadle
