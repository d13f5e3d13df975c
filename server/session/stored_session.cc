// The half of a session whose request is stored (--durable): what it waits for before it tells, and
// how it tells again what was stored.
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/status.h"
#include "server/session/session.h"

namespace treadle {
namespace {

// How long the session that has a request may take to let go of it, and how often that is looked
// at.
constexpr std::chrono::seconds kHandOver{5};
constexpr std::chrono::milliseconds kHandOverStep{10};

}  // namespace

void Session::TakeInStored(const std::shared_ptr<const ResumePoint>& point) {
  RequestStore::Holder holder;
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
    if (environment_.store == nullptr) {
      return Refuse(absl::FailedPreconditionError(
          "this server stores no requests: it was started without --durable"));
    }
    holder = Holder(point->id);
    from_token_ = point->from_token;
  }
  absl::StatusOr<RequestStore::Resumed> resumed = environment_.store->Claim(std::move(holder));
  if (absl::IsAborted(resumed.status())) {
    MutexLock lock(mutex_);
    if (Clock::now() >= arrival_ + kHandOver) return Refuse(resumed.status());
    again_ = point;
    environment_.courier.WakeAt(Clock::now() + kHandOverStep, shared_from_this());
    return;
  }
  if (!resumed.ok()) return Admit(resumed.status(), nullptr);
  const auto held = std::make_shared<RequestStore::Resumed>(*std::move(resumed));
  absl::StatusOr<GenerateRequest> request = point->read(held->request);
  if (request.ok()) {
    request->request_id = point->id;
    request->prompt = std::move(held->request.prompt);
    request->sampling.seed = held->request.seed;
    request->stopping.max_new_tokens = held->request.max_new_tokens;
  }
  TakeAdapter(std::move(request), held);
}

RequestStore::Holder Session::Holder(std::string id) {
  return {.id = std::move(id), .owner = origin_.owner, .cut_off = [session = weak_from_this()] {
            if (auto alive = session.lock()) alive->CutOff();
          }};
}

absl::StatusOr<bool> Session::Replay(const StreamBatch& answer, RequestSpec& spec) {
  const int64_t most = int64_t{spec_.candidates} * spec_.max_new_tokens;
  if (from_token_ < 0 || from_token_ > most) {
    return InvalidArgument("from_token is ", from_token_, ", expected 0 to ", most,
                           " (the most new tokens of the request)");
  }
  prompt_details_ = answer.prompt_detail;
  std::vector<EarlierOutput> earlier(reasons_.size());
  for (const StreamToken& token : answer.tokens) {
    if (token.candidate >= earlier.size() || token.token >= environment_.model.vocab) {
      return absl::DataLossError("what is stored of the answer is not of this request");
    }
    if (reasons_[token.candidate] != FinishReason::kNone) continue;  // beyond a stop string
    if (token.token >= 0) earlier[token.candidate].tokens.push_back(token.token);
    Absorb({token});
  }
  replayed_tokens_ = generation_->completion_tokens();
  for (size_t i = 0; i < earlier.size(); ++i) earlier[i].finish = reasons_[i];
  if (std::ranges::count(reasons_, FinishReason::kNone) == 0) {
    NoteEnd({absl::OkStatus(), answer.timings});
  } else if (!answer.tokens.empty()) {
    spec.earlier = std::move(earlier);
  }
  return !ended_.has_value();
}

// Another call resumes the request.
void Session::CutOff() {
  MutexLock lock(mutex_);
  const bool left = Leave(absl::AbortedError("another call has resumed the request"));
  if (left && phase_ == SessionPhase::kWritingLeft) BreakWrite();
  Advance();
}

// Notes that the last batch is written, and gives the stream's next one to be written.
StreamBatch Session::TakeStored() {
  if (stored_batch_) return *std::exchange(stored_batch_, std::nullopt);
  StreamBatch next = submitted_.stream->Take();
  next.prompt_detail.insert(next.prompt_detail.begin(),
                            std::make_move_iterator(batch_.prompt_detail.begin()),
                            std::make_move_iterator(batch_.prompt_detail.end()));
  batch_ = std::move(next);
  // Facts about the prompt wait for a token.
  if (batch_.tokens.empty() && !batch_.ended) return {};
  Become(SessionStep::kStore);
  stored_->Append(batch_, [session = weak_from_this()](const absl::Status& status) {
    if (auto alive = session.lock()) alive->NoteStored(status);
  });
  return {};
}

void Session::NoteStored(const absl::Status& status) {
  MutexLock lock(mutex_);
  Become(SessionStep::kStored);
  if (!status.ok()) environment_.pool.Cancel(submitted_.id, status);
  not_stored_.Update(status);
  StreamBatch batch = std::exchange(batch_, {});
  if (not_stored_.ok()) {
    stored_batch_ = std::move(batch);
  } else if (batch.ended) {
    batch.tokens.clear();
    batch.status = not_stored_;
    stored_batch_ = std::move(batch);
  }  // else the end, with the reason, may be in the stream already
  environment_.courier.Post(shared_from_this());
}

}  // namespace treadle
