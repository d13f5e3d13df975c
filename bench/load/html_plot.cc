#include "bench/load/html_plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr const char* kColors[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
                                   "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"};

// A step of a scale: 1, 2 or 5 times a power of ten, so that about five fit into `range`.
double StepOf(double range) {
  const double power = std::pow(10, std::floor(std::log10(range / 5)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (range / (factor * power) <= 6) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string HtmlOf(const std::string& text) {
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

std::string CurveHead(size_t i, const std::string& name) {
  return Str("<th><i style=\"background:", kColors[i % std::size(kColors)], "\"></i>", HtmlOf(name),
             "</th>");
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
      kWidth, kHeight, HtmlOf(title), kLeft, HtmlOf(title));
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
                        (kLeft + kWidth) / 2, kHeight - 6, HtmlOf(x_label));
  absl::StrAppendFormat(
      &svg, "<text transform=\"translate(13 %g) rotate(-90)\" class=\"middle\">%s</text>\n",
      (kTop + kHeight - kBottom) / 2, HtmlOf(y_label));
  for (size_t i = 0; i < curves.size(); ++i) {
    std::string path;
    for (const auto& [x, y] : curves[i].points) {
      absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : "L", at_x(x), at_y(y));
    }
    absl::StrAppendFormat(&svg,
                          "<path class=\"curve\" stroke=\"%s\" d=\"%s\"><title>%s</title></path>\n",
                          kColors[i % std::size(kColors)], path, HtmlOf(curves[i].name));
  }
  return svg + "</svg>\n";
}

std::string HtmlPage(const std::string& title, const std::string& body) {
  return Str(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>", HtmlOf(title),
      "</title>\n"
      "<style>body{font:14px sans-serif;max-width:1000px;margin:2em auto;color:#222}"
      "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 10px;border-bottom:1px solid "
      "#ddd;text-align:right}td:first-child,th:first-child{text-align:left}svg{width:480px;"
      "margin:4px}svg text{font-size:11px;fill:#444}.title{font-weight:bold}.middle{text-anchor:"
      "middle}.end{text-anchor:end}.grid{stroke:#ddd;fill:none}.curve{fill:none;stroke-width:1.6}"
      "i{display:inline-block;width:1em;height:.7em;margin-right:.4em}</style></head><body>\n<h1>",
      HtmlOf(title), "</h1>\n", body, "</body></html>\n");
}

}  // namespace treadle
