// treadle-bench accuracy: what compute modes and weight formats cost in quality; and treadle-bench
// int8: ways to quantize weights and activations to 8 bits, compared (LLM.int8(), Table 2.1), of
// which those that are not formats of ours are simulated.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/cli/benchmarks.h"
#include "bench/quality/accuracy_bench.h"
#include "bench/quality/int8_simulation.h"
#include "bench/quality/planted_outliers.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/command.h"
#include "server/cli/models/teacher_forcing_flags.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

struct QualityFlags {
  std::string model;
  TeacherForcingFlags forcing;
  AccuracyOptions options;
  bool json = false;
};
struct AccuracyFlags : QualityFlags {
  std::vector<std::string> weights;
};
struct Int8Flags : QualityFlags {  // of `forcing`: text and threads
  bool plant = false;
  OutlierPlan outliers;
};

void AddQualityFlags(CLI::App& app, QualityFlags& flags) {
  app.add_option("--model", flags.model, "a .gguf file or a Hugging Face folder")->required();
  AddTextFlags(app, flags.forcing);
  app.add_option("--window", flags.options.window, "tokens per chunk, each from position 0");
  app.add_option("--max-tokens", flags.options.max_tokens, "of the text");
  app.add_flag("--json", flags.json, "print a JSON object per line");
}

std::string Row(const std::string& weights, const AccuracyReport& report, const WeightBits& bits,
                bool json) {
  if (!json && weights.empty()) return ToTable(report);
  if (!json) {
    return Str("-- ", weights, "\n", ToTable(report), "bits per converted weight ",
               bits.PerConverted(), ", per parameter of the model ", bits.PerParameter(), "\n");
  }
  nlohmann::ordered_json row;
  if (!weights.empty()) {
    row["weights"] = weights;
    row["bits_per_weight"] = bits.PerConverted();
    row["converted_weights"] = bits.converted;
    row["bits_per_parameter"] = bits.PerParameter();
  }
  row.update(ToJson(report));
  return row.dump() + "\n";
}

absl::Status RunAccuracy(AccuracyFlags flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(flags.model));
  TREADLE_ASSIGN_OR_RETURN(const auto tokens, EncodeTextFile(*checkpoint, flags.forcing.text));
  flags.options.threads = flags.forcing.model.load.threads;
  if (flags.weights.empty()) flags.weights.push_back("");
  std::vector<WeightPlan> plans;
  std::vector<WeightBits> bits;
  for (const std::string& weights : flags.weights) {
    TREADLE_ASSIGN_OR_RETURN(plans.emplace_back(), ParseWeights(weights, *checkpoint));
    TREADLE_ASSIGN_OR_RETURN(bits.emplace_back(), CountWeightBits(*checkpoint, plans.back()));
  }
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<AccuracyReference> reference,
      AccuracyReference::Create(*checkpoint, tokens, flags.options, ShowProgress("reference")));
  for (size_t i = 0; i < plans.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(const auto variant, LoadTeacherForced(*checkpoint, flags.forcing,
                                                                   plans[i], flags.options.window));
    const AccuracyReport report = reference->Compare(*variant, ShowProgress("comparing"));
    std::fputs(Row(plans[i].text(), report, bits[i], flags.json).c_str(), stdout);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

// The product's own LLM.int8(): --weights int8.
struct OwnInt8 {
  const char* name;
  float threshold;
  OutlierRule rule;
};
constexpr OwnInt8 kOwn[] = {
    {"--weights int8 --outlier-threshold 0", 0, OutlierRule::kPerRow},
    {"--weights int8 --outlier-rule per-call", 6, OutlierRule::kPerCall},
    {"--weights int8", 6, OutlierRule::kPerRow},
};

void Print(const std::string& name, bool simulated, const AccuracyReport& report,
           const Int8Flags& flags) {
  if (flags.json) {
    nlohmann::ordered_json row = {{"name", name},
                                  {"simulated", simulated},
                                  {"planted_factor", flags.plant ? flags.outliers.factor : 1}};
    row.update(ToJson(report));
    std::printf("%s\n", row.dump().c_str());
  } else {
    std::printf("%-56s KL %.2e +/- %.0e  argmax equal %5.1f %%  perplexity %.3f (%.3f)%s\n",
                name.c_str(), report.mean_kl, report.kl_error, 100 * report.argmax_equal,
                report.perplexity, report.perplexity_reference, simulated ? "  simulated" : "");
  }
  std::fflush(stdout);
}

absl::Status CompareInt8(const Checkpoint& checkpoint, const Int8Flags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const WeightPlan int8, ParseWeights("int8", checkpoint));
  TREADLE_ASSIGN_OR_RETURN(const auto tokens, EncodeTextFile(checkpoint, flags.forcing.text));
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<AccuracyReference> reference,
      AccuracyReference::Create(checkpoint, tokens, flags.options, ShowProgress("reference")));
  const auto report = [&](const std::string& name, bool simulated, TeacherForcedModel& model) {
    Print(name, simulated, reference->Compare(model, ShowProgress(name)), flags);
  };
  for (const Int8Variant& variant : Int8Variants()) {
    CpuBackendOptions cpu = {.threads = flags.forcing.model.load.threads,
                             .compute = ComputeMode::kExact};
    TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
    TREADLE_ASSIGN_OR_RETURN(
        const auto model,
        TeacherForcedModel::Create(
            checkpoint, SimulateInt8(std::move(backend), variant, checkpoint.config().vocab),
            {.window = flags.options.window, .kv_dtype = DType::kF32}));
    report(std::string(variant.name), /*simulated=*/true, *model);
  }
  for (const OwnInt8& own : kOwn) {
    TeacherForcingFlags forcing = flags.forcing;
    forcing.compute = ComputeMode::kExact;
    forcing.model.kv_dtype = DType::kF32;
    forcing.model.load.outlier_threshold = own.threshold;
    forcing.model.load.outlier_rule = own.rule;
    TREADLE_ASSIGN_OR_RETURN(const auto model,
                             LoadTeacherForced(checkpoint, forcing, int8, flags.options.window));
    report(own.name, /*simulated=*/false, *model);
  }
  return absl::OkStatus();
}

absl::Status RunInt8(const Int8Flags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(flags.model));
  if (!flags.plant) return CompareInt8(*checkpoint, flags);
  TREADLE_ASSIGN_OR_RETURN(const auto planted, PlantOutliers(*checkpoint, flags.outliers));
  return CompareInt8(*planted, flags);
}

}  // namespace

int BenchAccuracy(int argc, char** argv) {
  AccuracyFlags flags;
  CLI::App app(
      "The quality that compute modes and weight formats cost: KL divergence, on a text, from the "
      "weights as stored, exact, with a 32-bit K/V cache.");
  AddQualityFlags(app, flags);
  AddVariantFlags(app, flags.forcing);
  app.get_option("--compute")
      ->description(
          "exact, int8, int16, mixed, bf16 or auto; default: int16, or exact with --weights");
  app.get_option("--kv-dtype")
      ->description("f16, f32 or int8; default: f16, or f32 with --weights");
  app.add_option("--weights", flags.weights,
                 "convert matrices while loading, as for treadle serve; may be repeated")
      ->allow_extra_args(false);
  if (auto code = ParseFlags(app, "treadle-bench accuracy", argc, argv)) return *code;
  const bool converted = !flags.weights.empty();
  if (app.count("--compute") == 0) {
    flags.forcing.compute = converted ? ComputeMode::kExact : ComputeMode::kInt16;
  }
  if (app.count("--kv-dtype") == 0) {
    flags.forcing.model.kv_dtype = converted ? DType::kF32 : DType::kF16;
  }
  return Finish("treadle-bench accuracy", RunAccuracy(flags));
}

int BenchInt8(int argc, char** argv) {
  Int8Flags flags;
  CLI::App app(
      "Ways to quantize weights and activations to 8 bits (LLM.int8(), Table 2.1): KL divergence "
      "from the weights as stored, exact. Ways that are not formats of ours are simulated.");
  AddQualityFlags(app, flags);
  app.add_flag("--plant-outliers", flags.plant,
               "the same function, with outlier features in every layer");
  app.add_option("--planted-features", flags.outliers.features, "of each norm");
  app.add_option("--planted-factor", flags.outliers.factor, "a power of two");
  if (auto code = ParseFlags(app, "treadle-bench int8", argc, argv)) return *code;
  return Finish("treadle-bench int8", RunInt8(flags));
}

}  // namespace treadle
