#include "scheduler/cost/iteration_cost.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

namespace treadle {
namespace {

constexpr size_t kParts = 4;
using Parts = std::array<double, kParts>;
constexpr double kPositions = 1024;  // as many count as one, so that parts are of a size

struct Equations {
  std::array<Parts, kParts> matrix = {};
  Parts right = {};

  void Add(double weight, const Parts& factors, double value) {
    for (size_t i = 0; i < kParts; ++i) {
      right[i] += weight * factors[i] * value;
      for (size_t k = 0; k < kParts; ++k) matrix[i][k] += weight * factors[i] * factors[k];
    }
  }
};

// By elimination; the matrix is positive definite. Parts that are not `free` are 0.
Parts Solve(Equations equations, const std::array<bool, kParts>& free) {
  auto& [matrix, right] = equations;
  for (size_t i = 0; i < kParts; ++i) {
    if (free[i]) continue;
    for (size_t k = 0; k < kParts; ++k) matrix[i][k] = matrix[k][i] = 0;
    matrix[i][i] = 1;
    right[i] = 0;
  }
  for (size_t i = 0; i < kParts; ++i) {
    for (size_t below = i + 1; below < kParts; ++below) {
      const double times = matrix[below][i] / matrix[i][i];
      for (size_t k = i; k < kParts; ++k) matrix[below][k] -= times * matrix[i][k];
      right[below] -= times * right[i];
    }
  }
  Parts parts;
  for (size_t i = kParts; i-- > 0;) {
    double rest = right[i];
    for (size_t k = i + 1; k < kParts; ++k) rest -= matrix[i][k] * parts[k];
    parts[i] = rest / matrix[i][i];
  }
  return parts;
}

// None negative: the most negative one is left out until there is none.
Parts SolveNonnegative(const Equations& equations) {
  std::array<bool, kParts> free = {true, true, true, true};
  while (true) {
    const Parts parts = Solve(equations, free);
    const auto least = std::ranges::min_element(parts);
    if (!(*least < 0)) return parts;  // or no number
    free[static_cast<size_t>(least - parts.begin())] = false;
  }
}

// A square with this weight is the deviation itself, relative to `expected`, which may be 0.
double WeightOf(double deviation, double expected) {
  const double of = std::max(expected, 1e-3 * std::abs(deviation));
  return 1 / (of * std::max(1e-4 * of, std::abs(deviation)));
}

}  // namespace

IterationWork WorkOf(const IterationPlan& plan) {
  IterationWork work = 0;
  for (const Step& step : plan.steps) {
    const auto rows = static_cast<double>(step.num_tokens);
    work.rows += rows;
    work.positions += rows * (static_cast<double>(step.first_position) + (rows + 1) / 2);
    work.samples += static_cast<double>(step.outputs.size());
  }
  return work;
}

void IterationCost::Note(const IterationWork& work, double seconds) {
  if (work.rows < 1 || seconds <= 0) return;
  const auto power = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(work.rows)));
  std::deque<Point>& alike = kept_[std::min(kept_.size(), power) - 1];
  if (alike.size() == kKept) alike.pop_front();
  alike.push_back({work, seconds});
  ++noted_;
  size_t points = 0;
  for (const std::deque<Point>& of_a_size : kept_) points += of_a_size.size();
  if (++unfitted_ * kKept >= points) Fit();
}

void IterationCost::Fit() {
  unfitted_ = 0;
  std::vector<std::pair<Point, double>> weighted;
  for (const std::deque<Point>& of_a_size : kept_) {
    for (const Point& point : of_a_size) {
      weighted.push_back({point, 1 / (point.seconds * point.seconds)});
    }
  }
  constexpr int kRounds = 12;
  for (int round = 0; round < kRounds; ++round) {
    Equations equations;
    double sum = 0, rows = 0, seconds = 0;
    for (const auto& [point, weight] : weighted) {
      const IterationWork& work = point.work;
      equations.Add(weight, {1, work.rows, work.positions / kPositions, work.samples},
                    point.seconds);
      sum += weight;
      rows += weight * work.rows;
      seconds += weight * point.seconds;
    }
    // An expectation of a row, a position or a sample counts as an iteration of one row each.
    const double one_row = seconds / (sum + (rows - sum) * kFirstShare);
    const auto expect = [&](double part, double expected, const Parts& factors) {
      equations.Add(round == 0 ? 1 / (one_row * one_row) : WeightOf(part - expected, one_row),
                    factors, expected);
    };
    expect(per_row_, one_row * kFirstShare, {0, 1, 0, 0});
    expect(per_position_ * kPositions, one_row * position_share_ * kPositions, {0, 0, 1, 0});
    expect(per_sample_, 0, {0, 0, 0, 1});
    const Parts parts = SolveNonnegative(equations);
    // Times may differ by more than the arithmetic can tell apart.
    if (!std::ranges::all_of(parts, [](double part) { return std::isfinite(part); })) return;
    per_iteration_ = parts[0];
    per_row_ = parts[1];
    per_position_ = parts[2] / kPositions;
    per_sample_ = parts[3];
    for (auto& [point, share] : weighted) {
      const double expected = Of(point.work);
      share = WeightOf(point.seconds - expected, expected);
    }
  }
}

}  // namespace treadle
