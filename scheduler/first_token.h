// Foretells when the first token of a request that has just come will be there, if it is accepted:
// what the iterations before it will cost, by how many there are and how many rows they have.
//
// The iterations to come are played through as the planner would make them: who is admitted when
// (sequences, pages), whose prompt gets which part of max_batch_tokens, and who ends. How long
// answers will be nobody knows: each is taken to have the part of its max_new_tokens that answers
// had lately.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "scheduler/cost/iteration_cost.h"
#include "scheduler/policy.h"

namespace treadle {

class FirstTokenForecast {
 public:
  // `cost` outlives it.
  explicit FirstTokenForecast(const IterationCost& cost) : cost_(cost) {}
  // An answer had so many tokens of as many as it might.
  void NoteAnswer(int64_t tokens, int64_t most);

  // Seconds from now until the first token of `asked`. `order`: all live requests, those that run
  // before those that wait, and these in the order in which they will be admitted; `asked` among
  // them. `in_flight`: seconds that plans which were submitted take. Nullopt while costs are not
  // known. Where it takes longer than `give_up`, it is some number beyond that.
  std::optional<double> Predict(const PolicyView& view, std::span<Request* const> order,
                                const Request& asked, double in_flight, double give_up) const;

 private:
  int64_t TokensToCome(const Request& request, const Sequence& sequence) const;

  const IterationCost& cost_;
  double answer_part_ = 1;
};

}  // namespace treadle
