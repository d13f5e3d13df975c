#include "bench/load/load_html.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr const char* kColors[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
                                   "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"};
constexpr size_t kPoints = 300;  // of a curve: more are not seen

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

// A step of a scale: 1, 2 or 5 times a power of ten, so that about five fit into `range`.
double StepOf(double range) {
  const double power = std::pow(10, std::floor(std::log10(range / 5)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (range / (factor * power) <= 6) return factor * power;
  }
  return 10 * power;
}

std::string Plot(const std::string& title, const std::string& x_label, const std::string& y_label,
                 const std::vector<Curve>& curves) {
  constexpr double kWidth = 460, kHeight = 250, kLeft = 62, kTop = 26, kBottom = 40;
  double x_most = 0, y_most = 0;
  for (const Curve& curve : curves) {
    for (const auto& [x, y] : curve.points) {
      x_most = std::max(x_most, x);
      y_most = std::max(y_most, y);
    }
  }
  if (x_most <= 0 || y_most <= 0) return "";
  y_most *= 1.05;
  const auto at_x = [&](double x) { return kLeft + x / x_most * (kWidth - kLeft - 12); };
  const auto at_y = [&](double y) {
    return kHeight - kBottom - y / y_most * (kHeight - kBottom - kTop);
  };
  std::string svg = absl::StrFormat(
      "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\"><text x=\"%g\" y=\"16\" "
      "class=\"title\">%s</text>\n",
      kWidth, kHeight, Escaped(title), kLeft, Escaped(title));
  for (double x = 0; x <= x_most; x += StepOf(x_most)) {
    absl::StrAppendFormat(&svg,
                          "<path class=\"grid\" d=\"M%.1f %gV%g\"/><text x=\"%.1f\" y=\"%g\" "
                          "class=\"middle\">%g</text>\n",
                          at_x(x), kTop, kHeight - kBottom, at_x(x), kHeight - kBottom + 14, x);
  }
  for (double y = 0; y <= y_most; y += StepOf(y_most)) {
    absl::StrAppendFormat(&svg,
                          "<path class=\"grid\" d=\"M%g %.1fH%g\"/><text x=\"%g\" y=\"%.1f\" "
                          "class=\"end\">%g</text>\n",
                          kLeft, at_y(y), kWidth - 12, kLeft - 5, at_y(y) + 4, y);
  }
  absl::StrAppendFormat(&svg, "<text x=\"%g\" y=\"%g\" class=\"middle\">%s</text>\n",
                        (kLeft + kWidth) / 2, kHeight - 6, Escaped(x_label));
  absl::StrAppendFormat(
      &svg, "<text transform=\"translate(13 %g) rotate(-90)\" class=\"middle\">%s</text>\n",
      (kTop + kHeight - kBottom) / 2, Escaped(y_label));
  for (size_t i = 0; i < curves.size(); ++i) {
    std::string path;
    for (const auto& [x, y] : curves[i].points) {
      absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : "L", at_x(x), at_y(y));
    }
    absl::StrAppendFormat(&svg,
                          "<path class=\"curve\" stroke=\"%s\" d=\"%s\"><title>%s</title></path>\n",
                          kColors[i % std::size(kColors)], path, Escaped(curves[i].name));
  }
  return svg + "</svg>\n";
}

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
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Load "
      "report</title>\n"
      "<style>body{font:14px sans-serif;max-width:1000px;margin:2em auto;color:#222}"
      "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 10px;border-bottom:1px solid "
      "#ddd;text-align:right}td:first-child,th:first-child{text-align:left}svg{width:480px;"
      "margin:4px}svg text{font-size:11px;fill:#444}.title{font-weight:bold}.middle{text-anchor:"
      "middle}.end{text-anchor:end}.grid{stroke:#ddd;fill:none}.curve{fill:none;stroke-width:1.6}"
      "i{display:inline-block;width:1em;height:.7em;margin-right:.4em}</style></head><body>\n"
      "<h1>Load report</h1>\n";
  if (!conclusion.empty()) html += "<p><b>" + Escaped(conclusion) + "</b></p>\n";
  html += "<table><tr><th></th>";
  for (size_t i = 0; i < runs.size(); ++i) {
    html += Str("<th><i style=\"background:", kColors[i % std::size(kColors)], "\"></i>",
                Escaped(runs[i].name), "</th>");
  }
  html += "</tr>\n";
  for (const auto& [name, first] : runs[0].said.items()) {
    html += "<tr><td>" + Escaped(name) + "</td>";
    for (const LoadRun& run : runs) {
      const auto found = run.said.find(name);
      const bool text = found != run.said.end() && found->is_string();
      const bool fraction = found != run.said.end() && found->is_number_float();
      html += "<td>" +
              (found == run.said.end() ? ""
               : fraction              ? absl::StrFormat("%.3f", found->get<double>())
                          : Escaped(text ? found->get<std::string>() : found->dump())) +
              "</td>";
    }
    html += "</tr>\n";
  }
  html +=
      "</table>\n<p>Latencies count from the scheduled arrival of a request. Times to first "
      "token, between tokens, and of whole answers are shown as the share of samples that took "
      "at most so long.</p>\n";
  return html + PlotsOf(runs) + "</body></html>\n";
}

}  // namespace treadle
