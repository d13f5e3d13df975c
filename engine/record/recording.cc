#include "engine/record/recording.h"

#include <chrono>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_writer.h"
#include "models/adapters/adapter_file.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLastWords{5};

std::string HeaderOf(const RecordedSetup& setup) {
  record::Entry entry;
  record::Header& header = *entry.mutable_header();
  header.set_version(setup.version);
  header.set_fingerprint(setup.fingerprint);
  header.set_backend(setup.backend);
  header.set_configuration(setup.configuration);
  header.mutable_end_layer()->Add(setup.end_layers.begin(), setup.end_layers.end());
  header.set_max_batch_tokens(setup.max_batch_tokens);
  header.set_max_context(setup.max_context);
  EncodePages(setup.kv_pages, *header.mutable_pages());
  return entry.SerializeAsString();
}

class RecordingEngine final : public Engine {
 public:
  RecordingEngine(std::shared_ptr<Recording> recording, std::unique_ptr<Engine> below)
      : recording_(std::move(recording)), below_(std::move(below)) {}

  absl::Status Start(std::function<void()> wake) override { return below_->Start(std::move(wake)); }
  int stages() const override { return below_->stages(); }
  int depth() const override { return below_->depth(); }
  uint64_t epoch() const override { return below_->epoch(); }
  bool HasRoom() const override { return below_->HasRoom(); }
  void Submit(IterationPlan plan) override {
    recording_->Plan(plan);
    below_->Submit(std::move(plan));
  }
  void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) override {
    recording_->Masks(epoch, iteration, masks);
    below_->SetMasks(epoch, iteration, std::move(masks));
  }
  absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) override {
    TREADLE_RETURN_IF_ERROR(below_->LoadAdapter(adapter));
    recording_->Adapter({adapter->id(), adapter->path(), adapter->hash()});
    return absl::OkStatus();
  }
  void UnloadAdapter(uint64_t id) override { below_->UnloadAdapter(id); }
  std::vector<IterationResult> TakeResults() override {
    std::vector<IterationResult> results = below_->TakeResults();
    for (const IterationResult& result : results) recording_->Result(result);
    return results;
  }
  absl::Status status() const override { return below_->status(); }
  void Restart() override {
    recording_->EpochEnd(below_->epoch(), std::string(below_->status().message()));
    below_->Restart();
  }
  StageRange TakeLost() override { return below_->TakeLost(); }
  int64_t replay_pages() const override { return below_->replay_pages(); }
  void SetTracing(bool on) override { below_->SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return below_->TakeTrace(); }

 private:
  const std::shared_ptr<Recording> recording_;
  const std::unique_ptr<Engine> below_;
};

}  // namespace

struct Recording::State {
  State(RecordingOptions from, RecordWriter writer)
      : queue_bytes(from.queue_bytes), ended(std::move(from.ended)), files(std::move(writer)) {}

  void Add(record::Entry& entry) ABSL_LOCKS_EXCLUDED(mutex) {
    const auto since =
        std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now() - began);
    entry.set_nanoseconds(static_cast<uint64_t>(since.count()));
    std::string bytes = entry.SerializeAsString();
    {
      MutexLock lock(mutex);
      if (closed) return;
      if (queued + std::ssize(bytes) <= queue_bytes) {
        queued += std::ssize(bytes);
        queue.push_back(std::move(bytes));
        woken.NotifyAll();
        return;
      }
    }
    Close("the disk does not keep up: its queue is full");
  }

  // Ends the recording before its time, unless it has ended.
  void Close(const std::string& reason) ABSL_LOCKS_EXCLUDED(mutex) {
    {
      MutexLock lock(mutex);
      if (closed) return;
      closed = true;
      why = reason;
      woken.NotifyAll();
    }
    ended(reason);
  }

  // The thread's.
  void Run() ABSL_LOCKS_EXCLUDED(mutex) {
    for (bool last = false; !last;) {
      std::vector<std::string> batch;
      {
        MutexLock lock(mutex);
        while (queue.empty() && !closed) woken.Wait(mutex);
        batch.swap(queue);
        queued = 0;
        last = closed;
      }
      absl::Status written;
      for (size_t i = 0; i < batch.size() && written.ok(); ++i) written = files.Write(batch[i]);
      if (written.ok()) continue;
      Close(std::string(written.message()));
      last = true;
    }
    record::Entry entry;
    {
      MutexLock lock(mutex);
      entry.set_end(why);
    }
    files.Write(entry.SerializeAsString()).IgnoreError();  // there may be no room for it
    MutexLock lock(mutex);
    queue.clear();
    done = true;
    finished.NotifyAll();
  }

  const int64_t queue_bytes;
  const std::function<void(const std::string&)> ended;
  const SteadyClock::time_point began = SteadyClock::now();

  Mutex mutex;
  CondVar woken;
  CondVar finished;
  std::vector<std::string> queue ABSL_GUARDED_BY(mutex);
  int64_t queued ABSL_GUARDED_BY(mutex) = 0;  // bytes
  bool closed ABSL_GUARDED_BY(mutex) = false;
  bool done ABSL_GUARDED_BY(mutex) = false;
  std::string why ABSL_GUARDED_BY(mutex) = "the server ended";

  RecordWriter files;  // the thread's
  std::thread thread;  // the owner's
};

absl::StatusOr<std::shared_ptr<Recording>> Recording::Open(RecordingOptions options) {
  TREADLE_ASSIGN_OR_RETURN(
      RecordWriter files,
      RecordWriter::Create(options.file, options.max_bytes / 2, HeaderOf(options.setup)));
  const auto state = std::make_shared<State>(std::move(options), std::move(files));
  try {
    state->thread = std::thread([state] { state->Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("thread of the recording: ", error.what());
  }
  return std::shared_ptr<Recording>(new Recording(state));
}

Recording::~Recording() {
  const auto deadline = SteadyClock::now() + kLastWords;
  bool done = false;
  {
    MutexLock lock(state_->mutex);
    state_->closed = true;
    state_->woken.NotifyAll();
    while (!state_->done && state_->finished.WaitUntil(state_->mutex, deadline)) {
    }
    done = state_->done;
  }
  // A thread that hangs in the system keeps the state, and nobody waits for it.
  done ? state_->thread.join() : state_->thread.detach();
}

std::unique_ptr<Engine> Recording::Wrap(std::shared_ptr<Recording> recording,
                                        std::unique_ptr<Engine> engine) {
  return std::make_unique<RecordingEngine>(std::move(recording), std::move(engine));
}

void Recording::Plan(const IterationPlan& plan) {
  record::Entry entry;
  EncodePlan(plan, *entry.mutable_plan());
  state_->Add(entry);
}

void Recording::Masks(uint64_t epoch, uint64_t iteration, const std::vector<OutputMask>& masks) {
  record::Entry entry;
  EncodeMasks(epoch, iteration, masks, *entry.mutable_masks());
  state_->Add(entry);
}

void Recording::Result(const IterationResult& result) {
  record::Entry entry;
  EncodeResult(result, *entry.mutable_result());
  state_->Add(entry);
}

void Recording::EpochEnd(uint64_t epoch, const std::string& reason) {
  record::Entry entry;
  entry.mutable_epoch_end()->set_epoch(epoch);
  entry.mutable_epoch_end()->set_reason(reason);
  state_->Add(entry);
}

void Recording::Adapter(const RecordedAdapter& adapter) {
  record::Entry entry;
  entry.mutable_adapter()->set_id(adapter.id);
  entry.mutable_adapter()->set_path(adapter.path);
  entry.mutable_adapter()->set_hash(adapter.hash);
  state_->Add(entry);
}

void Recording::Ledger(std::string line) {
  record::Entry entry;
  entry.set_ledger(std::move(line));
  state_->Add(entry);
}

}  // namespace treadle
