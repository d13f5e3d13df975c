#include "training/remote/remote_layers.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "base/version.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_boxes.h"
#include "training/remote/float_bytes.h"

namespace treadle {
namespace {

using control::TrainAnswer;
using control::TrainRequest;
using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetry{200};
// Until a worker knows of clients that have gone, whose layers it need not keep.
constexpr std::chrono::milliseconds kLeaving{2'000};

// Whether the worker may be back later: what gRPC says of a connection that breaks.
bool IsLoss(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kAborted:
      return true;
    default:
      return false;
  }
}

// A Train stream whose answers are waited for.
class TrainCall {
 public:
  TrainCall(const std::string& address, const ControlCredentials& credentials) {
    stream_ = OpenTrain(address,
                        {.message =
                             [state = state_](TrainAnswer& answer) {
                               MutexLock lock(state->mutex);
                               ++state->heard;
                               if (!answer.has_working()) state->answer = std::move(answer);
                               state->changed.NotifyAll();
                             },
                         .closed =
                             [state = state_](const absl::Status& status) {
                               MutexLock lock(state->mutex);
                               state->closed = status;
                               state->changed.NotifyAll();
                             }},
                        credentials);
  }
  ~TrainCall() {
    stream_->Abort();
    MutexLock lock(state_->mutex);
    while (!state_->closed) state_->changed.Wait(state_->mutex);
  }

  void Tell(TrainRequest&& request) { stream_->Send(std::move(request)); }
  absl::StatusOr<TrainAnswer> Ask(TrainRequest&& request, std::chrono::milliseconds silence) {
    stream_->Send(std::move(request));
    MutexLock lock(state_->mutex);
    uint64_t heard = state_->heard;
    auto until = SteadyClock::now() + silence;
    while (!state_->answer && !state_->closed) {
      if (!state_->changed.WaitUntil(state_->mutex, until) && heard == state_->heard) {
        return absl::UnavailableError(Str("nothing heard for ", silence.count(), " ms"));
      }
      if (std::exchange(heard, state_->heard) != state_->heard) {
        until = SteadyClock::now() + silence;
      }
    }
    if (state_->answer) return *std::exchange(state_->answer, std::nullopt);
    if (state_->closed->ok()) return absl::UnavailableError("the worker closed the stream");
    return *state_->closed;
  }

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    uint64_t heard ABSL_GUARDED_BY(mutex) = 0;  // messages
    std::optional<TrainAnswer> answer ABSL_GUARDED_BY(mutex);
    std::optional<absl::Status> closed ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<Stream<TrainRequest>> stream_;
};

struct Peer {
  std::string address;
  LayerRange layers;                // empty: not known yet
  std::unique_ptr<TrainCall> call;  // null: not connected
};

class RemoteLayers final : public Layers {
 public:
  RemoteLayers(const RemoteLayersOptions& options, TrainedAdapter& adapter)
      : options_(options), adapter_(adapter) {}

  absl::Status Find();
  absl::Status BeginStep() override;
  absl::Status Forward(std::span<const int32_t> lengths, std::span<float> hidden) override;
  absl::Status Backward(std::span<float> gradient) override;
  absl::Status EndStep() override;

 private:
  absl::Status CheckSizes() const;
  // Connects the worker, within the time that it may take to be there, and says hello.
  absl::StatusOr<LayerRange> Connect(Peer& peer);
  absl::StatusOr<LayerRange> Greet(Peer& peer);
  // An error names the worker, and a loss ends its stream and is Unavailable.
  absl::StatusOr<TrainAnswer> Ask(Peer& peer, TrainRequest&& request);
  absl::Status Failure(Peer& peer, const absl::Status& why);

  const RemoteLayersOptions options_;
  TrainedAdapter& adapter_;
  std::vector<Peer> peers_;
};

absl::Status RemoteLayers::Failure(Peer& peer, const absl::Status& why) {
  const bool lost = IsLoss(why);
  const std::string text = Str("worker ", peer.address, ": ", std::string(why.message()));
  if (lost && options_.log) options_.log(text + "; the step runs again");
  if (lost) peer.call.reset();
  return absl::Status(lost ? absl::StatusCode::kUnavailable : why.code(), text);
}

absl::StatusOr<TrainAnswer> RemoteLayers::Ask(Peer& peer, TrainRequest&& request) {
  auto answer = peer.call->Ask(std::move(request), options_.silence);
  if (!answer.ok()) return Failure(peer, answer.status());
  return answer;
}

absl::StatusOr<LayerRange> RemoteLayers::Greet(Peer& peer) {
  if (!peer.call) peer.call = std::make_unique<TrainCall>(peer.address, options_.credentials);
  TrainRequest request;
  control::TrainHello& hello = *request.mutable_hello();
  hello.set_protocol(kControlProtocol);
  hello.set_version(options_.version);
  hello.set_fingerprint(options_.fingerprint);
  hello.set_weights(options_.weights);
  hello.set_first_layer(peer.layers.begin);
  hello.set_end_layer(peer.layers.end);
  hello.set_rank(options_.lora.rank);
  hello.set_alpha(options_.lora.alpha);
  hello.set_targets(options_.lora.targets);
  hello.set_max_sequences(options_.max_sequences);
  hello.set_max_length(options_.max_length);
  TREADLE_ASSIGN_OR_RETURN(const TrainAnswer answer,
                           peer.call->Ask(std::move(request), options_.silence));
  return LayerRange{answer.stage().first_layer(), answer.stage().end_layer()};
}

absl::StatusOr<LayerRange> RemoteLayers::Connect(Peer& peer) {
  const auto until = SteadyClock::now() + options_.patience;
  for (bool first = true;; first = false) {
    auto layers = Greet(peer);
    if (layers.ok()) return layers;
    peer.call.reset();
    if (!IsLoss(layers.status())) return Failure(peer, layers.status());
    if (first && options_.log) {
      options_.log(
          Str("waiting for worker ", peer.address, ": ", std::string(layers.status().message())));
    }
    if (SteadyClock::now() >= until) {
      return absl::DeadlineExceededError(Str("worker ", peer.address, " was not there for ",
                                             options_.patience.count() / 1000,
                                             " s: ", std::string(layers.status().message())));
    }
    std::this_thread::sleep_for(kRetry);
  }
}

absl::Status RemoteLayers::CheckSizes() const {
  const auto most = static_cast<int64_t>(kMaxMessageBytes);
  const int64_t tokens = options_.max_sequences * options_.max_length;
  if (const int64_t fit = most / options_.hidden / 4 - 64; tokens > fit) {
    return InvalidArgument("--batch-size times --max-length is ", tokens, ", expected at most ",
                           fit, " tokens, which a message to a worker holds");
  }
  for (const Peer& peer : peers_) {
    const auto part = adapter_.Part(adapter_.values(), peer.layers);
    if (part.size_bytes() + 64 <= kMaxMessageBytes) continue;
    return InvalidArgument("updates of ", peer.layers.end - peer.layers.begin, " layers have ",
                           part.size_bytes() >> 20, " MiB, expected at most ", most >> 20,
                           ", which a message to a worker holds: expected more workers, or a ",
                           "smaller --lora-rank");
  }
  return absl::OkStatus();
}

absl::Status RemoteLayers::Find() {
  for (const std::string& address : options_.workers) {
    peers_.push_back({.address = address, .layers = {}, .call = nullptr});
  }
  const auto until = SteadyClock::now() + kLeaving;
  absl::StatusOr<std::vector<LayerRange>> divided;
  while (!divided.ok()) {
    std::vector<LayerRange> have;
    for (Peer& peer : peers_) {
      peer.call.reset();
      TREADLE_ASSIGN_OR_RETURN(const LayerRange layers, Connect(peer));
      have.push_back(layers);
    }
    divided = DivideLayers(have, options_.layers);
    if (!divided.ok() && SteadyClock::now() >= until) return divided.status();
    if (!divided.ok()) std::this_thread::sleep_for(kRetry);
  }
  for (size_t i = 0; i < peers_.size(); ++i) peers_[i].layers = (*divided)[i];
  TREADLE_RETURN_IF_ERROR(CheckSizes());
  for (Peer& peer : peers_) TREADLE_RETURN_IF_ERROR(Connect(peer).status());
  return absl::OkStatus();
}

absl::Status RemoteLayers::BeginStep() {
  std::ranges::fill(adapter_.gradients(), 0.0f);
  for (Peer& peer : peers_) {
    if (!peer.call) TREADLE_RETURN_IF_ERROR(Connect(peer).status());
    TrainRequest request;
    request.set_step(ToBytes(adapter_.Part(adapter_.values(), peer.layers)));
    peer.call->Tell(std::move(request));
  }
  return absl::OkStatus();
}

absl::Status RemoteLayers::Forward(std::span<const int32_t> lengths, std::span<float> hidden) {
  for (Peer& peer : peers_) {
    TrainRequest request;
    control::TrainForward& forward = *request.mutable_forward();
    forward.mutable_lengths()->Add(lengths.begin(), lengths.end());
    forward.set_hidden(ToBytes(hidden));
    TREADLE_ASSIGN_OR_RETURN(const TrainAnswer answer, Ask(peer, std::move(request)));
    TREADLE_RETURN_IF_ERROR(FromBytes(answer.hidden(), "a worker's hidden states", hidden));
  }
  return absl::OkStatus();
}

absl::Status RemoteLayers::Backward(std::span<float> gradient) {
  for (auto peer = peers_.rbegin(); peer != peers_.rend(); ++peer) {
    TrainRequest request;
    request.set_backward(ToBytes(gradient));
    TREADLE_ASSIGN_OR_RETURN(const TrainAnswer answer, Ask(*peer, std::move(request)));
    TREADLE_RETURN_IF_ERROR(FromBytes(answer.hidden(), "a worker's gradient", gradient));
  }
  return absl::OkStatus();
}

absl::Status RemoteLayers::EndStep() {
  for (Peer& peer : peers_) {
    TrainRequest request;
    request.set_collect(true);
    TREADLE_ASSIGN_OR_RETURN(const TrainAnswer answer, Ask(peer, std::move(request)));
    TREADLE_RETURN_IF_ERROR(FromBytes(answer.gradients(), "a worker's gradients of updates",
                                      adapter_.Part(adapter_.gradients(), peer.layers)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<LayerRange>> DivideLayers(std::span<const LayerRange> have,
                                                     int64_t layers) {
  std::vector<LayerRange> all(have.begin(), have.end());
  int64_t at = 0;  // first layer that nobody has yet
  for (size_t i = 0; i < all.size();) {
    const auto empty = [](const LayerRange& range) { return range.end == 0; };
    size_t next = i;
    while (next < all.size() && empty(all[next])) ++next;
    const int64_t end = next < all.size() ? all[next].begin : layers;
    const auto sharers = static_cast<int64_t>(next - i);
    if (end - at < sharers || (sharers == 0 && end != at)) {
      return absl::FailedPreconditionError(Str("the workers' stages do not fit together: layers ",
                                               at, " to ", end, " of ", layers, " are for ",
                                               sharers, " workers without a stage"));
    }
    for (int64_t j = 0; j < sharers; ++j) {
      all[i + static_cast<size_t>(j)] = {at + (end - at) * j / sharers,
                                         at + (end - at) * (j + 1) / sharers};
    }
    if (next < all.size()) at = all[next].end;
    if (next == all.size()) at = layers;
    i = next + 1;
  }
  if (at == layers) return all;
  return absl::FailedPreconditionError(
      Str("the workers' stages do not fit together: they end with ", "layer ", at, " of ", layers));
}

absl::StatusOr<std::unique_ptr<Layers>> ConnectLayers(const RemoteLayersOptions& options,
                                                      TrainedAdapter& adapter) {
  RemoteLayersOptions complete = options;
  if (complete.version.empty()) complete.version = kVersion;
  auto layers = std::make_unique<RemoteLayers>(complete, adapter);
  TREADLE_RETURN_IF_ERROR(layers->Find());
  return layers;
}

}  // namespace treadle
