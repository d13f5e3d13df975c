// The task thread of a worker: what a master and a guest ask, one after the other.
#include <optional>
#include <utility>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/adapter_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/worker/worker_state.h"

namespace treadle {

// An error is the end of the attachment's usefulness; the master closes it.
void Worker::State::Post(const MasterPointer& master, std::function<absl::Status()> task) {
  tasks_->Post([this, master, task = std::move(task)] {
    if (!IsCurrent(master)) return;
    if (const absl::Status status = task(); !status.ok()) {
      Log(std::string(status.message()));
      master->stream->Send(FailureOf(0, status));
    }
  });
}

absl::Status Worker::State::Greet(const MasterPointer& master) {
  control::WorkerMessage message;
  control::WorkerHello& hello = *message.mutable_hello();
  hello.set_protocol(kControlProtocol);
  hello.set_version(options_.version);
  hello.set_model_path(options_.model_path);
  hello.set_compute(options_.compute);
  hello.set_device(options_.device);
  hello.set_dtype(options_.dtype);
  hello.set_deterministic(options_.deterministic);
  DescribeMachine(options_.ranks.gpus, hello);
  hello.set_held_bytes(held_->stage() == nullptr ? 0 : held_->stage()->weight_bytes());
  master->stream->Send(std::move(message));
  return absl::OkStatus();
}

absl::Status Worker::State::Configure(const MasterPointer& master,
                                      const control::Configure& configuration) {
  TREADLE_RETURN_IF_ERROR(held_->Configure(configuration, SourceFor(master)));
  epoch_.SetPlace({.stage = configuration.stage(),
                   .stages = configuration.stages(),
                   .deadline = std::chrono::milliseconds(configuration.iteration_deadline_ms()),
                   .wire = ValueOf(kWireTypes, configuration.wire()).value_or(WireType::kF32),
                   .data_plane = ValueOf(kDataPlanes, configuration.data_plane()).value()});
  control::WorkerMessage message;
  TREADLE_RETURN_IF_ERROR(held_->stage()->Describe(*message.mutable_loaded()));
  message.mutable_loaded()->set_fingerprint(held_->configuration().fingerprint());
  master->stream->Send(std::move(message));
  return absl::OkStatus();
}

StageSource Worker::State::SourceFor(const MasterPointer& master) {
  return {.open =
              [this, master](const control::Configure& configuration) {
                return OpenCheckpoint(master, configuration);
              },
          .progress =
              [master, reported = 0.0](double fraction) mutable {
                if (fraction < reported + 0.01 && fraction < 1) return;
                reported = fraction;
                master->stream->Tell([&](auto& message) { message.set_progress(fraction); });
              },
          .loaded =
              [this] {
                MutexLock lock(mutex_);
                receiving_ = nullptr;
              }};
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> Worker::State::OpenCheckpoint(
    const MasterPointer& master, const control::Configure& configuration) {
  if (!configuration.has_directory()) {
    TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> opened,
                             Checkpoint::Open(options_.model_path));
    TREADLE_RETURN_IF_ERROR(CheckModel(*opened, configuration, master->files));
    return opened;
  }
  TREADLE_ASSIGN_OR_RETURN(
      const std::shared_ptr<ReceivedCheckpoint> received,
      ReceivedCheckpoint::Create(configuration.directory(), master->silence,
                                 [stream = master->stream](const control::TensorRequest& request) {
                                   stream->Tell(
                                       [&](auto& message) { *message.mutable_tensor() = request; });
                                 }));
  MutexLock lock(mutex_);
  if (master_ != master) return absl::CancelledError("the master is gone");
  receiving_ = received;
  return std::shared_ptr<const Checkpoint>(received);
}

absl::Status Worker::State::Reserve(const MasterPointer& master, const PageCounts& kv_pages) {
  TREADLE_RETURN_IF_ERROR(held_->Reserve(kv_pages, SourceFor(master)));
  held_->ranks()->UnloadAdapters();  // an earlier master's
  epoch_.SetRanks(held_->ranks());
  epoch_.SetTracing(tracing_.load());
  master->stream->Tell([memory = held_->stage()->memory().For(master->id)](auto& message) {
    message.mutable_reserved()->set_memory(memory);
  });
  return absl::OkStatus();
}

// A failure is the adapter's, not the attachment's.
absl::Status Worker::State::LoadAdapter(const MasterPointer& master, control::Adapter&& adapter) {
  if (held_->ranks() == nullptr) {
    return absl::FailedPreconditionError("an adapter comes before the cache is reserved");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto file,
                           DecodeAdapter(std::move(adapter), held_->stage()->config()));
  const absl::Status status = held_->ranks()->LoadAdapter(*file);
  master->stream->Tell([&](auto& message) {
    control::AdapterLoaded& loaded = *message.mutable_adapter_loaded();
    loaded.set_id(file->id());
    loaded.set_code(static_cast<int32_t>(status.code()));
    loaded.set_message(std::string(status.message()));
  });
  return absl::OkStatus();
}

// -- the guest ------------------------------------------------------------------------------------

void Worker::State::Lend(control::Configure&& wanted, bool replace,
                         std::function<void(absl::StatusOr<LentStage>)> then) {
  tasks_->Post([this, wanted = std::move(wanted), replace, then = std::move(then)] {
    then(StageFor(wanted, replace));
  });
}

absl::StatusOr<LentStage> Worker::State::StageFor(const control::Configure& wanted, bool replace) {
  bool attached = false;
  {
    MutexLock lock(mutex_);
    attached = master_ != nullptr;
  }
  TREADLE_RETURN_IF_ERROR(held_->ForGuest(wanted, replace, attached));
  return LentStage{held_->configuration(), held_->ranks(), held_->for_guest(), options_.ranks};
}

}  // namespace treadle
