// How long an iteration may take before a worker is taken to hang: five times what iterations took
// lately, by their tokens and altogether (99th percentiles), at least two seconds, and never more
// than the deadline that was given. Until enough of them are known, that deadline alone.
//
// Thread safety: thread-compatible.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace treadle {

class IterationLimit {
 public:
  using Duration = std::chrono::steady_clock::duration;
  static constexpr size_t kSamples = 256, kLeast = 64;
  static constexpr Duration kFloor = std::chrono::seconds(2);

  explicit IterationLimit(Duration most) : most_(most) {}

  void Note(Duration took, int64_t tokens) {
    const auto seconds = std::chrono::duration<double>(took).count();
    const Sample sample{seconds, seconds / static_cast<double>(std::max<int64_t>(tokens, 1))};
    if (samples_.size() < kSamples) {
      samples_.push_back(sample);
    } else {
      samples_[next_] = sample;
    }
    next_ = (next_ + 1) % kSamples;
  }
  // For iterations of so many tokens together.
  Duration For(int64_t tokens) const {
    if (samples_.size() < kLeast) return most_;
    const double seconds =
        5 * std::max(Percentile99(&Sample::seconds),
                     Percentile99(&Sample::per_token) * static_cast<double>(tokens));
    const auto limit = std::max(
        kFloor, std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
    return std::min(limit, most_);
  }
  // The duration that is never too long, whatever iterations took.
  Duration Least() const { return std::min(kFloor, most_); }
  // The iteration that hit the limit may have been slow: the next ones have all the time there is.
  void Forget() {
    samples_.clear();
    next_ = 0;
  }

 private:
  struct Sample {
    double seconds, per_token;
  };
  double Percentile99(double Sample::*value) const {
    std::vector<double> values;
    for (const Sample& sample : samples_) values.push_back(sample.*value);
    const auto at = values.begin() + static_cast<int64_t>((values.size() * 99 - 1) / 100);
    std::ranges::nth_element(values, at);
    return *at;
  }

  const Duration most_;
  std::vector<Sample> samples_;
  size_t next_ = 0;
};

}  // namespace treadle
