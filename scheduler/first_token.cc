#include "scheduler/first_token.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace treadle {
namespace {

// A request that runs in the iterations to come.
struct Running {
  const Request* request = nullptr;
  int64_t prompt = 0;           // inputs left before its next token
  std::vector<int64_t> answer;  // tokens to come, of each sequence
};

// A weighted line through the points, neither part of it negative.
template <typename Points>
IterationCosts::Line WeightedFit(const Points& points, std::span<const double> weights) {
  double sum = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (size_t i = 0; i < points.size(); ++i) {
    const double weight = weights[i], rows = points[i].rows, seconds = points[i].seconds;
    sum += weight;
    x += weight * rows;
    y += weight * seconds;
    xx += weight * rows * rows;
    xy += weight * rows * seconds;
  }
  const double spread = sum * xx - x * x;
  const double slope = spread > 1e-9 * sum * xx ? (sum * xy - x * y) / spread : 0;
  if (slope <= 0) return {.per_iteration = y / sum, .per_row = 0};
  const double base = (y - slope * x) / sum;
  if (base < 0) return {.per_iteration = 0, .per_row = xy / xx};
  return {.per_iteration = base, .per_row = slope};
}

}  // namespace

void IterationCosts::Note(int64_t rows, double seconds) {
  points_.push_back({static_cast<double>(rows), seconds});
  if (points_.size() > kKept) points_.pop_front();
}

// Least absolute deviations by iteratively reweighted least squares (Schlossmacher 1973).
std::optional<IterationCosts::Line> IterationCosts::Fit() const {
  if (points_.size() < kEnough) return std::nullopt;
  constexpr int kRounds = 12;
  std::vector<double> weights(points_.size(), 1);
  Line line;
  for (int round = 0; round < kRounds; ++round) {
    line = WeightedFit(points_, weights);
    const double least = 1e-4 * line.Of(1) + 1e-12;
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = 1 / std::max(least, std::abs(points_[i].seconds - line.Of(points_[i].rows)));
    }
  }
  return line;
}

void FirstTokenForecast::NoteAnswer(int64_t tokens, int64_t most) {
  constexpr double kOfLast = 1.0 / 16;
  answer_part_ +=
      kOfLast * (static_cast<double>(tokens) / static_cast<double>(most) - answer_part_);
}

int64_t FirstTokenForecast::TokensToCome(const Request& request, const Sequence& sequence) const {
  if (sequence.finished) return 0;
  const double all = answer_part_ * request.spec.max_new_tokens;
  return std::max<int64_t>(1, std::llround(all) - sequence.produced - sequence.in_flight);
}

std::optional<double> FirstTokenForecast::Predict(const PolicyView& view,
                                                  std::span<Request* const> order,
                                                  const Request& asked,
                                                  std::span<const int64_t> rows_in_flight,
                                                  double give_up) const {
  const std::optional<IterationCosts::Line> costs = costs_.Fit();
  if (!costs) return std::nullopt;
  double time = 0;
  for (const int64_t rows : rows_in_flight) time += costs->Of(static_cast<double>(rows));

  const auto to_run = [&](const Request& request) {
    Running running{.request = &request, .prompt = request.prompt_length(), .answer = {}};
    if (request.state == RequestState::kRunning) running.prompt = InputsLeft(request);
    if (view.cached && (request.state == RequestState::kWaiting || IsToBegin(request))) {
      running.prompt -= view.cached(request).tokens;
    }
    for (const Sequence& sequence : request.sequences) {
      running.answer.push_back(TokensToCome(request, sequence));
    }
    return running;
  };
  std::vector<Running> batch;
  KvCapacity left = view.kv;
  int64_t sequences = 0;
  size_t next = 0;  // of `order`
  while (time <= give_up) {
    for (; next < order.size(); ++next) {
      const Request& request = *order[next];
      const int64_t size = BatchSequences(request);
      if (request.state == RequestState::kWaiting) {
        if (!batch.empty() && sequences + size > view.limits.max_batch_size) break;
        if (!Admits(view, left, request) && !batch.empty()) break;
      }
      sequences += size;
      batch.push_back(to_run(request));
    }
    // The next iterations that are alike: until somebody's prompt or answer is over.
    int64_t decoding = 0, alike = std::numeric_limits<int64_t>::max(), prompts = 0;
    for (const Running& running : batch) {
      if (running.prompt > 0) continue;
      for (const int64_t tokens : running.answer) {
        if (tokens == 0) continue;
        ++decoding;
        alike = std::min(alike, tokens);
      }
    }
    const int64_t budget = std::max<int64_t>(1, view.limits.max_batch_tokens - decoding);
    for (const Running& running : batch) {
      if (running.prompt == 0) continue;
      if (prompts == 0) alike = std::min(alike, std::max<int64_t>(1, running.prompt / budget));
      prompts += running.prompt;
    }
    if (decoding + prompts == 0) alike = 0;
    int64_t given = std::min(prompts, alike * budget);
    time += static_cast<double>(alike) * costs->per_iteration +
            costs->per_row * static_cast<double>(alike * decoding + given);
    for (Running& running : batch) {
      if (running.prompt > 0) {
        const int64_t own = std::min(given, running.prompt);
        running.prompt -= own;
        given -= own;
        if (running.prompt > 0) continue;
        if (running.request == &asked) return time;
        for (int64_t& tokens : running.answer) tokens -= tokens > 0 ? 1 : 0;
      } else {
        for (int64_t& tokens : running.answer) tokens -= std::min(tokens, alike);
      }
    }
    std::erase_if(batch, [&](const Running& running) {
      if (running.prompt > 0 ||
          std::ranges::any_of(running.answer, [](int64_t t) { return t > 0; }))
        return false;
      sequences -= BatchSequences(*running.request);
      const PageCounts freed = PagesNeeded(running.request->spec, left.paging);
      for (const PageKind kind : kPageKinds) left.free_pages[kind] += freed[kind];
      return true;
    });
    if (batch.empty()) left.free_pages = left.total_pages;
  }
  return time;
}

}  // namespace treadle
