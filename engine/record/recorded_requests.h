// Maps a recording's sequences to their requests: the ledger names the requests of an
// iteration in the order in which its plan has their steps.
//
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

class RecordedRequests {
 public:
  // Plans in order, and the lines of the ledger, each after its plan.
  void Follow(const IterationPlan& plan);
  void Follow(const std::string& ledger_line);

  // The ledger's number; unset if no line named it.
  std::optional<uint64_t> RequestOf(uint64_t epoch, SequenceId sequence) const;
  // The number of the request that its client called `id` or that has this number. NotFound names
  // those that there are.
  absl::StatusOr<uint64_t> Find(const std::string& id) const;
  // A request's coming and going by a line of the ledger, as lines.
  static std::string TextOf(const std::string& ledger_line, uint64_t request);

 private:
  using Key = std::pair<uint64_t, SequenceId>;  // epoch, sequence

  std::map<uint64_t, std::string> all_;  // requests, and what their clients called them
  std::map<Key, SequenceId> first_;      // a sequence's request's first candidate
  std::map<Key, uint64_t> requests_;     // by that candidate
  // By epoch and iteration: the first candidates of its requests, in order.
  std::map<std::pair<uint64_t, uint64_t>, std::vector<SequenceId>> unnamed_;
};

}  // namespace treadle
