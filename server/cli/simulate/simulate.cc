// treadle simulate: a trace on hardware that is not there, by the real scheduler and a model of
// time.
#include <CLI/CLI.hpp>
#include <string>

#include "base/status.h"
#include "bench/simulate/figures.h"
#include "server/cli/command.h"

namespace treadle {
namespace {

struct SimulateFlags {
  std::string figure;
  int64_t num_requests = 1000;
  uint64_t seed = 1;
  bool json = false;
};

absl::StatusOr<std::string> RunFlags(const SimulateFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const Figure figure,
                           SimulateFigure(flags.figure, flags.num_requests, flags.seed));
  if (flags.json) return ToJson(figure);
  std::string out = ToTable(figure);
  out += Str("at 190: orca ", ThroughputAt(figure, "orca", 190), " ft ",
             ThroughputAt(figure, "ft", 190), " peak ft ", MostThroughput(figure, "ft"),
             " peak orca ", MostThroughput(figure, "orca"), "\n");
  return out;
}

}  // namespace

int RunSimulate(int argc, char** argv) {
  SimulateFlags flags;
  CLI::App app("Simulates.");
  app.add_option("--figure", flags.figure, "");
  app.add_option("--num-prompts", flags.num_requests, "");
  app.add_option("--seed", flags.seed, "");
  app.add_flag("--json", flags.json, "");
  if (auto code = ParseFlags(app, "simulate", argc, argv)) return *code;
  return Finish("simulate", RunFlags(flags));
}

}  // namespace treadle
