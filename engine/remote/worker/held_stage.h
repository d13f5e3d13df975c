// The stage that a worker process holds: loaded for its master, or for a guest while it has none.
//
// A stage stays until something else is wanted, so that the next master that asks for the same
// stage finds it loaded. Thread safety: one thread at a time (the worker's task thread).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/remote/worker/worker_stage.h"

namespace treadle {

// Gives a stage its weights.
struct StageSource {
  // Opens a checkpoint that has the configuration's fingerprint. Errors: CheckModel's.
  std::function<absl::StatusOr<std::shared_ptr<const Checkpoint>>(const control::Configure&)> open;
  std::function<void(double)> progress;  // WorkerStage::Load's; may be empty
  std::function<void()> loaded;          // called once loading has ended, either way
};

// FailedPrecondition, naming the file and both sums, unless the checkpoint's fingerprint is the
// wanted one. `files`: FilesHere of a checkpoint that has it, or empty; if it is this one's, too,
// nothing is hashed.
absl::Status CheckModel(const Checkpoint& own, const control::Configure& wanted,
                        const std::string& files);

class HeldStage {
 public:
  struct Options {
    std::string model_path;  // of the worker's own model; empty: none
    RankOptions ranks;
    int memory = -1;  // WorkerStage::Reserve's
    StageRanks::Events events;
    std::function<void()> gone;  // called before the stage is destroyed
    std::function<void(const std::string&)> log;
  };
  explicit HeldStage(Options options);
  ~HeldStage();

  // Null: nothing is loaded.
  WorkerStage* stage() const { return stage_.get(); }
  // Null until reserved.
  StageRanks* ranks() const { return stage_ == nullptr ? nullptr : stage_->ranks(); }
  const control::Configure& configuration() const { return *configuration_; }
  // It was loaded for the guest, not for a master.
  bool for_guest() const { return for_guest_; }

  // Loads what a master wants, unless it is there. Errors: `source`'s, WorkerStage::Load's.
  absl::Status Configure(const control::Configure& wanted, const StageSource& source);
  // Makes the cache and starts the ranks, unless they are there; for a cache of another size the
  // weights are loaded again. Errors: FailedPrecondition if nothing is loaded; Configure's,
  // WorkerStage::Reserve's.
  absl::Status Reserve(const PageCounts& kv_pages, const StageSource& source);
  // Makes ready what a guest wants. Errors: StageLender::Lend's.
  absl::Status ForGuest(const control::Configure& wanted, bool replace, bool has_master);

 private:
  void Drop();
  absl::Status Load(const StageSource& source);
  absl::Status LoadForGuest(const control::Configure& wanted);

  const Options options_;
  std::string configured_;  // what stage_ is, serialized; empty: nothing is loaded
  const std::unique_ptr<control::Configure> configuration_;
  std::unique_ptr<WorkerStage> stage_;
  bool for_guest_ = false;
};

}  // namespace treadle
