// ORCA's Figures 9, 10 and 11 by simulation: models and splits of Table 1 on A100s with 40 GB, both
// systems, traces as in section 6.2.
//
// Thread safety: stateless.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

struct FigurePoint {
  std::string label;      // "orca(8)", "ft(8,1)"; in Figure 9 "orca(128)", by prompt tokens
  double x = 0;           // batch size, or requests/s that are offered
  double throughput = 0;  // requests/s
  double latency_ms = 0;  // of the batch; else median, by token but in Figure 11; 0: out of memory
};

struct Figure {
  std::string title;
  std::vector<FigurePoint> points;  // by label, then x
};

std::vector<std::string_view> FigureNames();  // "9a" ...
// NotFound lists the names.
absl::StatusOr<Figure> SimulateFigure(std::string_view name, int64_t num_requests, uint64_t seed);

// The highest throughput of any curve whose label begins so, at this latency or less: between two
// points of a curve, on the line through them. 0: none.
double ThroughputAt(const Figure& figure, std::string_view label, double latency_ms);
double MostThroughput(const Figure& figure, std::string_view label);

std::string ToTable(const Figure& figure);
std::string ToJson(const Figure& figure);  // JSON lines

}  // namespace treadle
