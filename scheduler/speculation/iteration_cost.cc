#include "scheduler/speculation/iteration_cost.h"

#include <algorithm>

namespace treadle {
namespace {

constexpr double kKept = 1 - 1.0 / 256;  // of an older iteration's weight, with each new one
// The first share weighs as much as iterations with this variance of their rows.
constexpr double kPriorVariance = 0.25;

}  // namespace

// Least squares, drawn towards the first share where iterations hardly differ in their rows.
void IterationCost::Note(int64_t rows, double seconds) {
  if (rows <= 0 || seconds <= 0) return;
  const auto r = static_cast<double>(rows);
  const auto add = [](double& sum, double value) { sum = sum * kKept + value; };
  add(count_, 1);
  add(rows_, r);
  add(seconds_, seconds);
  add(rows_squared_, r * r);
  add(rows_seconds_, r * seconds);
  const double mean_rows = rows_ / count_, mean_seconds = seconds_ / count_;
  const double variance = std::max(0.0, rows_squared_ / count_ - mean_rows * mean_rows);
  const double covariance = rows_seconds_ / count_ - mean_rows * mean_seconds;
  const double prior = mean_seconds * kFirstShare / (1 + (mean_rows - 1) * kFirstShare);
  per_row_ = std::clamp((covariance + prior * kPriorVariance) / (variance + kPriorVariance), 0.0,
                        mean_seconds / mean_rows);
  fixed_ = mean_seconds - mean_rows * per_row_;
}

}  // namespace treadle
