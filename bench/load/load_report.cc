#include "bench/load/load_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr const char* kMetrics[] = {"ttft", "tpot", "itl", "e2el", "normalized_latency"};

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

}  // namespace

double Percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  const double rank = percent / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (rank - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

LoadReport Analyze(const LoadResult& result, const std::map<std::string, double>& goodput) {
  LoadReport report;
  report.duration = result.duration;
  if (!goodput.empty()) report.good = 0;
  for (const LoadRecord& request : result.requests) {
    if (!request.error.empty() || request.token_times.empty()) {
      ++report.failed;
      continue;
    }
    ++report.completed;
    report.total_input_tokens += request.input_tokens;
    report.total_output_tokens += request.output_tokens;
    const double e2el = (request.end - request.scheduled) * 1e3;
    const double ttft = (request.token_times.front() - request.scheduled) * 1e3;
    std::map<std::string, double> mine = {
        {"ttft", ttft}, {"e2el", e2el}, {"normalized_latency", e2el / request.output_tokens}};
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
  report.request_throughput = per_second(report.completed);
  report.output_throughput = per_second(report.total_output_tokens);
  report.total_token_throughput =
      per_second(report.total_output_tokens + report.total_input_tokens);
  if (report.good >= 0) report.goodput = per_second(report.good);
  return report;
}

std::string ToJson(const LoadReport& report, const LoadResult& result, bool details,
                   const std::vector<double>& percentiles,
                   const std::map<std::string, std::string>& extra) {
  nlohmann::ordered_json json;
  for (const auto& [key, value] : extra) json[key] = value;
  json["duration"] = report.duration;
  json["completed"] = report.completed;
  json["failed"] = report.failed;
  json["total_input_tokens"] = report.total_input_tokens;
  json["total_output_tokens"] = report.total_output_tokens;
  json["request_throughput"] = report.request_throughput;
  json["output_throughput"] = report.output_throughput;
  json["total_token_throughput"] = report.total_token_throughput;
  if (report.good >= 0) json["request_goodput"] = report.goodput;
  for (const char* name : kMetrics) {
    const Distribution d = DistributionOf(report, name);
    json[Str("mean_", name, "_ms")] = d.mean;
    json[Str("median_", name, "_ms")] = d.median;
    json[Str("std_", name, "_ms")] = d.std;
    for (double percent : percentiles) {
      json[Str(PercentKey(percent), "_", name, "_ms")] = Percentile(d.sorted, percent);
    }
  }
  if (details) {
    for (const LoadRecord& request : result.requests) {
      const std::vector<double>& times = request.token_times;
      json["input_lens"].push_back(request.input_tokens);
      json["output_lens"].push_back(request.output_tokens);
      json["ttfts"].push_back(times.empty() ? 0.0 : times.front() - request.scheduled);
      auto gaps = nlohmann::ordered_json::array();
      for (size_t i = 1; i < times.size(); ++i) gaps.push_back(times[i] - times[i - 1]);
      json["itls"].push_back(std::move(gaps));
      json["errors"].push_back(request.error);
    }
  }
  return json.dump();
}

std::string ToTable(const LoadReport& report, const std::vector<double>& percentiles) {
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
  if (report.good >= 0) add("goodput", report.goodput, "requests/s");
  for (const char* name : kMetrics) {
    const Distribution d = DistributionOf(report, name);
    absl::StrAppendFormat(&table, "%-20s mean %10.2f  median %10.2f", name, d.mean, d.median);
    for (double percent : percentiles) {
      absl::StrAppendFormat(&table, "  p%g %10.2f", percent, Percentile(d.sorted, percent));
    }
    table += " ms\n";
  }
  return table;
}

}  // namespace treadle
