// treadle inspect: what is in a checkpoint, and what serving it costs. Reads headers only.
#include "models/inspect.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "kernels/status.h"
#include "models/checkpoint.h"
#include "server/cli/command.h"

namespace treadle {
namespace {

absl::Status PrintReport(const std::string& path, const ServingPlan& plan, bool json) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  const ModelReport report = Inspect(*checkpoint);
  std::string text = json ? ReportJson(report, plan) : ReportText(report, plan);
  if (!text.ends_with('\n')) text += '\n';
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

int RunInspect(int argc, char** argv) {
  std::string path;
  ServingPlan plan;
  bool json = false;
  CLI::App app("Prints what a checkpoint holds and what serving it costs in memory.");
  app.add_option("model", path, ".gguf file or Hugging Face folder")->required();
  app.add_option("--context", plan.context, "tokens per request; 0: what the model allows")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--batch", plan.batch, "requests at once")->check(CLI::PositiveNumber);
  app.add_option("--batch-tokens", plan.batch_tokens, "tokens in one iteration")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", json, "print one JSON object");
  if (auto code = ParseFlags(app, "inspect", argc, argv)) return *code;
  const absl::Status status = PrintReport(path, plan, json);
  return status.ok() ? 0 : Fail("inspect", status);
}

}  // namespace treadle
