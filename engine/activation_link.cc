#include "engine/activation_link.h"

#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/wire_codec.h"
#include "kernels/status.h"

namespace treadle {
namespace {

using Transfer = Communicator::Transfer;

constexpr uint16_t kMagic = 0x4c54;  // "TL"
constexpr size_t kAlignment = 64;

struct Header {
  uint16_t magic = kMagic;
  uint16_t wire = 0;
  uint32_t rows = 0;
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  uint64_t checksum = 0;  // of all that stands before it, and of the rows
};
static_assert(sizeof(Header) == 32 && sizeof(Header) <= kAlignment);

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::string Describe(const Header& header) {
  const std::string wire =
      header.wire < std::size(kWireNames) ? std::string(kWireNames[header.wire]) : "unknown";
  return Str("epoch ", header.epoch, ", iteration ", header.iteration, ", ", header.rows,
             " rows of ", wire);
}

uint64_t ChecksumOf(const Header& header, const std::byte* rows, size_t bytes) {
  const uint64_t seed =
      WireChecksum(0, reinterpret_cast<const std::byte*>(&header), offsetof(Header, checksum));
  return WireChecksum(seed, rows, bytes);
}

// Where one iteration's activations live from Receive to the end of Send.
struct Slot {
  std::byte* message = nullptr;  // header and encoded rows
  float* rows = nullptr;         // [max_batch_tokens, hidden]; with f32, behind the header
  std::optional<Transfer> receive;
  std::optional<Transfer> send;
};

struct Announcement {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  int64_t rows = 0;
};

class Link final : public ActivationLink {
 public:
  Link(std::unique_ptr<Communicator> pipeline, const Options& options, Buffer memory)
      : options_(options), memory_(std::move(memory)), pipeline_(std::move(pipeline)) {
    const size_t activations = ActivationBytes(options);
    const size_t messages = MessageBytes(options);
    for (size_t i = 0; i < kSlots; ++i) {
      std::byte* const begin = memory_.data() + i * (activations + messages);
      slots_[i].rows = reinterpret_cast<float*>(begin + kAlignment);
      slots_[i].message = (messages == 0 ? begin : begin + activations) + kAlignment - kHeaderBytes;
    }
  }

  static size_t TotalBytes(const Options& options) {
    return kSlots * (ActivationBytes(options) + MessageBytes(options));
  }

  absl::Status Announce(uint64_t epoch, uint64_t iteration, int64_t rows) override;
  absl::StatusOr<Tensor> Receive(uint64_t epoch, uint64_t iteration, int64_t rows) override;
  absl::Status Send(uint64_t epoch, uint64_t iteration, Tensor hidden) override;
  void Abort(absl::Status why) override { pipeline_->Abort(std::move(why)); }

  static constexpr size_t kHeaderBytes = sizeof(Header);

 private:
  static constexpr size_t kSlots = 3;

  static size_t ActivationBytes(const Options& options) {
    return kAlignment + RoundUp(options.max_batch_tokens * options.hidden * sizeof(float));
  }
  static size_t MessageBytes(const Options& options) {
    if (options.wire == WireType::kF32) return 0;
    return kAlignment +
           RoundUp(EncodedBytes(options.wire, options.max_batch_tokens, options.hidden));
  }

  Slot& SlotOf(uint64_t message) { return slots_[message % kSlots]; }
  absl::Status CheckRows(int64_t rows) const;
  absl::Status FinishSend(Slot& slot);
  absl::Status PostAnnounced();
  absl::Status Take(Slot& slot, const Announcement& expected);
  absl::Status Fail(absl::Status status) {
    if (error_.ok()) error_ = std::move(status);
    return error_;
  }

  const Options options_;
  const Buffer memory_;
  const std::unique_ptr<Communicator> pipeline_;  // behind memory_: it goes first

  absl::Status error_;
  std::array<Slot, kSlots> slots_;
  std::deque<Announcement> announced_;  // not yet received; the first `posted_ - received_` posted
  std::optional<Announcement> last_announced_;
  uint64_t posted_ = 0;  // receives so far
  uint64_t received_ =
      0;  // calls of Receive so far: what it returned lies in SlotOf(received_ - 1)
};

absl::Status Link::CheckRows(int64_t rows) const {
  if (rows >= 1 && rows <= options_.max_batch_tokens) return absl::OkStatus();
  return InvalidArgument("an iteration of ", rows, " rows: expected 1 to ",
                         options_.max_batch_tokens);
}

absl::Status Link::FinishSend(Slot& slot) {
  if (!slot.send) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(pipeline_->Wait(*slot.send));
  slot.send.reset();
  return absl::OkStatus();
}

// A message's slot was that of the third message before it, which is valid until the call of
// Receive for the message in between.
absl::Status Link::PostAnnounced() {
  while (posted_ - received_ < announced_.size() && posted_ <= received_) {
    Slot& slot = SlotOf(posted_);
    TREADLE_RETURN_IF_ERROR(FinishSend(slot));
    const Announcement& next = announced_[posted_ - received_];
    TREADLE_ASSIGN_OR_RETURN(
        slot.receive,
        pipeline_->Recv(slot.message, WireBytes(options_.wire, next.rows, options_.hidden),
                        options_.previous));
    ++posted_;
  }
  return absl::OkStatus();
}

absl::Status Link::Announce(uint64_t epoch, uint64_t iteration, int64_t rows) {
  if (!error_.ok()) return error_;
  if (options_.previous < 0) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckRows(rows));
  if (last_announced_ && last_announced_->epoch == epoch &&
      iteration <= last_announced_->iteration) {
    return absl::OkStatus();
  }
  last_announced_ = Announcement{epoch, iteration, rows};
  announced_.push_back(*last_announced_);
  const absl::Status posted = PostAnnounced();
  return posted.ok() ? posted : Fail(posted);
}

absl::StatusOr<Tensor> Link::Receive(uint64_t epoch, uint64_t iteration, int64_t rows) {
  if (!error_.ok()) return error_;
  TREADLE_RETURN_IF_ERROR(CheckRows(rows));
  TREADLE_RETURN_IF_ERROR(Announce(epoch, iteration, rows));
  Slot& slot = SlotOf(received_);
  absl::Status status;
  if (options_.previous < 0) {
    status = FinishSend(slot);
    ++received_;
  } else {
    const Announcement expected = announced_.front();
    TREADLE_CHECK(expected.epoch == epoch && expected.iteration == iteration &&
                  expected.rows == rows);
    status = PostAnnounced();
    announced_.pop_front();
    ++received_;
    if (status.ok()) status = PostAnnounced();  // the next one, before this one is waited for
    if (status.ok()) status = Take(slot, expected);
  }
  if (!status.ok()) return Fail(status);
  return DenseTensor(slot.rows, DType::kF32, rows, options_.hidden);
}

absl::Status Link::Take(Slot& slot, const Announcement& expected) {
  TREADLE_RETURN_IF_ERROR(pipeline_->Wait(*slot.receive));
  slot.receive.reset();
  Header found;
  std::memcpy(&found, slot.message, kHeaderBytes);
  const std::byte* const rows = slot.message + kHeaderBytes;
  const uint64_t checksum =
      ChecksumOf(found, rows, EncodedBytes(options_.wire, expected.rows, options_.hidden));
  const std::string from = Str("activations from stage rank ", options_.previous, ": ");
  if (found.magic != kMagic || found.checksum != checksum) {
    return absl::DataLossError(Str(from, "a damaged message: checksum ", found.checksum,
                                   ", its contents have ", checksum));
  }
  const Header wanted{kMagic, static_cast<uint16_t>(options_.wire),
                      static_cast<uint32_t>(expected.rows), expected.epoch, expected.iteration};
  if (found.wire != wanted.wire || found.rows != wanted.rows || found.epoch != wanted.epoch ||
      found.iteration != wanted.iteration) {
    return absl::DataLossError(
        Str(from, "expected ", Describe(wanted), "; found ", Describe(found)));
  }
  if (options_.wire != WireType::kF32) {
    DecodeRows(options_.wire, rows,
               DenseTensor(slot.rows, DType::kF32, expected.rows, options_.hidden));
  }
  return absl::OkStatus();
}

absl::Status Link::Send(uint64_t epoch, uint64_t iteration, Tensor hidden) {
  if (!error_.ok()) return error_;
  TREADLE_CHECK(options_.next >= 0 && received_ > 0);
  Slot& last = SlotOf(received_ - 1);
  Slot& slot = hidden.data == last.rows || received_ == 1 ? last : SlotOf(received_ - 2);
  TREADLE_CHECK(hidden.data == slot.rows && hidden.stride == options_.hidden);
  TREADLE_CHECK(!slot.send);
  std::byte* const rows = slot.message + kHeaderBytes;
  if (options_.wire != WireType::kF32) EncodeRows(options_.wire, hidden, rows);
  Header header{kMagic, static_cast<uint16_t>(options_.wire), static_cast<uint32_t>(hidden.rows),
                epoch, iteration};
  header.checksum =
      ChecksumOf(header, rows, EncodedBytes(options_.wire, hidden.rows, options_.hidden));
  std::memcpy(slot.message, &header, kHeaderBytes);
  const absl::StatusOr<Transfer> sent = pipeline_->Send(
      slot.message, WireBytes(options_.wire, hidden.rows, options_.hidden), options_.next);
  if (!sent.ok()) return Fail(sent.status());
  slot.send = *sent;
  return absl::OkStatus();
}

}  // namespace

size_t WireBytes(WireType wire, int64_t rows, int64_t hidden) {
  return Link::kHeaderBytes + EncodedBytes(wire, rows, hidden);
}

size_t ActivationLink::BufferBytes(const Options& options) { return Link::TotalBytes(options); }

absl::StatusOr<std::unique_ptr<ActivationLink>> ActivationLink::Create(
    Backend& backend, std::unique_ptr<Communicator> pipeline, const Options& options) {
  if (options.hidden < 1 || options.max_batch_tokens < 1) {
    return InvalidArgument("activations of ", options.max_batch_tokens, " x ", options.hidden,
                           ": expected at least one row and one column");
  }
  for (const int peer : {options.previous, options.next}) {
    TREADLE_CHECK(peer < pipeline->size() && peer != pipeline->rank());
  }
  HostStaging* const staging = backend.staging();
  const size_t bytes = Link::TotalBytes(options);
  TREADLE_ASSIGN_OR_RETURN(Buffer memory,
                           staging == nullptr ? backend.Allocate(bytes) : staging->Allocate(bytes));
  return std::make_unique<Link>(std::move(pipeline), options, std::move(memory));
}

}  // namespace treadle
