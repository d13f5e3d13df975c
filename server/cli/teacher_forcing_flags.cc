#include "server/cli/teacher_forcing_flags.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

constexpr Choice<DType> kHostKvTypes[] = {{"f16", DType::kF16}, {"f32", DType::kF32}};

}  // namespace

void AddTextFlags(CLI::App& app, TeacherForcingFlags& flags) {
  app.add_option("--text", flags.text, "a text file, UTF-8")->required();
  app.add_option("--threads", flags.threads, "compute threads; 0: one per CPU")
      ->check(CLI::Range(0, 4096));
}

void AddVariantFlags(CLI::App& app, TeacherForcingFlags& flags) {
  AddChoice(app, "--compute", flags.compute, kComputeModes, "auto, exact, int8 or int16");
  AddChoice(app, "--kv-dtype", flags.kv_dtype, kHostKvTypes, "f16 or f32");
  app.add_option("--outlier-threshold", flags.outlier_threshold,
                 "int8 weights: activations this large multiply as floats; 0: none do; default: "
                 "what the checkpoint says, else 6")
      ->check(CLI::Range(0.0f, 1e6f));
  AddChoice(app, "--outlier-rule", flags.outlier_rule, kOutlierRules,
            "int8 weights: outliers per-row, or columns per-call (the paper's)");
}

absl::StatusOr<WeightPlan> ParseWeights(const std::string& weights, const Checkpoint& checkpoint) {
  auto plan = WeightPlan::Parse(weights);
  if (!plan.ok()) return InvalidArgument("--weights has ", std::string(plan.status().message()));
  TREADLE_RETURN_IF_ERROR(plan->CheckAgainst(checkpoint));
  return plan;
}

absl::StatusOr<std::unique_ptr<TeacherForcedModel>> LoadTeacherForced(
    const Checkpoint& checkpoint, const TeacherForcingFlags& flags, const WeightPlan& weights,
    int64_t window) {
  CpuBackendOptions cpu;
  cpu.compute = flags.compute;
  cpu.threads = flags.threads;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  TeacherForcedModel::Options options;
  options.window = window;
  options.kv_dtype = flags.kv_dtype;
  options.threads = flags.threads;
  options.outlier_threshold = flags.outlier_threshold;
  options.outlier_rule = flags.outlier_rule;
  options.weights = weights;
  Progress progress(weights.empty() ? "loading" : "loading " + weights.text());
  options.progress = [&](double fraction) { progress.Set(fraction); };
  return TeacherForcedModel::Create(checkpoint, std::move(backend), options);
}

}  // namespace treadle
