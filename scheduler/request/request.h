// A request: what was asked (constant), and how far it is (mutable, owned by the pool).
//
// States go kWaiting -> kRunning -> kFinished, never back (an engine that is lost does not change
// them: what it knew of a running request is run again). Leaving kWaiting for kRunning reserves
// every page that the request may ever need, once, so an admitted request can always finish (ORCA
// section 4.2, Algorithm 1).
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/page_files.h"
#include "engine/plan/iteration_plan.h"
#include "scheduler/request/drafter.h"
#include "scheduler/request/token_constraint.h"
#include "scheduler/request/token_stream.h"

namespace treadle {

class MaskedCandidate;

using RequestId = uint64_t;
using Clock = std::chrono::steady_clock;

enum class RequestState : uint8_t { kWaiting, kRunning, kFinished };

// The tokens of a candidate before its request was submitted again.
struct EarlierOutput {
  std::vector<int32_t> tokens = {};
  FinishReason finish = FinishReason::kNone;  // else nothing more is wanted of it
};

// A server thread's request to the pool. Validated there already: prompt not empty, ids in range,
// prompt + max_new_tokens within the context and within the cache.
struct RequestSpec {
  std::string client_id;   // request_id of the client, for the ledger and logs; may be empty
  std::string owner;       // of the API key that asks, for policies and the ledger; empty: none
  double weight = 1;       // the owner's, under FairShare; > 0
  int32_t priority = 0;    // class under Priority: smaller ones are earlier
  std::string cache_salt;  // only requests of the same one share what is cached; says the adapter
  uint64_t adapter = 0;    // SequenceStart::adapter, which the engine has loaded; 0: none
  std::shared_ptr<const void> adapter_hold = {};  // keeps it loaded; null: without an adapter
  std::vector<int32_t> prompt;
  // The first ids of the prompt that are no text: the adapter's soft prompt replaces their rows.
  int32_t virtual_tokens = 0;
  std::span<const int32_t> text() const {
    return std::span(prompt).subspan(static_cast<size_t>(virtual_tokens));
  }
  SamplingParameters sampling;  // seed resolved
  int32_t max_new_tokens = 0;   // > 0
  int32_t min_new_tokens = 0;
  std::vector<int32_t> end_tokens;  // generation ends at any; empty with ignore_eos
  int32_t candidates = 1;           // n
  int32_t top_logprobs = -1;        // of generated tokens (see RowOutput)
  int32_t prompt_logprobs = -1;     // of prompt tokens but the first, likewise
  // Not none: an embedding of the prompt is asked. No token comes then, and max_new_tokens is 1.
  Pooling pooling = Pooling::kNone;
  std::shared_ptr<const ConstraintGrammar> constraint = {};  // null: none
  Speculate speculate = Speculate::kOff;
  Clock::time_point deadline = Clock::time_point::max();
  // [candidates], if the request goes on where it was: the engine runs it again, and nothing is
  // told of it twice. Some candidate is not finished. Empty: the request is new.
  std::vector<EarlierOutput> earlier = {};
  bool internal = false;  // nobody asked for it (the warm-up): not in the users' metrics
};

// Progress of one candidate.
struct Sequence {
  SequenceId id = 0;
  uint32_t candidate = 0;
  SequencePages pages;        // held references; empty before admission
  int32_t next_position = 0;  // first position that no submitted plan of this epoch has covered
  // Results have come of all inputs before this position, perhaps from an earlier process: an
  // engine that is behind it runs them again, and nothing is told of them twice.
  int32_t known = 0;
  int32_t produced = 0;         // tokens absorbed from results
  int32_t in_flight = 0;        // tokens asked of submitted plans and not yet absorbed
  std::vector<int32_t> output;  // tokens absorbed
  bool started = false;         // its SequenceStart was submitted
  // The last position at which it started, in any epoch, and the end of what its steps ever wrote:
  // with a window, what lies between may still be in its pages.
  int32_t begun = 0;
  int32_t written = 0;
  int32_t branch = 0;     // where its last chunk ended because of a branch (KvSlotManager); 0: none
  bool finished = false;  // enters no further plan, except to run the prompt for the others
  FinishReason finish = FinishReason::kNone;  // why, when finished by itself

  std::shared_ptr<Drafter> drafter;  // once a token has come, if the request speculates
  // The guesses behind the input of its step in flight, which samples after each: there is no other
  // step until their result has come.
  std::vector<int32_t> draft;

  // Under a constraint: what works out its masks, and its steps whose masks were not yet ordered.
  struct MaskedStep {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    int32_t step = 0;            // in its plan
    int32_t output = 0;          // in the step; the first of them
    std::vector<int32_t> draft;  // guesses that the step verifies: an output follows each
  };
  std::shared_ptr<MaskedCandidate> masked;
  size_t told = 0;  // tokens of the output that it has been given
  std::deque<MaskedStep> unordered;
  // Its last step was excused (mask_thread.h): it enters no plan until the mask has arrived, and
  // what its steps in flight sample is dropped.
  bool sits_out = false;
};

struct Request {
  RequestId id = 0;  // arrival order
  RequestSpec spec;
  std::shared_ptr<TokenStream> stream;
  Clock::time_point arrival;  // when the loop took it from the inbox, which is at once
  // Unset (the clock's epoch) until it happens.
  Clock::time_point begun;        // when its first step was planned
  Clock::time_point first_token;  // when the first token was absorbed

  RequestState state = RequestState::kWaiting;
  int plans_in_flight = 0;
  // Penalty for epochs that were lost since the last new result: 4 for each in which the request
  // ran new tokens, and so may be the cause, else 1.
  int losses = 0;
  int32_t draft_tokens = 0;           // guesses that were verified, over all sequences
  int32_t accepted_draft_tokens = 0;  // the right ones of them
  // Seconds from its arrival to its first token, as foretold then (first_token.h).
  std::optional<double> predicted_first_token;
  std::optional<int32_t> cached_tokens;  // of the prompt, in the prefix cache when it began
  std::vector<Sequence> sequences;       // [candidates]

  // Pages of its prompt that files had (page_fetches.h), until it begins: from `first_fetched` on,
  // of which the cache had those before.
  bool looked_for_pages = false;
  std::shared_ptr<PageFetch> fetch;  // not null: they are being read, and it is not admitted
  Clock::time_point fetch_until;
  size_t pages_asked = 0;
  size_t first_fetched = 0;
  std::vector<PageBytes> fetched;
  size_t pages_kept = 0;  // of the cache, when it was to begin

  // The stages that must recompute its known tokens; none once it has caught up.
  StageRange missing = kNoStages;

  // Absorbed and not yet pushed (only under a policy that delivers when idle).
  std::vector<StreamToken> held_tokens;
  std::vector<TokenDetail> held_prompt;

  // The input at a position of a sequence: a token of the prompt, or one that it produced.
  int32_t InputAt(const Sequence& sequence, int32_t position) const {
    const int32_t produced = position - prompt_length();
    return produced < 0 ? spec.prompt[static_cast<size_t>(position)]
                        : sequence.output[static_cast<size_t>(produced)];
  }
  int32_t prompt_length() const { return static_cast<int32_t>(spec.prompt.size()); }
};

}  // namespace treadle
