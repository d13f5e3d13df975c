// Benchmarks that have a file of their own; the others are in bench.cc, with the table.
#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace treadle {

// --random-model, a model's path that means random weights. `help`: up to the shapes that there
// are.
CLI::Option* AddRandomModelFlag(CLI::App& command, std::string& model, const char* help);
// The same instead of --model, which is there already: where a benchmark runs an engine of its own.
inline constexpr char kInsteadOfModel[] = "instead of --model: random weights in the shape of ";

int BenchAccuracy(int argc, char** argv);
int BenchInt8(int argc, char** argv);
int BenchKernels(int argc, char** argv);
int BenchScheduler(int argc, char** argv);
int BenchServe(int argc, char** argv);

}  // namespace treadle
