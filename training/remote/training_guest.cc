#include "training/remote/training_guest.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/memory.h"
#include "base/status.h"
#include "base/sync.h"
#include "base/version.h"
#include "engine/remote/control.pb.h"
#include "training/remote/float_bytes.h"
#include "training/remote/stage_trainer.h"

namespace treadle {
namespace {

using control::TrainAnswer;
using control::TrainHello;
using control::TrainRequest;

constexpr size_t kMaxClients = 16;
constexpr size_t kMaxWaiting = 2;  // requests of a client: a step, and a call

// A client's stream, and what it has here: the numbers of its step, and the batch that went forward
// last. Thread safety: Queue and End from any thread, Slice from the rank's.
class Session {
 public:
  explicit Session(std::shared_ptr<Stream<TrainAnswer>> stream) : stream(std::move(stream)) {}

  const std::shared_ptr<Stream<TrainAnswer>> stream;

  // The part of the model that a client trains, once it was let in.
  struct Place {
    LayerRange layers;
    LoraOptions lora;
    int64_t max_sequences = 0, max_length = 0;
  };
  // Once, before anything is queued.
  void SetPlace(const Place& place) { place_ = place; }

  // Queues a request; null: the first, which makes room. True: slices are to begin.
  absl::StatusOr<bool> Queue(std::optional<TrainRequest>&& request) {
    MutexLock lock(mutex_);
    if (requests_.size() >= kMaxWaiting) {
      return absl::FailedPreconditionError("a client waits for the answer to its last call");
    }
    requests_.push_back(std::move(request));
    return !std::exchange(running_, true);
  }
  void End() {
    MutexLock lock(mutex_);
    ended_ = true;
  }

  // Runs a slice of what is queued; false if nothing is left.
  bool Slice(StageTrainer& trainer);

 private:
  // Takes the next request, if none is being run; false if there is none.
  bool Take();
  // Runs a part of it, and clears it once it is done.
  absl::Status Run(StageTrainer& trainer);
  absl::Status MakeRoom(StageTrainer& trainer);
  absl::Status RunForward(StageTrainer& trainer, const control::TrainForward& forward);
  absl::Status RunBackward(StageTrainer& trainer, const std::string& gradient);
  absl::Status CheckLengths(const control::TrainForward& forward) const;
  // The next slice of a layer, whose updates are attached.
  FrozenLayers::Slice NextSlice(FrozenLayers& layers);
  template <typename Fill>
  void Answer(const Fill& fill) {
    stream->Tell(fill);
    running_request_ = false;
  }

  Place place_;  // constant once set

  Mutex mutex_;
  std::deque<std::optional<TrainRequest>> requests_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;  // slices are with the ranks
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;

  // The rank's thread's.
  bool running_request_ = false;
  std::optional<TrainRequest> request_;
  int64_t next_ = -1;     // layer; -1: the request has not begun
  size_t sequence_ = 0;   // of the batch, that is next in the layer
  bool forward_ = false;  // pass_ has gone forward, and not back
  std::unique_ptr<TrainedAdapter> adapter_;
  FrozenLayers::Pass pass_;
};

bool Session::Take() {
  MutexLock lock(mutex_);
  if (ended_ || (!running_request_ && requests_.empty())) {
    running_ = false;
    return false;
  }
  if (running_request_) return true;
  running_request_ = true;
  request_ = std::move(requests_.front());
  requests_.pop_front();
  next_ = -1;
  return true;
}

bool Session::Slice(StageTrainer& trainer) {
  if (!Take()) return false;
  const absl::Status status = Run(trainer);
  if (!running_request_) request_.reset();
  if (status.ok()) return true;
  End();
  stream->Close(status);
  return false;
}

absl::Status Session::Run(StageTrainer& trainer) {
  if (!request_) return MakeRoom(trainer);
  switch (request_->kind_case()) {
    case TrainRequest::kStep:
      TREADLE_RETURN_IF_ERROR(
          FromBytes(request_->step(), "numbers of updates", adapter_->values()));
      adapter_->Refresh();
      std::ranges::fill(adapter_->gradients(), 0.0f);
      running_request_ = false;
      return absl::OkStatus();
    case TrainRequest::kForward:
      return RunForward(trainer, request_->forward());
    case TrainRequest::kBackward:
      return RunBackward(trainer, request_->backward());
    case TrainRequest::kCollect:
      Answer([&](TrainAnswer& answer) { answer.set_gradients(ToBytes(adapter_->gradients())); });
      return absl::OkStatus();
    default:
      return InvalidArgument("a client's call of no kind that this worker knows");
  }
}

// The memory that this client takes: its batch's states and its updates, and, where no other has
// made as much room, activations with their gradients.
absl::Status Session::MakeRoom(StageTrainer& trainer) {
  const ModelConfig& config = trainer.model().config();
  const FrozenLayers::Room room = FrozenLayers::Room::ForSlices(place_.max_length);
  const int64_t tokens = place_.max_sequences * place_.max_length;
  const int64_t layers = place_.layers.end - place_.layers.begin;
  const int64_t widths = 5 * config.hidden +
                         2 * (config.heads + config.kv_heads) * config.head_dim +
                         2 * config.ffn_hidden;
  const auto bytes =
      static_cast<uint64_t>(4 * (tokens * (layers + 2) * config.hidden + 2 * room.tokens * widths) +
                            16 * layers * place_.lora.rank * widths);
  if (const uint64_t available = AvailableMemory().bytes; bytes > available) {
    return ResourceExhausted("the client's batches of ", tokens, " tokens need ", bytes >> 20,
                             " MiB, this worker can have ", available >> 20, " MiB");
  }
  TREADLE_RETURN_IF_ERROR(trainer.Fit(room));
  adapter_ = TrainedAdapter::Create(config, place_.layers, place_.lora, 0);
  Answer([&](TrainAnswer& answer) {
    answer.mutable_stage()->set_first_layer(place_.layers.begin);
    answer.mutable_stage()->set_end_layer(place_.layers.end);
  });
  return absl::OkStatus();
}

absl::Status Session::CheckLengths(const control::TrainForward& forward) const {
  if (forward.lengths_size() < 1 || forward.lengths_size() > place_.max_sequences) {
    return InvalidArgument("a batch of ", forward.lengths_size(), " sequences, expected 1 to ",
                           place_.max_sequences);
  }
  for (const int32_t length : forward.lengths()) {
    if (length >= 1 && length <= place_.max_length) continue;
    return InvalidArgument("a sequence of ", length, " tokens, expected 1 to ", place_.max_length);
  }
  return absl::OkStatus();
}

FrozenLayers::Slice Session::NextSlice(FrozenLayers& layers) {
  layers.tape().DetachAll();
  adapter_->Attach(layers.model(), {next_, next_ + 1}, layers.tape());
  const FrozenLayers::Slice slice = pass_.SliceFrom(sequence_);
  sequence_ = slice.end;
  return slice;
}

absl::Status Session::RunForward(StageTrainer& trainer, const control::TrainForward& forward) {
  const auto [begin, end] = place_.layers;
  FrozenLayers& layers = trainer.layers();
  if (next_ < 0) {
    TREADLE_RETURN_IF_ERROR(CheckLengths(forward));
    layers.Begin(place_.layers, std::vector(forward.lengths().begin(), forward.lengths().end()),
                 pass_);
    TREADLE_RETURN_IF_ERROR(FromBytes(forward.hidden(), "hidden states", pass_.State(begin)));
    next_ = begin;
  }
  TREADLE_RETURN_IF_ERROR(layers.Forward(next_, NextSlice(layers), pass_));
  if (sequence_ < pass_.lengths.size()) return absl::OkStatus();
  sequence_ = 0;
  if (++next_ < end) return absl::OkStatus();
  forward_ = true;
  Answer([&, end = end](TrainAnswer& answer) { answer.set_hidden(ToBytes(pass_.State(end))); });
  return absl::OkStatus();
}

absl::Status Session::RunBackward(StageTrainer& trainer, const std::string& gradient) {
  const auto [begin, end] = place_.layers;
  FrozenLayers& layers = trainer.layers();
  if (next_ < 0) {
    if (!std::exchange(forward_, false)) {
      return absl::FailedPreconditionError("a client goes back over a batch that went forward");
    }
    TREADLE_RETURN_IF_ERROR(FromBytes(gradient, "a gradient", pass_.gradient));
    next_ = end - 1;
  }
  TREADLE_RETURN_IF_ERROR(layers.Backward(next_, NextSlice(layers), pass_));
  if (sequence_ < pass_.lengths.size()) return absl::OkStatus();
  sequence_ = 0;
  if (next_-- > begin) return absl::OkStatus();
  Answer([&](TrainAnswer& answer) { answer.set_hidden(ToBytes(pass_.gradient)); });
  return absl::OkStatus();
}

class TrainingGuest final : public StageGuest {
 public:
  TrainingGuest(StageLender& lender, std::function<void(std::string)> log)
      : lender_(lender), log_(std::move(log)) {}

  StreamEvents<TrainRequest> Accept(std::shared_ptr<Stream<TrainAnswer>> stream) override {
    const auto session = std::make_shared<Session>(std::move(stream));
    return {.message = [this, session](TrainRequest& request) { OnMessage(session, request); },
            .closed = [this, session](const absl::Status&) { OnClosed(session); }};
  }
  void OnStageGone() override;
  void OnPulse() override {
    MutexLock lock(mutex_);
    for (const auto& session : greeted_) {
      session->stream->Tell([](TrainAnswer& answer) { answer.set_working(true); });
    }
  }

 private:
  using SessionPointer = std::shared_ptr<Session>;

  void OnMessage(const SessionPointer& session, TrainRequest& request);
  void OnHello(const SessionPointer& session, const TrainHello& hello);
  void OnClosed(const SessionPointer& session);
  // On the task thread.
  absl::Status LetIn(const SessionPointer& session, const TrainHello& hello,
                     absl::StatusOr<LentStage> stage);
  // Queues a request, and gives the session to the ranks unless they have it.
  absl::Status Queue(const SessionPointer& session, std::optional<TrainRequest>&& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  StageLender& lender_;
  const std::function<void(std::string)> log_;

  Mutex mutex_;
  StageRanks* ranks_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the stage that clients train on
  std::shared_ptr<StageTrainer> trainer_ ABSL_GUARDED_BY(mutex_);  // of ranks_
  std::set<SessionPointer> greeted_ ABSL_GUARDED_BY(mutex_);       // clients that said hello
  // Clients that want layers, and whether they have them and may call.
  std::map<SessionPointer, bool> members_ ABSL_GUARDED_BY(mutex_);
};

void TrainingGuest::OnMessage(const SessionPointer& session, TrainRequest& request) {
  if (request.has_hello()) return OnHello(session, request.hello());
  MutexLock lock(mutex_);
  const absl::Status status = Queue(session, std::move(request));
  if (!status.ok()) session->stream->Close(status);
}

void TrainingGuest::OnHello(const SessionPointer& session, const TrainHello& hello) {
  const bool asks = hello.end_layer() == 0;
  bool alone = false;
  absl::Status refused;
  if (hello.protocol() != kControlProtocol || hello.version() != kVersion) {
    return session->stream->Close(absl::FailedPreconditionError(Str(
        "this worker is version ", kVersion, " (protocol ", kControlProtocol, "), the client is ",
        std::string(hello.version()), " (protocol ", hello.protocol(), ")")));
  }
  {
    MutexLock lock(mutex_);
    if (members_.contains(session) || (asks && greeted_.contains(session))) {
      refused = absl::FailedPreconditionError("a client says hello once");
    } else if (members_.size() >= kMaxClients) {
      refused = ResourceExhausted("the worker trains for ", members_.size(), " clients already");
    } else {
      alone = members_.empty();
      greeted_.insert(session);
      if (!asks) members_[session] = false;
    }
  }
  if (!refused.ok()) return session->stream->Close(refused);
  lender_.Lend(StageFor(hello), alone, [this, session, hello](absl::StatusOr<LentStage> stage) {
    const absl::Status status = LetIn(session, hello, std::move(stage));
    if (!status.ok()) session->stream->Close(status);
  });
}

absl::Status TrainingGuest::LetIn(const SessionPointer& session, const TrainHello& hello,
                                  absl::StatusOr<LentStage> stage) {
  TREADLE_RETURN_IF_ERROR(stage.status());
  if (hello.end_layer() == 0) {
    bool free = stage->ranks == nullptr;
    {
      MutexLock lock(mutex_);
      free |= stage->for_guest && members_.empty();
    }
    session->stream->Tell([&](TrainAnswer& answer) {
      control::TrainStage& has = *answer.mutable_stage();
      if (free) return;
      has.set_first_layer(stage->configuration.first_layer());
      has.set_end_layer(stage->configuration.end_layer());
    });
    return absl::OkStatus();
  }
  TREADLE_RETURN_IF_ERROR(CheckClient(*stage, hello));
  session->SetPlace(
      {.layers = {hello.first_layer(), hello.end_layer()},
       .lora = {.rank = hello.rank(), .alpha = hello.alpha(), .targets = hello.targets()},
       .max_sequences = hello.max_sequences(),
       .max_length = hello.max_length()});
  log_(Str("trains layers ", hello.first_layer(), " to ", hello.end_layer(), " for a client"));
  {
    MutexLock lock(mutex_);
    const auto member = members_.find(session);
    if (member == members_.end()) return absl::CancelledError("the client is gone");
    member->second = true;
    ranks_ = stage->ranks;
    if (trainer_ == nullptr) {
      trainer_ = std::make_shared<StageTrainer>(static_cast<const Decoder&>(stage->ranks->model()),
                                                stage->options);
    }
    return Queue(session, std::nullopt);  // before any call of the client's
  }
}

absl::Status TrainingGuest::Queue(const SessionPointer& session,
                                  std::optional<TrainRequest>&& request) {
  const auto member = members_.find(session);
  if (member == members_.end() || !member->second) {
    return absl::FailedPreconditionError("a client says hello first, and waits for the answer");
  }
  TREADLE_ASSIGN_OR_RETURN(const bool begin, session->Queue(std::move(request)));
  if (begin) {
    ranks_->AddBackground([session, trainer = trainer_] { return session->Slice(*trainer); });
  }
  return absl::OkStatus();
}

void TrainingGuest::OnStageGone() {
  MutexLock lock(mutex_);
  ranks_ = nullptr;
  trainer_.reset();
  std::erase_if(members_, [](const auto& member) {
    const auto& [session, placed] = member;
    if (!placed) return false;  // it gets the next stage
    session->End();
    session->stream->Close(absl::UnavailableError("the worker has given its stage away"));
    return true;
  });
}

void TrainingGuest::OnClosed(const SessionPointer& session) {
  session->End();
  MutexLock lock(mutex_);
  greeted_.erase(session);
  if (members_.erase(session) > 0) log_("a client that trained is gone");
}

}  // namespace

std::unique_ptr<StageGuest> CreateTrainingGuest(StageLender& lender,
                                                std::function<void(std::string)> log) {
  if (!log) log = [](const std::string&) {};
  return std::make_unique<TrainingGuest>(lender, std::move(log));
}

}  // namespace treadle
