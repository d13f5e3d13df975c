// Benchmarks that have a file of their own; the others are in bench.cc, with the table.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

// What benchmarks share: prints `output`, or what went wrong; gives the exit code.
int Finish(const char* command, const absl::StatusOr<std::string>& output);
// "1,2,4", each from `low` to `high`. Errors name the flag.
absl::StatusOr<std::vector<double>> ParseNumbers(const char* flag, const std::string& text,
                                                 double low, double high);

int BenchAccuracy(int argc, char** argv);
int BenchInt8(int argc, char** argv);
int BenchKernels(int argc, char** argv);
int BenchScheduler(int argc, char** argv);
int BenchServe(int argc, char** argv);
int BenchTrace(int argc, char** argv);

}  // namespace treadle
