#include "bench/load/trace.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_split.h"
#include "base/number.h"
#include "base/status.h"

namespace treadle {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
uint64_t TraceRandom::Next() {
  uint64_t mixed = state_ += 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return mixed ^ (mixed >> 31);
}

double TraceRandom::Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

double TraceRandom::Normal() {  // Box-Muller
  const double radius = std::sqrt(-2 * std::log(1 - Uniform()));
  return radius * std::cos(2 * M_PI * Uniform());
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).
double TraceRandom::Gamma(double shape) {
  if (shape < 1) return Gamma(shape + 1) * std::pow(1 - Uniform(), 1 / shape);
  const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = Normal(), root = 1 + c * x;
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(1 - Uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

int32_t TraceRandom::Length(const LengthRange& lengths) {
  if (lengths.mean == 0) {
    const auto span = static_cast<uint64_t>(lengths.high - lengths.low + 1);
    return lengths.low + static_cast<int32_t>(Next() % span);
  }
  const double ratio = lengths.deviation / lengths.mean;
  const double variance = std::log1p(ratio * ratio);  // of the logarithm
  const double tokens = lengths.mean * std::exp(std::sqrt(variance) * Normal() - variance / 2);
  return static_cast<int32_t>(std::clamp<double>(std::round(tokens), lengths.low, lengths.high));
}

absl::StatusOr<LengthRange> ParseLengthRange(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  std::vector<std::optional<double>> numbers;
  const bool normal = parts[0] == "lognormal";
  for (size_t i = normal ? 1 : 0; i < parts.size(); ++i) {
    const std::optional<int32_t> whole = NumberIn<int32_t>(parts[i]);
    numbers.push_back(normal && i < 3 ? NumberIn<double>(parts[i])
                      : whole         ? std::optional<double>(*whole)
                                      : std::nullopt);
  }
  const bool given = std::ranges::all_of(numbers, [](const std::optional<double>& number) {
    return number && std::isfinite(*number) && *number <= kMaxTokens;
  });
  if (given && normal && (numbers.size() == 2 || numbers.size() == 3) && *numbers[0] >= 1 &&
      *numbers[1] > 0 && (numbers.size() == 2 || *numbers[2] >= *numbers[0])) {
    const double most = numbers.size() == 3 ? *numbers[2] : kMaxTokens;
    return LengthRange{1, static_cast<int32_t>(most), *numbers[0], *numbers[1]};
  }
  if (given && !normal && numbers.size() <= 2 && *numbers[0] >= 1 &&
      *numbers.back() >= *numbers[0]) {
    return LengthRange{static_cast<int32_t>(*numbers[0]), static_cast<int32_t>(*numbers.back())};
  }
  return InvalidArgument("length '", text,
                         "': expected N, LOW:HIGH with 1 <= LOW <= HIGH, or "
                         "lognormal:MEAN:STDDEV[:MAX] with 1 <= MEAN <= MAX and STDDEV above 0");
}

void Schedule(const SyntheticTrace& options, std::vector<TraceEntry>& trace) {
  TraceRandom random(options.seed);
  double time = 0;
  for (TraceEntry& entry : trace) {
    if (entry.after >= 0) continue;
    entry.arrival = time;
    if (options.request_rate == 0) continue;
    const double shape = options.burstiness;
    time += (std::isinf(shape) ? 1 : random.Gamma(shape) / shape) / options.request_rate;
  }
}

std::vector<TraceEntry> MakeTrace(const SyntheticTrace& options) {
  TraceRandom random(~options.seed);
  std::vector<TraceEntry> trace;
  for (int64_t i = 0; i < options.num_requests; ++i) {
    const int32_t input = random.Length(options.input);
    trace.push_back({0, input, random.Length(options.output)});
  }
  Schedule(options, trace);
  return trace;
}

}  // namespace treadle
