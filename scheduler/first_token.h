// Foretells when the first token of a request that has just come will be there, if it is accepted:
// what the iterations before it will cost, by how many there are and how many rows they have.
//
// An iteration is taken to cost a + b * rows seconds. Both are fitted to the last iterations by
// least absolute deviations, so that one that was interrupted does not count for more than another.
// The iterations to come are played through as the planner would make them: who is admitted when
// (sequences, pages), whose prompt gets which part of max_batch_tokens, and who ends. How long
// answers will be nobody knows: each is taken to have the part of its max_new_tokens that answers
// had lately.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>

#include "scheduler/policy.h"

namespace treadle {

class IterationCosts {
 public:
  static constexpr size_t kKept = 128;
  static constexpr size_t kEnough = 16;

  // An iteration of so many rows took so long.
  void Note(int64_t rows, double seconds);
  struct Line {
    double per_iteration = 0;  // seconds
    double per_row = 0;
    double Of(double rows) const { return per_iteration + per_row * rows; }
  };
  // Neither part is negative. Nullopt before kEnough iterations.
  std::optional<Line> Fit() const;

 private:
  struct Point {
    double rows, seconds;
  };
  std::deque<Point> points_;
};

class FirstTokenForecast {
 public:
  void NoteIteration(int64_t rows, double seconds) { costs_.Note(rows, seconds); }
  // An answer had so many tokens of as many as it might.
  void NoteAnswer(int64_t tokens, int64_t most);

  // Seconds from now until the first token of `asked`. `order`: all live requests, those that run
  // before those that wait, and these in the order in which they will be admitted; `asked` among
  // them. `rows_in_flight`: of plans that were submitted. Nullopt while costs are not known. Where
  // it takes longer than `give_up`, it is some number beyond that.
  std::optional<double> Predict(const PolicyView& view, std::span<Request* const> order,
                                const Request& asked, std::span<const int64_t> rows_in_flight,
                                double give_up) const;

 private:
  int64_t TokensToCome(const Request& request, const Sequence& sequence) const;

  IterationCosts costs_;
  double answer_part_ = 1;
};

}  // namespace treadle
