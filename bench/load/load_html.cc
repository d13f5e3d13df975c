#include "bench/load/load_html.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/load/html_plot.h"

namespace treadle {
namespace {

constexpr size_t kPoints = 300;  // of a curve: more are not seen

// How large a share of the samples is at most so large.
std::vector<std::pair<double, double>> Distribution(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  std::vector<std::pair<double, double>> points;
  const size_t step = std::max<size_t>(1, samples.size() / kPoints);
  for (size_t i = 0; i < samples.size(); i += step) {
    points.emplace_back(samples[i],
                        static_cast<double>(i + 1) / static_cast<double>(samples.size()));
  }
  if (!samples.empty()) points.emplace_back(samples.back(), 1);
  return points;
}

// A sum of changes over time, or with `rate` their number in each interval by its length.
std::vector<std::pair<double, double>> OverTime(std::vector<std::pair<double, double>> changes,
                                                double duration, bool rate) {
  const double step = std::max(duration / static_cast<double>(kPoints / 3), 1e-3);
  std::sort(changes.begin(), changes.end());
  std::vector<std::pair<double, double>> points;
  double sum = 0;
  size_t next = 0;
  for (double time = step; time < duration + step; time += step) {
    if (rate) sum = 0;
    for (; next < changes.size() && changes[next].first < time; ++next) sum += changes[next].second;
    points.emplace_back(time, rate ? sum / step : sum);
  }
  return points;
}

std::string PlotsOf(const std::vector<LoadRun>& runs) {
  std::string plots;
  const auto per_run = [&](const std::string& title, const char* x, const char* y, auto points) {
    std::vector<Curve> curves;
    for (const LoadRun& run : runs) curves.push_back({run.name, points(run)});
    plots += Plot(title, x, y, curves);
  };
  if (runs.size() > 1) {
    for (const auto& [key, title] :
         {std::pair("median_ttft_ms", "Median time to first token by throughput"),
          std::pair("median_normalized_latency_ms", "Median normalized latency by throughput")}) {
      Curve curve{title, {}};
      for (const LoadRun& run : runs) {
        curve.points.emplace_back(run.report->request_throughput, run.said[key].get<double>());
      }
      std::sort(curve.points.begin(), curve.points.end());
      plots += Plot(title, "requests/s", "ms", {curve});
    }
  }
  for (const auto& [name, title] :
       {std::pair("ttft", "Time to first token"), std::pair("itl", "Time between tokens"),
        std::pair("e2el", "End-to-end latency"), std::pair("client_lag", "The client's own lag")}) {
    per_run(title, "ms", "share of samples", [&, name = std::string(name)](const LoadRun& run) {
      const auto found = run.report->samples_ms.find(name);
      return found == run.report->samples_ms.end() ? std::vector<std::pair<double, double>>()
                                                   : Distribution(found->second);
    });
  }
  per_run("Output tokens", "s", "tokens/s", [](const LoadRun& run) {
    std::vector<std::pair<double, double>> changes;
    for (const LoadRecord& request : run.result->requests) {
      for (const double time : request.token_times) changes.emplace_back(time, 1);
    }
    return OverTime(std::move(changes), run.result->duration, /*rate=*/true);
  });
  per_run("Requests under way", "s", "requests", [](const LoadRun& run) {
    std::vector<std::pair<double, double>> changes;
    for (const LoadRecord& request : run.result->requests) {
      changes.emplace_back(request.scheduled, 1);
      changes.emplace_back(request.end, -1);
    }
    return OverTime(std::move(changes), run.result->duration, /*rate=*/false);
  });
  return plots;
}

}  // namespace

std::string ToHtml(const std::vector<LoadRun>& runs, const std::string& conclusion) {
  std::string html;
  if (!conclusion.empty()) html += "<p><b>" + HtmlOf(conclusion) + "</b></p>\n";
  html += "<table><tr><th></th>";
  for (size_t i = 0; i < runs.size(); ++i) {
    html += CurveHead(i, runs[i].name);
  }
  html += "</tr>\n";
  for (const auto& [name, first] : runs[0].said.items()) {
    html += "<tr><td>" + HtmlOf(name) + "</td>";
    for (const LoadRun& run : runs) {
      const auto found = run.said.find(name);
      const bool text = found != run.said.end() && found->is_string();
      const bool fraction = found != run.said.end() && found->is_number_float();
      html += "<td>" +
              (found == run.said.end() ? ""
               : fraction              ? absl::StrFormat("%.3f", found->get<double>())
                                       : HtmlOf(text ? found->get<std::string>() : found->dump())) +
              "</td>";
    }
    html += "</tr>\n";
  }
  html +=
      "</table>\n<p>Latencies count from the scheduled arrival of a request. Times to first "
      "token, between tokens, and of whole answers are shown as the share of samples that took "
      "at most so long.</p>\n";
  return HtmlPage("Load report", html + PlotsOf(runs));
}

}  // namespace treadle
