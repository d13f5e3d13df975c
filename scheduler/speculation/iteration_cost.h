// How long an iteration takes by the number of its rows: fixed + rows * per_row seconds, fitted to
// those that ran. What it says changes when something runs, never what comes of it.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>

namespace treadle {

class IterationCost {
 public:
  // The share of a row in an iteration of one row, as long as nothing else is known.
  static constexpr double kFirstShare = 0.2;

  // An iteration of so many rows took so long. Nothing is learnt from one of no rows or no time.
  void Note(int64_t rows, double seconds);

  // Seconds; before anything was noted, in units of an iteration of one row.
  double Of(double rows) const { return fixed_ + rows * per_row_; }
  double per_row() const { return per_row_; }

 private:
  // Sums over iterations, of which older ones count less.
  double count_ = 0, rows_ = 0, seconds_ = 0, rows_squared_ = 0, rows_seconds_ = 0;
  double fixed_ = 1 - kFirstShare, per_row_ = kFirstShare;
};

}  // namespace treadle
