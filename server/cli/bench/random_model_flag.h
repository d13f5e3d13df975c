// --random-model, of benchmarks: a model's path that means random weights.
#pragma once

#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace treadle {

// `help`: up to the shapes that there are.
CLI::Option* AddRandomModelFlag(CLI::App& command, std::string& model, const char* help);
// The same instead of --model, which is there already: where a benchmark runs an engine of its own.
inline constexpr char kInsteadOfModel[] = "instead of --model: random weights in the shape of ";

}  // namespace treadle
