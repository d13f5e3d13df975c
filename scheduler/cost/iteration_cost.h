// How long an iteration takes: a part for itself, one for each of its rows, one for each position
// of the K/V cache that a row reads, and one for each row that something is sampled after. All that
// the scheduler expects of times is this: which guesses are worth a row, when a first token will be
// there, how large a batch should be.
//
// The parts are fitted to iterations that ran, none of them negative, by least absolute relative
// deviations (iteratively reweighted least squares, Schlossmacher 1973): an iteration that was
// interrupted counts no more than another, and one of a row as much as one of five hundred. The
// last kKept of each power of two of rows count, so a prompt's cost is remembered while nothing but
// single tokens run. Where iterations are too much alike to tell the parts apart, these are as
// kFirstShare and the position's share say.
//
// It decides when something runs, never what comes of it. Thread safety: confined to the
// serving loop's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "engine/plan/iteration_plan.h"

namespace treadle {

struct IterationWork {
  // A number of rows alone is one, too.
  IterationWork(double all_rows, double read = 0, double sampled = 0)  // NOLINT
      : rows(all_rows), positions(read), samples(sampled) {}
  double rows;
  double positions;  // that all rows read, each its own and all before it
  double samples;    // rows with an output
};

IterationWork WorkOf(const IterationPlan& plan);

class IterationCost {
 public:
  // The share of a row in an iteration of one row, as long as nothing else is known.
  static constexpr double kFirstShare = 0.2;
  static constexpr size_t kKept = 16;   // iterations of each power of two of rows
  static constexpr size_t kEnough = 8;  // iterations after which it is known

  // `position_share`: the same share of a position, for instance its bytes over the weights'.
  explicit IterationCost(double position_share = 0) : position_share_(position_share) {}

  // An iteration took so long. Nothing is learnt from one of no rows or no time.
  void Note(const IterationWork& work, double seconds);
  size_t noted() const { return noted_; }
  bool known() const { return noted_ >= kEnough; }

  // Seconds; before anything was noted, in units of an iteration of one row.
  double Of(const IterationWork& work) const {
    return per_iteration_ + work.rows * per_row_ + work.positions * per_position_ +
           work.samples * per_sample_;
  }
  double per_iteration() const { return per_iteration_; }
  double per_row() const { return per_row_; }
  double per_position() const { return per_position_; }
  double per_sample() const { return per_sample_; }
  // For one more row that something is sampled after, at the first position.
  double per_token() const { return per_row_ + per_sample_; }

 private:
  struct Point {
    IterationWork work;
    double seconds;
  };
  void Fit();

  const double position_share_;
  std::array<std::deque<Point>, 32> kept_;  // by the power of two
  size_t noted_ = 0, unfitted_ = 0;
  double per_iteration_ = 1 - kFirstShare, per_row_ = kFirstShare;
  double per_position_ = position_share_, per_sample_ = 0;
};

}  // namespace treadle
