// The engine runs iterations; it decides nothing.
//
// LocalEngine (threads of this process) and RemoteEngine (worker processes) obey this contract and
// pass the same tests.
//
// Thread safety: all methods but SetMasks and those of adapters are called from one thread, the
// serving loop; `wake` is called from the engine's threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

class AdapterFile;  // models/adapters/adapter_file.h

// A rank's work in time. Times are the machine's monotonic clock in nanoseconds, the same for all
// processes of one machine.
struct TraceEvent {
  enum class Kind : uint8_t { kPlan, kReceive, kForward, kSend, kSample };
  static constexpr std::string_view kNames[] = {"plan", "receive", "forward", "send", "sample"};

  uint64_t epoch = 0;
  uint64_t iteration = 0;
  int32_t stage = 0;
  int32_t rank = 0;
  Kind kind = Kind::kPlan;  // kPlan: from the plan's arrival at the stage to the rank's start
  int64_t begin = 0;
  int64_t end = 0;

  std::string_view name() const { return kNames[static_cast<size_t>(kind)]; }
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Once, before anything else. `wake` is called (from any thread) whenever TakeResults or status
  // may have news. It must not block or call back.
  virtual absl::Status Start(std::function<void()> wake) = 0;

  virtual int stages() const = 0;
  // Plans that may be in flight at once.
  virtual int depth() const = 0;
  virtual uint64_t epoch() const = 0;

  // True if a plan may be submitted now: fewer than depth() in flight, and the epoch stands.
  virtual bool HasRoom() const = 0;

  // Requires HasRoom(), plan.epoch == epoch(), consecutive iteration numbers.
  virtual void Submit(IterationPlan plan) = 0;

  // Any thread: what masked steps of a plan may sample, in one call or several, each step once. It
  // may come while the plan runs, and before its Submit; sampling waits for it, as long as the
  // iteration may take. Masks of another epoch are dropped; masks that do not fit end the epoch.
  virtual void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) = 0;

  // Any thread: has all ranks load an adapter, for sequences whose starts name its id from now on,
  // in later epochs too; returns when they have. Unimplemented: this engine has no adapters.
  virtual absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) {
    return absl::UnimplementedError("this engine takes no adapters");
  }
  // Any thread: its memory goes, once no sequence has it any more.
  virtual void UnloadAdapter(uint64_t id) {}

  // Results that are complete, in order of submission. Never blocks. Here, and not in what only
  // looks, an iteration that is late ends its epoch.
  virtual std::vector<IterationResult> TakeResults() = 0;

  // Ok, or why this epoch ended (an iteration missed its deadline, a worker was lost). After an
  // error nothing more of the epoch is returned.
  virtual absl::Status status() const = 0;

  // Begins the next epoch, with empty sequence tables; returns at once. HasRoom is false until the
  // new epoch stands.
  virtual void Restart() = 0;
  // When an epoch stands: the stages that may have lost what pages held since the last call. The
  // others still have what complete results spoke of.
  virtual StageRange TakeLost() { return {}; }
  // Whole pages below it are in the replay logs of all stages: plans may have some stages run them
  // again (IterationPlan::stages) that do not begin with the first.
  virtual int64_t replay_pages() const { return 0; }

  // Timeline of all stages and ranks: off at first. The events since the last call, oldest
  // first; events of other processes arrive a little later than their results.
  virtual void SetTracing(bool on) = 0;
  virtual std::vector<TraceEvent> TakeTrace() = 0;
};

}  // namespace treadle
