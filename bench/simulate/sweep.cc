#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/load/html_plot.h"
#include "bench/load/load_report.h"
#include "bench/simulate/search.h"

namespace treadle {
namespace {

constexpr size_t kDrawn = 8;                                             // rows
constexpr double kLoads[] = {0.05, 0.25, 0.5, 0.7, 0.85, 1, 1.15, 1.3};  // of a row's rate

struct Measure {
  const char *title, *y_label, *sample;  // sample: of LoadReport; null: the share within the target
};
constexpr Measure kMeasures[] = {
    {"Requests within the target", "share", nullptr},
    {"Median time to first token", "ms", "ttft"},
    {"Median time between tokens", "ms", "itl"},
    {"Median latency by token of the answer", "ms", "normalized_latency"},
};

double ValueOf(const Measure& measure, const LoadReport& report, size_t requests) {
  if (measure.sample == nullptr) {
    return static_cast<double>(report.good) / static_cast<double>(requests);
  }
  const auto found = report.samples_ms.find(measure.sample);
  if (found == report.samples_ms.end()) return 0;
  std::vector<double> samples = found->second;
  std::ranges::sort(samples);
  return Percentile(samples, 50);
}

std::string TableOf(const std::vector<SearchRow>& rows, const std::vector<std::string>& names) {
  std::string html = "<table><tr><th></th>";
  for (size_t i = 0; i < rows.size(); ++i) html += CurveHead(i, names[i]);
  const std::pair<const char*, std::string (*)(const SearchRow&)> lines[] = {
      {"requests/s within the target",
       [](const SearchRow& row) { return absl::StrFormat("%.2f", row.rate); }},
      {"GB of weights on a GPU",
       [](const SearchRow& row) { return absl::StrFormat("%.1f", row.weight_bytes * 1e-9); }},
      {"GB of K/V on a GPU",
       [](const SearchRow& row) { return absl::StrFormat("%.1f", row.kv_bytes * 1e-9); }},
      {"most of an iteration", [](const SearchRow& row) { return HtmlOf(row.bound); }}};
  for (const auto& [title, cell] : lines) {
    html += Str("</tr>\n<tr><td>", title, "</td>");
    for (const SearchRow& row : rows) html += Str("<td>", cell(row), "</td>");
  }
  return html + "</tr>\n</table>\n";
}

}  // namespace

absl::StatusOr<std::string> SweepPage(const Checkpoint& checkpoint, const SearchOptions& options,
                                      const std::vector<SearchRow>& rows) {
  std::vector<SearchRow> drawn(rows.begin(),
                               rows.begin() + std::min<ptrdiff_t>(kDrawn, std::ssize(rows)));
  std::erase_if(drawn, [](const SearchRow& row) { return row.rate == 0; });
  std::vector<std::string> names;
  std::vector<Curve> curves[std::size(kMeasures)];
  for (const SearchRow& row : drawn) {
    names.push_back(Str(row.tensor_parallel, " x ", row.stages, ", ", row.weights,
                        row.weights.empty() ? "" : ", ", "batch ", row.batch_size));
    for (std::vector<Curve>& of_measure : curves) of_measure.push_back({names.back(), {}});
    TREADLE_ASSIGN_OR_RETURN(const Roofline machine, MachineOf(checkpoint, options, row));
    for (const double load : kLoads) {
      const double rate = load * row.rate;
      TREADLE_ASSIGN_OR_RETURN(const SimulationResult result,
                               SimulateOn(machine, ServingOf(options, row), options.trace(rate)));
      const LoadReport report = Analyze(result.load, {.goodput = options.goodput});
      for (size_t i = 0; i < std::size(kMeasures); ++i) {
        curves[i].back().points.emplace_back(
            rate, ValueOf(kMeasures[i], report, result.load.requests.size()));
      }
    }
  }
  std::string target;
  for (const auto& [name, most] : options.goodput) {
    target += Str(target.empty() ? "" : ", ", name, " at most ", most, " ms");
  }
  std::string body = Str("<p>", HtmlOf(checkpoint.path()), " on ", options.count, " ",
                         options.machine.hardware.name, ", simulated; GPUs of a stage x stages. ",
                         "The target: ", target, ", of ", kAttained * 100,
                         " % of the requests.</p>\n", TableOf(drawn, names));
  for (size_t i = 0; i < std::size(kMeasures); ++i) {
    body += Plot(kMeasures[i].title, "requests/s that come", kMeasures[i].y_label, curves[i]);
  }
  return HtmlPage("Which split serves most", body);
}

}  // namespace treadle
