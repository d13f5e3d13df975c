// A load report to hand to a colleague: one HTML file with tables and plots (inline SVG), without
// scripts, and without anything from elsewhere. Pure.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/load/load_report.h"

namespace treadle {

struct LoadRun {
  std::string name;             // "4 requests/s, seed 1"
  nlohmann::ordered_json said;  // ToJson without details: what was run, and its figures
  const LoadReport* report = nullptr;
  const LoadResult* result = nullptr;
};

// `conclusion`: a sentence at the top; may be empty. REQUIRES: a run or more.
std::string ToHtml(const std::vector<LoadRun>& runs, const std::string& conclusion);

}  // namespace treadle
