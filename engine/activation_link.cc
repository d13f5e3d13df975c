#include "engine/activation_link.h"

#include <string>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

LinkMessages::Shape ShapeOf(const ActivationLink::Options& options) {
  return {
      .hidden = options.hidden, .max_batch_tokens = options.max_batch_tokens, .wire = options.wire};
}

}  // namespace

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
  if (rows >= 1 && rows <= options_.max_batch_tokens) return absl::OkStatus();
  return InvalidArgument("an iteration of ", rows, " rows: expected 1 to ",
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

absl::Status ActivationLink::Send(uint64_t epoch, uint64_t iteration, Tensor hidden) {
  if (!error_.ok()) return error_;
  TREADLE_CHECK(next_.communicator != nullptr && received_ > 0);
  const size_t last = SlotOf(received_ - 1);
  const size_t slot =
      hidden.data == messages_->slot(last).rows || received_ == 1 ? last : SlotOf(received_ - 2);
  TREADLE_CHECK(hidden.data == messages_->slot(slot).rows && hidden.stride == options_.hidden);
  TREADLE_CHECK(!transfers_[slot].send);
  messages_->Seal(slot, {.epoch = epoch, .iteration = iteration, .rows = hidden.rows});
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

}  // namespace treadle
