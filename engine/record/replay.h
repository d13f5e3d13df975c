// Runs the plans of a recording again and compares every token and, where the plan asked for them,
// every log probability and embedding.
//
// Steps are given the tokens that were recorded, so that what differs in one iteration does not
// make the next ones differ. A plan that the server did not answer any more (an epoch that
// ended, a server that was killed) is not run.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/record/recorded_requests.h"
#include "engine/record/recording.h"
#include "engine/record/replay_stages.h"

namespace treadle {

// An iteration of a recording.
struct RecordedPlace {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  friend auto operator<=>(const RecordedPlace&, const RecordedPlace&) = default;
};

// Iterations of an epoch, both ends included.
struct RecordedRange {
  uint64_t first = 0;
  uint64_t last = 0;
};

// The summary of one pass over a recording.
struct RecordingSummary {
  RecordedSetup setup;
  PageCounts pages_used;                     // no plan names more: as many as setup's have, at most
  std::optional<RecordedPlace> last;         // that was answered
  std::map<uint64_t, RecordedRange> epochs;  // the answered iterations of each
  int64_t iterations = 0;                    // answered
  int64_t unanswered = 0;                    // told and not answered
  std::map<uint64_t, RecordedAdapter> adapters;  // by id
  std::vector<std::string> epoch_ends;           // "epoch 3: worker ... is lost"
  std::string end;                               // why the recording ended; empty: in the middle
  size_t cut_off = 0;                            // bytes at the end that are no whole entry
  RecordedRequests requests;

  // NotFound names the iterations that were answered, if this is none of them.
  absl::Status CheckPlace(const RecordedPlace& place) const;
};
// InvalidArgument: the recording is damaged, or an entry means nothing.
absl::StatusOr<RecordingSummary> Summarize(std::string_view recording);

struct ReplayDifference {
  RecordedPlace at;
  SequenceId sequence = 0;
  uint32_t candidate = 0;
  size_t step = 0;        // in the plan
  int32_t position = 0;   // of the token that is sampled, in its sequence
  std::string what = {};  // "token is 5, recorded 7"
};

struct ReplayOptions {
  uint64_t first_epoch = 0;            // epochs before are not run
  std::optional<RecordedPlace> until;  // the last one to run
  // By how much a log probability may differ. 0: in no bit.
  float tolerance = 0;
  // Before a plan is run, and after it (false: stop here). Either may be empty.
  std::function<void(const IterationPlan&)> before;
  std::function<bool()> after;
};

struct ReplayReport {
  int64_t iterations = 0;  // run and compared
  int64_t tokens = 0;      // compared, as are:
  int64_t logprobs = 0;
  std::optional<ReplayDifference> difference;  // the first; nothing is run after it
};

// `max_batch_tokens`: as the recording's setup says. Errors: Summarize's, the runner's.
absl::StatusOr<ReplayReport> Replay(std::string_view recording, int64_t max_batch_tokens,
                                    PlanRunner& runner, const ReplayOptions& options);

// All that is known of one request, by the ledger's number or by the client's own id: when it came,
// its tokens iteration by iteration, how it ended. Lines of text, with `text_of` each token;
// without it they have no texts. NotFound: it is not there.
absl::StatusOr<std::string> DumpRequest(std::string_view recording, const std::string& request,
                                        std::function<std::string(int32_t token)> text_of = {});

}  // namespace treadle
