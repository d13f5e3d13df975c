// How much a process' memory grows with what it has done.
//
// Thread safety: thread-compatible.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

namespace treadle {

class MemorySlope {
 public:
  struct Fit {
    double slope = 0, error = 0;  // bytes per request, and the slope's standard error
  };

  void Add(double requests, double bytes) { samples_.emplace_back(requests, bytes); }
  // The line through the samples behind the first third of the requests, by least squares.
  size_t size() const { return AfterWarmUp().size(); }
  Fit Fitted() const {
    const auto samples = AfterWarmUp();
    const auto count = static_cast<double>(samples.size());
    double x_mean = 0, y_mean = 0, xx = 0, xy = 0, rest = 0;
    for (const auto& [x, y] : samples) x_mean += x / count, y_mean += y / count;
    for (const auto& [x, y] : samples) {
      xx += (x - x_mean) * (x - x_mean);
      xy += (x - x_mean) * (y - y_mean);
    }
    if (samples.size() < 3 || xx == 0) return {0, INFINITY};
    const double slope = xy / xx;
    for (const auto& [x, y] : samples) rest += std::pow(y - y_mean - slope * (x - x_mean), 2);
    return {slope, std::sqrt(rest / (count - 2) / xx)};
  }

 private:
  using Samples = std::vector<std::pair<double, double>>;
  Samples AfterWarmUp() const {
    Samples later;
    for (const auto& sample : samples_) {
      if (sample.first > samples_.back().first / 3) later.push_back(sample);
    }
    return later;
  }
  Samples samples_;
};

}  // namespace treadle
