// The serving loop's core around a fake engine and a fake clock, turned by hand, and clients that
// check what they receive against the reference.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/loop_core.h"
#include "tests/scheduler/oracle_drafter.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_engine.h"

namespace treadle {

// One request's receiving end.
struct Client {
  RequestId id = 0;
  RequestSpec spec;
  std::shared_ptr<TokenStream> stream;
  std::vector<std::vector<int32_t>> tokens;  // [candidates]
  std::vector<FinishReason> finish;          // [candidates]
  std::vector<TokenDetail> prompt;
  bool ended = false;
  absl::Status status;
  RequestTimings timings;

  void Receive();
  // Empty, or what differs from the reference: every candidate's tokens are a prefix of it; all of
  // it, if the request ended well and nobody found a stop string.
  std::string Mistake() const;
};

struct HarnessOptions {
  FakeEngineOptions engine;
  BatchLimits limits{.max_batch_size = 4, .max_batch_tokens = 16};
  std::string policy = "fcfs";
  int64_t max_queue = 1000;
  Clock::duration max_ttft{0};
  bool recover = true;
  bool compute_padding = false;
  bool prefix_cache = true;
  PageFiles* files = nullptr;  // of FakeEngine's pages
  std::function<void(const absl::Status&)> give_up;
  MakeDrafter drafter = MakeNgramDrafter;
  std::optional<FakeEngineOptions> draft_engine;  // of a draft model; unset: there is none
  int64_t draft_context = 1 << 20;
  bool as_reference = true;  // else answers are others than the reference's, by what is asked
};

// An OracleDrafter by the fake engine's reference.
std::unique_ptr<Drafter> MakeOracleDrafter(const Request& request, const Sequence& sequence);

class LoopHarness {
 public:
  explicit LoopHarness(const HarnessOptions& options);
  ~LoopHarness();  // a test with mistakes fails, if answers are as the reference's

  // A prompt that differs by `seed`; the request is accepted.
  static RequestSpec Spec(int32_t prompt, int32_t max_new, uint64_t seed);
  Client& Submit(RequestSpec spec);
  // A turn, after which every client received what there was.
  bool Turn();
  // The same once the engine has completed a plan.
  bool CompleteAndTurn() {
    engine.Complete();
    return Turn();
  }
  // Turns, and completes plans, until nothing happens any more.
  void RunToIdle();

  // Every mistake of any client, violation of the engine, and page that is held though nothing
  // lives.
  std::vector<std::string> Mistakes() const;
  LedgerEnd EndOf(RequestId id) const;
  // Clients in each plan submitted since the last call, as letters: the seed 0 is A. Needs
  // engine.record.
  std::vector<std::string> TakePlanNames();
  // By requests.
  PageCounts held_pages() const {
    PageCounts held = free_at_first_;
    return held -= kv.Capacity().free_pages;
  }

  const HarnessOptions options;
  FakeEngine engine;
  FakeClock clock;
  KvSlotManager kv;
  Ledger ledger{1 << 16};
  std::unique_ptr<Policy> policy;
  std::vector<std::unique_ptr<Client>> clients;
  FakeEngine* draft_engine = nullptr;  // the draft model's
  std::unique_ptr<DraftModel> draft_model;
  std::vector<absl::Status> draft_failures;
  RequestPool pool;  // its requests use the draft model
  std::unique_ptr<LoopCore> loop;
  std::map<SequenceId, uint64_t> seeds;  // of the sequences in TakePlanNames

 private:
  void CheckCounts();

  PageCounts free_at_first_;
  std::vector<std::string> miscounts_;
};

}  // namespace treadle
