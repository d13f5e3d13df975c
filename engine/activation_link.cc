#include "engine/activation_link.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "base/status.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {
namespace {

constexpr int kSender = 0;
constexpr int kReceiver = 1;

// The way from `stage` to the next one.
absl::StatusOr<std::unique_ptr<Communicator>> JoinLink(const StagePipeline& pipeline, int stage,
                                                       int rank, int end, Backend& backend) {
  RendezvousSection section(*pipeline.rendezvous, Str("stage ", stage, " rank ", rank));
  return pipeline.link({.backend = backend,
                        .rank = end,
                        .size = 2,
                        .rendezvous = section,
                        .timeout = pipeline.timeout});
}

constexpr uint16_t kMagic = 0x4c54;  // "TL"
constexpr size_t kAlignment = 64;

struct Header {
  uint16_t magic = kMagic;
  uint16_t wire = 0;
  uint32_t rows = 0;
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  uint64_t checksum = 0;  // of all that stands before it, and of rows that the host has
};
static_assert(sizeof(Header) == 32 && sizeof(Header) <= kAlignment);

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t RowBytes(const LinkMessages::Shape& shape) {
  return kAlignment + RoundUp(shape.max_batch_tokens * shape.hidden * sizeof(float));
}
// Bytes for messages that are not made in place.
size_t EncodedRoom(const LinkMessages::Shape& shape) {
  if (shape.wire == WireType::kF32) return 0;
  return kAlignment + RoundUp(EncodedBytes(shape.wire, shape.max_batch_tokens, shape.hidden));
}

std::string Describe(const Header& header) {
  const std::string wire =
      header.wire < std::size(kWireTypes) ? std::string(kWireTypes[header.wire].word) : "unknown";
  return Str("epoch ", header.epoch, ", iteration ", header.iteration, ", ", header.rows,
             " rows of ", wire);
}

Header HeaderOf(WireType wire, const LinkMessages::About& about) {
  return {.wire = static_cast<uint16_t>(wire),
          .rows = static_cast<uint32_t>(about.rows),
          .epoch = about.epoch,
          .iteration = about.iteration};
}

uint64_t ChecksumOf(const Header& header, const std::byte* rows, size_t bytes) {
  const uint64_t seed =
      Checksum(0, reinterpret_cast<const std::byte*>(&header), offsetof(Header, checksum));
  return Checksum(seed, rows, bytes);
}

absl::Status CheckHeader(const Header& found, uint64_t checksum, const Header& wanted) {
  if (found.magic != kMagic || found.checksum != checksum) {
    return absl::DataLossError(
        Str("a damaged message: checksum ", found.checksum, ", its contents have ", checksum));
  }
  if (found.wire != wanted.wire || found.rows != wanted.rows || found.epoch != wanted.epoch ||
      found.iteration != wanted.iteration) {
    return absl::DataLossError(Str("expected ", Describe(wanted), "; found ", Describe(found)));
  }
  return absl::OkStatus();
}

LinkMessages::Shape ShapeOf(const ActivationLink::Options& options) {
  return {
      .hidden = options.hidden, .max_batch_tokens = options.max_batch_tokens, .wire = options.wire};
}

}  // namespace

size_t WireBytes(WireType wire, int64_t rows, int64_t hidden) {
  return sizeof(Header) + EncodedBytes(wire, rows, hidden);
}

size_t LinkMessages::Bytes(const Shape& shape) {
  return kSlots * (RowBytes(shape) + EncodedRoom(shape));
}

LinkMessages::LinkMessages(Backend& backend, const Shape& shape, Buffer memory, Buffer headers)
    : backend_(backend), shape_(shape), memory_(std::move(memory)), headers_(std::move(headers)) {
  const size_t rows = RowBytes(shape);
  const size_t encoded = EncodedRoom(shape);
  for (size_t i = 0; i < kSlots; ++i) {
    std::byte* const begin = memory_.data() + i * (rows + encoded);
    slots_[i].rows = reinterpret_cast<float*>(begin + kAlignment);
    slots_[i].message = (encoded == 0 ? begin : begin + rows) + kAlignment - sizeof(Header);
  }
}

absl::StatusOr<std::unique_ptr<LinkMessages>> LinkMessages::Create(Backend& backend,
                                                                   StagingPlace place,
                                                                   const Shape& shape) {
  Staging* const staging = backend.staging(place);
  TREADLE_CHECK(place == StagingPlace::kHost || staging != nullptr);
  TREADLE_ASSIGN_OR_RETURN(Buffer memory, staging == nullptr ? backend.Allocate(Bytes(shape))
                                                             : staging->Allocate(Bytes(shape)));
  Buffer headers;
  if (place == StagingPlace::kDevice) {
    TREADLE_ASSIGN_OR_RETURN(
        headers, backend.staging(StagingPlace::kHost)->Allocate(kSlots * sizeof(Header)));
  }
  return std::unique_ptr<LinkMessages>(
      new LinkMessages(backend, shape, std::move(memory), std::move(headers)));
}

void LinkMessages::Seal(size_t slot, const About& about, const EncodedRows& encoded) {
  std::byte* const message = slots_[slot].message;
  Header header = HeaderOf(shape_.wire, about);
  if (on_device()) {
    header.checksum = ChecksumOf(header, nullptr, 0);
    std::byte* const staged = headers_.data() + slot * sizeof(Header);
    std::memcpy(staged, &header, sizeof(header));
    backend_.staging(StagingPlace::kHost)->Upload(message, staged, sizeof(header));
    return;
  }
  std::byte* const rows = message + sizeof(Header);
  if (encoded) {
    encoded(rows);
  } else if (shape_.wire != WireType::kF32) {
    EncodeRows(shape_.wire, RowsOf(slot, about), rows);
  }
  header.checksum = ChecksumOf(header, rows, Encoded(about));
  std::memcpy(message, &header, sizeof(header));
}

absl::Status LinkMessages::Open(size_t slot, const About& expected) {
  const std::byte* const message = slots_[slot].message;
  const Header wanted = HeaderOf(shape_.wire, expected);
  Header found;
  if (on_device()) {
    backend_.CopyToHost(&found, message, sizeof(found));
    TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
    return CheckHeader(found, ChecksumOf(found, nullptr, 0), wanted);
  }
  std::memcpy(&found, message, sizeof(found));
  const std::byte* const rows = message + sizeof(Header);
  TREADLE_RETURN_IF_ERROR(CheckHeader(found, ChecksumOf(found, rows, Encoded(expected)), wanted));
  if (shape_.wire != WireType::kF32) DecodeRows(shape_.wire, rows, RowsOf(slot, expected));
  return absl::OkStatus();
}

ActivationLink::ActivationLink(StagingPlace place, const Options& options,
                               std::unique_ptr<LinkMessages> messages, Neighbour previous,
                               Neighbour next)
    : place_(place),
      options_(options),
      messages_(std::move(messages)),
      previous_(std::move(previous)),
      next_(std::move(next)) {}

absl::Status ActivationLink::Fail(absl::Status status) {
  if (error_.ok()) error_ = std::move(status);
  return error_;
}

void ActivationLink::Abort(const absl::Status& why) {
  if (previous_.communicator) previous_.communicator->Abort(why);
  if (next_.communicator) next_.communicator->Abort(why);
}

absl::Status ActivationLink::CheckRows(int64_t rows) const {
  if (rows >= 0 && rows <= options_.max_batch_tokens) return absl::OkStatus();
  return InvalidArgument("an iteration of ", rows, " rows: expected 0 to ",
                         options_.max_batch_tokens);
}

absl::Status ActivationLink::FinishSend(size_t slot) {
  std::optional<Transfer>& send = transfers_[slot].send;
  if (!send) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(next_.communicator->Wait(*send));
  send.reset();
  return absl::OkStatus();
}

// A message's slot was that of the third message before it, which is valid until the call of
// Receive for the message in between.
absl::Status ActivationLink::PostAnnounced() {
  while (posted_ - received_ < announced_.size() && posted_ <= received_) {
    const size_t slot = SlotOf(posted_);
    TREADLE_RETURN_IF_ERROR(FinishSend(slot));
    const int64_t rows = announced_[posted_ - received_].rows;
    TREADLE_ASSIGN_OR_RETURN(
        transfers_[slot].receive,
        previous_.communicator->Recv(messages_->slot(slot).message, messages_->MessageBytes(rows),
                                     previous_.rank));
    ++posted_;
  }
  return absl::OkStatus();
}

absl::Status ActivationLink::Announce(uint64_t epoch, uint64_t iteration, int64_t rows) {
  if (!error_.ok()) return error_;
  if (!previous_.communicator) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckRows(rows));
  if (last_announced_ && last_announced_->epoch == epoch &&
      iteration <= last_announced_->iteration) {
    return absl::OkStatus();
  }
  last_announced_ = About{epoch, iteration, rows};
  announced_.push_back(*last_announced_);
  const absl::Status posted = PostAnnounced();
  return posted.ok() ? posted : Fail(posted);
}

absl::StatusOr<Tensor> ActivationLink::Receive(uint64_t epoch, uint64_t iteration, int64_t rows) {
  if (!error_.ok()) return error_;
  TREADLE_RETURN_IF_ERROR(CheckRows(rows));
  TREADLE_RETURN_IF_ERROR(Announce(epoch, iteration, rows));
  const size_t slot = SlotOf(received_);
  absl::Status status;
  if (!previous_.communicator) {
    status = FinishSend(slot);
    ++received_;
  } else {
    const About expected = announced_.front();
    TREADLE_CHECK(expected.epoch == epoch && expected.iteration == iteration &&
                  expected.rows == rows);
    status = PostAnnounced();
    announced_.pop_front();
    ++received_;
    if (status.ok()) status = PostAnnounced();  // the next one, before this one is waited for
    if (status.ok()) status = Take(slot, expected);
  }
  if (!status.ok()) return Fail(status);
  return DenseTensor(messages_->slot(slot).rows, DType::kF32, rows, options_.hidden);
}

absl::Status ActivationLink::Take(size_t slot, const About& expected) {
  TREADLE_RETURN_IF_ERROR(previous_.communicator->Wait(*transfers_[slot].receive));
  transfers_[slot].receive.reset();
  const absl::Status opened = messages_->Open(slot, expected);
  if (opened.ok()) return opened;
  return {opened.code(), Str("activations of the previous stage: ", std::string(opened.message()))};
}

absl::Status ActivationLink::Send(uint64_t epoch, uint64_t iteration, Tensor hidden,
                                  const EncodedRows& encoded) {
  if (!error_.ok()) return error_;
  TREADLE_CHECK(next_.communicator != nullptr && received_ > 0);
  const size_t last = SlotOf(received_ - 1);
  const size_t slot =
      hidden.data == messages_->slot(last).rows || received_ == 1 ? last : SlotOf(received_ - 2);
  TREADLE_CHECK(hidden.data == messages_->slot(slot).rows && hidden.stride == options_.hidden);
  TREADLE_CHECK(!transfers_[slot].send);
  messages_->Seal(slot, {.epoch = epoch, .iteration = iteration, .rows = hidden.rows}, encoded);
  const absl::StatusOr<Transfer> sent = next_.communicator->Send(
      messages_->slot(slot).message, messages_->MessageBytes(hidden.rows), next_.rank);
  if (!sent.ok()) return Fail(sent.status());
  transfers_[slot].send = *sent;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ActivationLink>> ActivationLink::Make(Backend& backend,
                                                                     StagingPlace place,
                                                                     const Options& options,
                                                                     Neighbour previous,
                                                                     Neighbour next) {
  if (options.hidden < 1 || options.max_batch_tokens < 1) {
    return InvalidArgument("activations of ", options.max_batch_tokens, " x ", options.hidden,
                           ": expected at least one row and one column");
  }
  for (Neighbour* const neighbour : {&previous, &next}) {
    if (neighbour->rank < 0) neighbour->communicator = nullptr;
    const Communicator* const communicator = neighbour->communicator.get();
    TREADLE_CHECK((communicator == nullptr) == (neighbour->rank < 0));
    if (communicator == nullptr) continue;
    TREADLE_CHECK(neighbour->rank < communicator->size() &&
                  neighbour->rank != communicator->rank());
  }
  TREADLE_ASSIGN_OR_RETURN(auto messages, LinkMessages::Create(backend, place, ShapeOf(options)));
  return std::unique_ptr<ActivationLink>(new ActivationLink(place, options, std::move(messages),
                                                            std::move(previous), std::move(next)));
}

size_t ActivationLink::BufferBytes(const Options& options) {
  return LinkMessages::Bytes(ShapeOf(options));
}

absl::StatusOr<std::unique_ptr<ActivationLink>> ActivationLink::Create(
    Backend& backend, std::unique_ptr<Communicator> pipeline, const Options& options) {
  const std::shared_ptr<Communicator> shared = std::move(pipeline);
  return Make(backend, StagingPlace::kHost, options, {shared, options.previous},
              {shared, options.next});
}

absl::StatusOr<std::unique_ptr<ActivationLink>> ActivationLink::CreateOnDevice(
    Backend& backend, std::unique_ptr<Communicator> previous, std::unique_ptr<Communicator> next,
    const Options& options) {
  if (options.wire != WireType::kF32) {
    return InvalidArgument("rows that stay on devices are sent as f32, not as ",
                           Name(options.wire));
  }
  return Make(backend, StagingPlace::kDevice, options, {std::move(previous), options.previous},
              {std::move(next), options.next});
}

absl::StatusOr<std::unique_ptr<ActivationLink>> JoinNeighbours(
    const StagePipeline& pipeline, std::unique_ptr<Communicator> communicator, int rank,
    Backend& backend, int64_t hidden, int64_t max_batch_tokens) {
  const bool first = pipeline.stage == 0;
  const bool last = pipeline.stage + 1 == pipeline.stages;
  ActivationLink::Options options{
      .hidden = hidden, .max_batch_tokens = max_batch_tokens, .wire = pipeline.wire};
  if (!pipeline.link) {
    if (communicator == nullptr) return nullptr;  // one stage, or not rank 0
    if (!first) options.previous = pipeline.stage - 1;
    if (!last) options.next = pipeline.stage + 1;
    return ActivationLink::Create(backend, std::move(communicator), options);
  }
  std::unique_ptr<Communicator> previous;
  std::unique_ptr<Communicator> next;
  if (!first) {
    TREADLE_ASSIGN_OR_RETURN(previous,
                             JoinLink(pipeline, pipeline.stage - 1, rank, kReceiver, backend));
    options.previous = kSender;
  }
  if (!last) {
    auto joined = JoinLink(pipeline, pipeline.stage, rank, kSender, backend);
    if (!joined.ok()) {
      if (previous) previous->Abort(joined.status());  // an end in order would wait for its peer
      return joined.status();
    }
    next = *std::move(joined);
    options.next = kReceiver;
  }
  return ActivationLink::CreateOnDevice(backend, std::move(previous), std::move(next), options);
}

}  // namespace treadle
