// An engine without a model, which checks every plan against a shadow of the K/V cache.
//
// The K/V of a position is a hash chain over the ids up to there, read and written through the
// pages that the plan named, and the next token is a hash of it. So a wrong page, copy, share,
// position or token input changes the answer, and ReferenceOutput says what it must be. With a
// window it has pages of that kind too, or alone, and reads the window's positions in them.
// Violations: a write to a page that the sequence does not own, or of another row to one that it
// shares, a read of a slot that does not hold what the sequence's own ids make of it, or that
// another tenant wrote, a copy from a page that was never written or to one in use, an unknown
// sequence, a plan that is too big, late or out of order.
//
// Every stage has such pages. An epoch that fails takes those of the stages that it loses, and what
// plans without a result have written, for they may not have run everywhere; plans
// that some stages run again read and write theirs, and what the first of them is given must be in
// the pages of the one before, within its replay log.
//
// Thread safety: the Engine methods from one thread; all others from any.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/sync.h"
#include "engine/engine.h"
#include "scheduler/request/request.h"

namespace treadle {

struct FakeEngineOptions {
  int stages = 1;
  int depth = 1;
  int64_t page_size = 4;
  PageCounts total_pages = 64;
  int64_t window = 0;
  bool states = false;  // rings are those of states, and window is page_size + 1
  int64_t replay_pages = 0;
  int64_t max_batch_tokens = 1 << 20;
  bool manual = false;          // plans complete by Complete(), else as soon as they are submitted
  bool manual_restart = false;  // the next epoch stands by FinishRestart(), else at once
  bool record = false;          // keep the plans
  bool drafts = false;          // it is a draft model's: its samples are guesses
  uint64_t wrong_every = 0;     // 1 of so many tokens is not the reference's; 0: none
  uint64_t tenants = 1;         // seed % tenants is who asks: nobody reads what another one wrote

  KvPaging paging() const {
    ModelConfig config;
    config.layers = 2;
    config.window = window;
    config.global_every = total_pages[PageKind::kWhole] > 0 ? 2 : 0;
    KvPaging paging = KvPaging::Of(config, page_size, max_batch_tokens);
    if (states) paging.ring = 2;
    return paging;
  }
};

class FakeEngine final : public Engine {
 public:
  static constexpr int32_t kVocab = 64;
  static constexpr int64_t kSlotBytes = 24;  // of a page that a result gives

  explicit FakeEngine(const FakeEngineOptions& options);

  absl::Status Start(std::function<void()> wake) override ABSL_LOCKS_EXCLUDED(mutex_);
  int stages() const override { return options_.stages; }
  int depth() const override { return options_.depth; }
  uint64_t epoch() const override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasRoom() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void Submit(IterationPlan plan) override ABSL_LOCKS_EXCLUDED(mutex_);
  // A masked output's token is the first allowed one from the model's on, in a circle.
  void SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status LoadAdapter(std::shared_ptr<const AdapterFile> adapter) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void UnloadAdapter(uint64_t id) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<IterationResult> TakeResults() override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status status() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void Restart() override ABSL_LOCKS_EXCLUDED(mutex_);
  StageRange TakeLost() override ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    return std::exchange(lost_, kNoStages);
  }
  int64_t replay_pages() const override { return options_.replay_pages; }
  void SetTracing(bool) override {}
  std::vector<TraceEvent> TakeTrace() override { return {}; }

  // The oldest plan that runs is done; false if there is none.
  // `timings`: what it reports; null: what SetTimings says.
  bool Complete(const IterationTimings* timings = nullptr) ABSL_LOCKS_EXCLUDED(mutex_);
  // Report of plans submitted from now on.
  void SetTimings(const IterationTimings& timings) ABSL_LOCKS_EXCLUDED(mutex_);
  // The epoch ends, and these stages lose their pages; nothing more of it is returned.
  void Fail(absl::Status status, StageRange lost = {}) ABSL_LOCKS_EXCLUDED(mutex_);
  void FinishRestart() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t running_plans() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The plans submitted since the last call, if recorded.
  std::vector<IterationPlan> TakePlans() ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::string> violations() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t live_sequences() const ABSL_LOCKS_EXCLUDED(mutex_);

  // The adapters that are loaded. RefuseAdapters has loads fail from now on.
  std::set<uint64_t> adapters() const ABSL_LOCKS_EXCLUDED(mutex_);
  void RefuseAdapters(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Page {
    int owners = 0;  // live sequences that name it
    struct Slot {
      uint64_t chain = 0;  // 0: never written
      int64_t position = 0;
      uint64_t tenant = 0;

      friend bool operator==(const Slot&, const Slot&) = default;
    };
    static_assert(sizeof(Slot) == kSlotBytes);
    std::vector<std::vector<Slot>> slots;  // [stages][page_size]
  };
  struct Live {
    SequenceStart start;
    int64_t next_position = 0;
    int32_t previous_sample = -1;
    bool stepped = false;               // by the plan that is being run
    std::vector<uint64_t> chains = {};  // by position, as its ids make them
  };

  // Plans from the front of submitted_ on, as far as their masks are there.
  void RunReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t in_flight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return submitted_.size() + running_.size() + complete_.size();
  }
  void Run(const IterationPlan& plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(SequenceId sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Copy(const PageCopy& copy, PageKind kind, int stage) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  PageBytes BytesOf(int32_t page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Load(const PageLoad& load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartSequence(const SequenceStart& start) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t TenantOf(const SequenceStart& start) const {
    return start.sampling.seed % options_.tenants;
  }
  StepResult RunStep(const IterationPlan& plan, int32_t index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  RowResult RunRow(const Live& live, const RowOutput& asked, int64_t position, uint64_t chain,
                   const uint32_t* allowed) const;
  uint64_t Enter(Live& live, const StageRange& stages, int64_t position, int32_t token)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EnterAt(const Live& live, int stage, int64_t position, uint64_t chain)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckLog(const Live& live, int stage, int64_t position, uint64_t chain)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Page* PageAt(int32_t id, PageKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The pages that a sequence names, each once.
  std::span<const int32_t> Ring(const SequenceStart& start, PageKind kind) const;
  Page* PageOf(const SequenceStart& start, int64_t position, PageKind kind)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Violation(std::string what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wipe(const StageRange& stages) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FakeEngineOptions options_;
  std::function<void()> wake_;  // constant after Start

  mutable Mutex mutex_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  bool standing_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> adapters_ ABSL_GUARDED_BY(mutex_);
  absl::Status no_adapters_ ABSL_GUARDED_BY(mutex_);
  StageRange lost_ ABSL_GUARDED_BY(mutex_) = kNoStages;  // since the last TakeLost
  ByKind<std::vector<Page>> pages_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, Live> live_ ABSL_GUARDED_BY(mutex_);
  std::deque<IterationPlan> submitted_ ABSL_GUARDED_BY(mutex_);  // wait for masks
  std::map<uint64_t, std::map<std::pair<int32_t, int32_t>, std::vector<uint32_t>>> masks_
      ABSL_GUARDED_BY(mutex_);
  // A plan that is computed, and not complete.
  struct Running {
    IterationResult result = {};
    std::vector<Page::Slot*> written = {};
  };
  std::deque<Running> running_ ABSL_GUARDED_BY(mutex_);
  std::vector<IterationResult> complete_ ABSL_GUARDED_BY(mutex_);
  IterationTimings timings_ ABSL_GUARDED_BY(mutex_);
  std::vector<IterationPlan> plans_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> violations_ ABSL_GUARDED_BY(mutex_);
};

// Answer of the fake engine's model, computed without pages: the tokens of one candidate until
// an end token or max_new_tokens. Tokens are below 64.
std::vector<int32_t> ReferenceOutput(const RequestSpec& spec, uint32_t candidate);
// Its result for a prompt that is pooled, in either way.
std::vector<float> ReferenceEmbedding(std::span<const int32_t> prompt);
// The log probability that it gives to the prompt token at `position`.
float ReferencePromptLogprob(int32_t position, int32_t token);

}  // namespace treadle
