#include "bench/load/load_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "base/number.h"
#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kMetrics[] = {"ttft",      "tpot", "itl", "e2el", "normalized_latency",
                                    "client_lag"};

std::string PercentKey(double percent) {
  std::string text = Str(percent);
  std::replace(text.begin(), text.end(), '.', '_');
  return "p" + text;
}

struct Distribution {
  std::vector<double> sorted;
  double mean = 0, median = 0, std = 0;  // 0 without samples
};

Distribution DistributionOf(const LoadReport& report, const std::string& name) {
  Distribution result;
  const auto found = report.samples_ms.find(name);
  if (found == report.samples_ms.end()) return result;
  result.sorted = found->second;
  std::sort(result.sorted.begin(), result.sorted.end());
  const auto count = static_cast<double>(result.sorted.size());
  for (double value : result.sorted) result.mean += value;
  result.mean /= count;
  for (double value : result.sorted) result.std += (value - result.mean) * (value - result.mean);
  result.std = std::sqrt(result.std / count);
  result.median = Percentile(result.sorted, 50);
  return result;
}

// The part of a run that counts, in seconds: requests that arrive in it.
struct Window {
  double from = 0;
  double to = 0;
  bool whole = true;  // all of the run, up to the last answer's end

  bool Has(double time) const { return whole || (from <= time && time <= to); }
};

Window WindowOf(const LoadResult& result, double steady_from) {
  Window window = {0, result.duration, steady_from <= 0};
  if (window.whole) return window;
  window = {steady_from, steady_from, false};
  for (const LoadRecord& request : result.requests) {
    window.to = std::max(window.to, request.scheduled);
  }
  return window;
}

// As vLLM counts: tokens by whole seconds from the first request on, and requests that are under
// way at once; of requests that completed.
void FindPeaks(const LoadResult& result, LoadReport& report) {
  std::map<int64_t, int64_t> tokens;
  std::vector<std::pair<double, int64_t>> events;
  double first = INFINITY;
  for (const LoadRecord& request : result.requests) first = std::min(first, request.sent);
  for (const LoadRecord& request : result.requests) {
    if (!request.error.empty() || request.token_times.empty()) continue;
    for (const double time : request.token_times) ++tokens[static_cast<int64_t>(time - first)];
    events.emplace_back(request.sent, 1);
    events.emplace_back(request.end, -1);
  }
  for (const auto& [second, count] : tokens) {
    report.max_output_tokens_per_s =
        std::max(report.max_output_tokens_per_s, static_cast<double>(count));
  }
  std::sort(events.begin(), events.end());  // an end before a begin at the same time
  int64_t running = 0;
  for (const auto& [time, change] : events) {
    running += change;
    report.max_concurrent_requests = std::max(report.max_concurrent_requests, running);
  }
}

// The quantile at 97.5 % of Student's t with so many degrees of freedom. Abramowitz and Stegun,
// table 26.10 and 26.7.5.
double StudentT(size_t freedom) {
  static constexpr double kTable[] = {0,      12.7062, 4.3027, 3.1824, 2.7764,
                                      2.5706, 2.4469,  2.3646, 2.3060, 2.2622};
  if (freedom < std::size(kTable)) return kTable[freedom];
  constexpr double z = 1.959964, z3 = z * z * z, z5 = z3 * z * z, z7 = z5 * z * z;
  const auto n = static_cast<double>(freedom);
  return z + (z3 + z) / (4 * n) + (5 * z5 + 16 * z3 + 3 * z) / (96 * n * n) +
         (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * n * n * n);
}

}  // namespace

double Percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  const double rank = percent / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (rank - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

absl::StatusOr<std::map<std::string, double>> ParseGoodput(const std::vector<std::string>& bounds) {
  std::map<std::string, double> result;
  for (const std::string& bound : bounds) {
    const size_t colon = bound.find(':');
    const std::string name = bound.substr(0, colon);
    const auto ms = NumberIn<double>(colon == bound.npos ? "" : bound.substr(colon + 1));
    const bool known = name == "ttft" || name == "tpot" || name == "itl" || name == "e2el";
    if (!known || !ms || !(*ms > 0)) {
      return InvalidArgument("--goodput ", bound, ": expected ttft:MS, tpot:MS, itl:MS or e2el:MS");
    }
    result[name] = *ms;
  }
  return result;
}

LoadReport Analyze(const LoadResult& result, const LoadReportOptions& options) {
  const std::map<std::string, double>& goodput = options.goodput;
  const Window window = WindowOf(result, options.steady_from);
  LoadReport report;
  report.duration = window.to - window.from;
  if (!goodput.empty()) report.good = 0;
  int64_t ended = 0, output = 0, input = 0;  // within the window
  for (const LoadRecord& request : result.requests) {
    const bool failed = !request.error.empty() || request.token_times.empty();
    for (const double time : request.token_times) output += !failed && window.Has(time) ? 1 : 0;
    if (!failed && window.Has(request.end)) {
      ++ended;
      input += request.input_tokens;
    }
    if (!window.Has(request.scheduled)) continue;
    if (failed) {
      ++report.failed;
      continue;
    }
    ++report.completed;
    report.total_input_tokens += request.input_tokens;
    report.total_output_tokens += request.output_tokens;
    const double e2el = (request.end - request.scheduled) * 1e3;
    const double ttft = (request.token_times.front() - request.scheduled) * 1e3;
    std::map<std::string, double> mine = {{"ttft", ttft},
                                          {"e2el", e2el},
                                          {"normalized_latency", e2el / request.output_tokens},
                                          {"client_lag", request.lag * 1e3}};
    if (request.output_tokens > 1) mine["tpot"] = (e2el - ttft) / (request.output_tokens - 1);
    for (const auto& [name, value] : mine) report.samples_ms[name].push_back(value);
    double worst_gap = 0;
    for (size_t i = 1; i < request.token_times.size(); ++i) {
      const double gap = (request.token_times[i] - request.token_times[i - 1]) * 1e3;
      report.samples_ms["itl"].push_back(gap);
      worst_gap = std::max(worst_gap, gap);
    }
    mine["itl"] = worst_gap;
    const bool good = std::all_of(goodput.begin(), goodput.end(), [&](const auto& bound) {
      const auto found = mine.find(bound.first);
      return found == mine.end() || found->second <= bound.second;
    });
    if (!goodput.empty() && good) ++report.good;
  }
  const auto per_second = [&](int64_t count) {
    return report.duration > 0 ? static_cast<double>(count) / report.duration : 0;
  };
  report.request_throughput = per_second(ended);
  report.output_throughput = per_second(output);
  report.total_token_throughput = per_second(output + input);
  if (report.good >= 0) report.goodput = per_second(report.good);
  FindPeaks(result, report);
  const double lag = Percentile(DistributionOf(report, "client_lag").sorted, 99);
  report.client_was_late = lag > 1 && lag > 0.05 * DistributionOf(report, "ttft").median;
  return report;
}

Json ToJson(const LoadReport& report, const LoadResult& result, bool details,
            const LoadReportOptions& options, Json json) {
  json["duration"] = report.duration;
  json["completed"] = report.completed;
  json["failed"] = report.failed;
  json["total_input_tokens"] = report.total_input_tokens;
  json["total_output_tokens"] = report.total_output_tokens;
  json["request_throughput"] = report.request_throughput;
  json["request_goodput"] = report.good >= 0 ? Json(report.goodput) : Json();
  json["output_throughput"] = report.output_throughput;
  json["total_token_throughput"] = report.total_token_throughput;
  json["max_output_tokens_per_s"] = report.max_output_tokens_per_s;
  json["max_concurrent_requests"] = report.max_concurrent_requests;
  json["client_was_late"] = report.client_was_late;
  for (const char* name : kMetrics) {
    const Distribution d = DistributionOf(report, name);
    json[Str("mean_", name, "_ms")] = d.mean;
    json[Str("median_", name, "_ms")] = d.median;
    json[Str("std_", name, "_ms")] = d.std;
    for (double percent : options.percentiles) {
      json[Str(PercentKey(percent), "_", name, "_ms")] = Percentile(d.sorted, percent);
    }
  }
  if (!details) return json;
  for (const char* list : {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times",
                           "queue_times", "errors"}) {
    json[list] = Json::array();
  }
  for (const LoadRecord& request : result.requests) {
    const std::vector<double>& times = request.token_times;
    json["input_lens"].push_back(request.input_tokens);
    json["output_lens"].push_back(request.output_tokens);
    json["ttfts"].push_back(times.empty() ? 0.0 : times.front() - request.scheduled);
    Json gaps = Json::array();
    for (size_t i = 1; i < times.size(); ++i) gaps.push_back(times[i] - times[i - 1]);
    json["itls"].push_back(std::move(gaps));
    json["latencies"].push_back(request.end - request.scheduled);
    json["start_times"].push_back(request.scheduled);
    json["queue_times"].push_back(request.sent - request.scheduled);
    json["errors"].push_back(request.error);
  }
  return json;
}

Json MeanOverSeeds(const std::vector<Json>& reports) {
  const auto n = static_cast<double>(reports.size());
  Json means = reports[0];
  means["seeds"] = reports.size();
  for (const auto& [name, first] : reports[0].items()) {
    if (!first.is_number() || name == "seed") continue;
    double mean = 0, squares = 0;
    bool all = true;
    for (const Json& report : reports) {
      all = all && report.contains(name) && report[name].is_number();
      if (all) mean += report[name].get<double>() / n;
    }
    if (!all) continue;
    for (const Json& report : reports) squares += std::pow(report[name].get<double>() - mean, 2);
    means[name] = mean;
    means["ci95_" + name] = StudentT(reports.size() - 1) * std::sqrt(squares / (n - 1) / n);
  }
  return means;
}

std::string ToTable(const Json& means) {
  std::string table = absl::StrFormat("means over %d seeds, with 95 %% confidence intervals\n",
                                      means["seeds"].get<int64_t>());
  for (const auto& [name, value] : means.items()) {
    const std::string interval = "ci95_" + name;
    if (!means.contains(interval) || means[interval] == 0.0) continue;  // the same in all
    absl::StrAppendFormat(&table, "%-28s %12.3f +- %.3f\n", name, value.get<double>(),
                          means[interval].get<double>());
  }
  return table;
}

std::string ToTable(const LoadReport& report, const LoadReportOptions& options) {
  std::string table;
  const auto add = [&](const char* name, double value, const char* unit) {
    absl::StrAppendFormat(&table, "%-28s %12.3f %s\n", name, value, unit);
  };
  add("completed requests", static_cast<double>(report.completed), "");
  add("failed requests", static_cast<double>(report.failed), "");
  add("duration", report.duration, "s");
  add("request throughput", report.request_throughput, "requests/s");
  add("output throughput", report.output_throughput, "tokens/s");
  add("total token throughput", report.total_token_throughput, "tokens/s");
  add("peak output throughput", report.max_output_tokens_per_s, "tokens/s");
  add("peak concurrent requests", static_cast<double>(report.max_concurrent_requests), "");
  if (report.good >= 0) add("goodput", report.goodput, "requests/s");
  for (const char* name : kMetrics) {
    const Distribution d = DistributionOf(report, name);
    absl::StrAppendFormat(&table, "%-20s mean %10.2f  median %10.2f", name, d.mean, d.median);
    for (double percent : options.percentiles) {
      absl::StrAppendFormat(&table, "  p%g %10.2f", percent, Percentile(d.sorted, percent));
    }
    table += " ms\n";
  }
  if (report.client_was_late) {
    table +=
        "THE CLIENT WAS LATE: latencies are partly its own (client_lag); give it a core of its "
        "own, "
        "or a lower rate\n";
  }
  return table;
}

}  // namespace treadle
