// `treadle bench serve`, once it knows its options: traces at rates and seeds, one after the other,
// or a search for a rate, and the report of it all.
//
// Thread safety: none.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/load_report.h"
#include "bench/load/load_target.h"
#include "bench/load/trace_file.h"

namespace treadle {

struct LoadRunOptions {
  LoadReplayOptions replay;
  SyntheticTrace trace;
  std::vector<std::string> rates;  // empty: 1, or a recorded trace's own times
  int64_t seeds = 1;               // runs with trace.seed, and the ones that follow it
  std::string input = "32:512";
  std::string output = "1:128";
  std::string trace_file;
  TraceFileOptions recorded;
  std::string tokenizer;
  int64_t warmups = 0;
  LoadReportOptions report;
  double search = 0;  // the share of requests that must be within report.goodput; 0: no search
  std::string label;
  std::string save_result;
  std::string html;
  bool json = false;
  // The target, for the report.
  std::string target;
  std::string protocol;
  std::string metrics_url;  // empty: none
};

// One replay: a trace at one of the rates, with one of the seeds.
struct Replayed {
  std::string rate;
  uint64_t seed = 0;
  std::vector<TraceEntry> trace = {};
  LoadResult result = {};
  nlohmann::ordered_json guesses = {};  // spec_decode_... of the server's metrics
};

// A server's metrics as it tells them. Errors say why it does not.
absl::StatusOr<std::string> AskMetrics(const std::string& address);

// The traces that will be replayed; of a search, the first. Errors name the flag or the file.
absl::StatusOr<std::vector<Replayed>> TracesOf(LoadRunOptions& options);

inline constexpr TraceEntry kWarmUp = {0, 32, 8};

// Replays `first`, or searches from there, and reports: what is to be printed. Writes the files
// that the options name.
absl::StatusOr<std::string> RunLoad(const LoadRunOptions& options, LoadTarget& target,
                                    std::vector<Replayed> first);

}  // namespace treadle
