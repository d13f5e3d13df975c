#include "server/cli/models/teacher_forcing_flags.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"

namespace treadle {

constexpr Choice<DType> kHostKvTypes[] = {
    {"f16", DType::kF16}, {"f32", DType::kF32}, {"int8", DType::kI8}};

void AddTextFlags(CLI::App& app, TeacherForcingFlags& flags) {
  app.add_option("--text", flags.text, "a text file, UTF-8")->required();
  app.add_option("--threads", flags.model.load.threads, "compute threads; 0: one per CPU")
      ->check(CLI::Range(0, 4096));
}

void AddVariantFlags(CLI::App& app, TeacherForcingFlags& flags) {
  AddChoice(app, "--compute", flags.compute, kComputeModes,
            "arithmetic of products: auto, exact, int8, int12, int16, mixed or bf16");
  AddChoice(app, "--kv-dtype", flags.model.kv_dtype, kHostKvTypes,
            "type of the K/V cache: f16, f32 or int8");
  app.add_option("--outlier-threshold", flags.model.load.outlier_threshold,
                 "magnitude from which activations of int8 weights multiply as floats; 0: none do; "
                 "default: what the checkpoint says, else 6")
      ->check(CLI::Range(0.0f, 1e6f));
  AddChoice(app, "--outlier-rule", flags.model.load.outlier_rule, kOutlierRules,
            "outliers of int8 weights: per-row, or whole columns per-call (the paper's rule)");
}

absl::StatusOr<WeightPlan> ParseWeights(const std::string& weights, const Checkpoint& checkpoint) {
  auto plan = WeightPlan::Parse(weights);
  if (!plan.ok()) return InvalidArgument("--weights has ", plan.status().message());
  TREADLE_RETURN_IF_ERROR(plan->CheckAgainst(checkpoint));
  return plan;
}

absl::StatusOr<std::unique_ptr<TeacherForcedModel>> LoadTeacherForced(
    const Checkpoint& checkpoint, const TeacherForcingFlags& flags, const WeightPlan& weights,
    int64_t window) {
  CpuBackendOptions cpu;
  cpu.compute = flags.compute;
  cpu.threads = flags.model.load.threads;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  TeacherForcedModel::Options options = flags.model;
  options.window = window;
  options.load.weights = weights;
  options.load.progress = ShowProgress(weights.empty() ? "loading" : "loading " + weights.text(),
                                       checkpoint.file_bytes());
  return TeacherForcedModel::Create(checkpoint, std::move(backend), options);
}

}  // namespace treadle
