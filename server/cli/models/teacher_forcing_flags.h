// Flags of the subcommands that read a text with a model: perplexity, and treadle-bench's accuracy
// and int8.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/quality/teacher_forcing.h"
#include "engine/choices.h"
#include "models/checkpoints/weight_plan.h"

namespace CLI {
class App;
}

namespace treadle {

struct TeacherForcingFlags {
  std::string text;
  ComputeMode compute = ComputeMode::kAuto;
  TeacherForcedModel::Options model;
};

// --text and --threads.
void AddTextFlags(CLI::App& app, TeacherForcingFlags& flags);
// --compute, --kv-dtype, --outlier-threshold, --outlier-rule.
void AddVariantFlags(CLI::App& app, TeacherForcingFlags& flags);

// The weight formats that --weights asks for; empty: as stored.
absl::StatusOr<WeightPlan> ParseWeights(const std::string& weights, const Checkpoint& checkpoint);

// Loads, with a progress bar.
absl::StatusOr<std::unique_ptr<TeacherForcedModel>> LoadTeacherForced(
    const Checkpoint& checkpoint, const TeacherForcingFlags& flags, const WeightPlan& weights,
    int64_t window);

}  // namespace treadle
