// treadle inspect: what is in a checkpoint, and what serving it costs. Reads headers only, but for
// --placement, which loads a few layers to measure them.
#include "models/checkpoints/inspect/inspect.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/plan/defaults.h"
#include "models/checkpoints/checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/models/placement_report.h"
#include "server/configuration.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

struct InspectFlags {
  std::string path;
  ServingPlan plan{.batch_tokens = kDefaultBatchTokens};
  bool json = false;
  bool placement = false;
  PlacementRequest request;
  std::string device_memory;
  std::string weights;
};

absl::StatusOr<std::string> Placement(InspectFlags& flags, const Checkpoint& checkpoint) {
  PlacementRequest& request = flags.request;
  request.batch = flags.plan.batch;
  request.batch_tokens = flags.plan.batch_tokens;
  if (!flags.device_memory.empty()) {
    const auto bytes = ParseSize(flags.device_memory);
    if (!bytes.ok() || *bytes < 1) {
      return InvalidArgument("--device-memory is '", flags.device_memory,
                             "', expected a size such as 16G");
    }
    request.device_memory = *bytes;
  }
  TREADLE_ASSIGN_OR_RETURN(request.weights, WeightPlan::Parse(flags.weights));
  TREADLE_RETURN_IF_ERROR(request.weights.CheckAgainst(checkpoint));
  return PlacementReport(checkpoint, request, flags.json);
}

absl::StatusOr<std::string> Report(InspectFlags& flags) {
  const auto opened = Checkpoint::Open(flags.path);
  if (absl::IsUnimplemented(opened.status())) {
    const std::string nearest = NearestFamily(flags.path);
    return Unimplemented(std::string(opened.status().message()), nearest.empty() ? "" : "; ",
                         nearest);
  }
  TREADLE_RETURN_IF_ERROR(opened.status());
  const std::unique_ptr<Checkpoint>& checkpoint = *opened;
  if (flags.placement) return Placement(flags, *checkpoint);
  const ModelReport report = Inspect(*checkpoint);
  return flags.json ? ReportJson(report, flags.plan) : ReportText(report, flags.plan);
}

}  // namespace

int RunInspect(int argc, char** argv) {
  InspectFlags flags;
  CLI::App app("Prints what a checkpoint holds and what serving it costs in memory.");
  app.add_option("model", flags.path, ".gguf file or Hugging Face folder")->required();
  app.add_option("--context", flags.plan.context, "tokens per request; 0: what the model allows")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--batch", flags.plan.batch, "requests at once")->check(CLI::PositiveNumber);
  app.add_option("--batch-tokens", flags.plan.batch_tokens, "tokens in one iteration")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", flags.json, "print one JSON object");
  CLI::Option* const placement = app.add_flag(
      "--placement", flags.placement, "how its layers would lie over stages, measured here");
  app.add_option("--pipeline-parallel", flags.request.pipeline_parallel, "stages")
      ->needs(placement);
  app.add_option("--tensor-parallel", flags.request.tensor_parallel, "ranks of a stage")
      ->needs(placement);
  app.add_option("--prompt-tokens", flags.request.prompt_tokens,
                 "tokens of prompts in the measured iteration; more: the head weighs less")
      ->needs(placement)
      ->check(CLI::NonNegativeNumber);
  app.add_option("--device-memory", flags.device_memory,
                 "memory of each rank (16G): what it leaves for K/V")
      ->needs(placement);
  app.add_option("--threads", flags.request.threads, "compute threads of a rank; 0: one per CPU")
      ->check(CLI::Range(0, 4096))
      ->needs(placement);
  app.add_option("--weights", flags.weights, "convert matrices while loading, as serve does")
      ->needs(placement);
  if (auto code = ParseFlags(app, "inspect", argc, argv)) return *code;
  return Finish("inspect", Report(flags));
}

}  // namespace treadle
