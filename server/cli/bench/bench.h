// Benchmarks that have a file of their own; the others are in bench.cc, with the table.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/configuration.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace treadle {

// "1,2,4", each from `low` to `high`. Errors name the flag.
absl::StatusOr<std::vector<double>> ParseNumbers(const char* flag, const std::string& text,
                                                 double low, double high);
// --random-model, which stands in for --model where a benchmark runs an engine of its own. After
// AddServeFlags of the same options.
CLI::Option* AddRandomModelFlag(CLI::App& command, ServeOptions& options);

int BenchAccuracy(int argc, char** argv);
int BenchInt8(int argc, char** argv);
int BenchKernels(int argc, char** argv);
int BenchScheduler(int argc, char** argv);
int BenchServe(int argc, char** argv);
int BenchTrace(int argc, char** argv);

}  // namespace treadle
