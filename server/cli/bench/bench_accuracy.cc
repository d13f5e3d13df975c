// treadle bench accuracy: what compute modes and weight formats cost in quality.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/quality/accuracy_bench.h"
#include "bench/quality/weight_bits.h"
#include "server/cli/bench/bench.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/cli/teacher_forcing_flags.h"

namespace treadle {
namespace {

struct AccuracyFlags {
  std::string model;
  TeacherForcingFlags forcing;
  std::vector<std::string> weights;
  AccuracyOptions options;
  bool json = false;
};

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
  flags.options.threads = flags.forcing.threads;
  if (flags.weights.empty()) flags.weights.push_back("");
  std::vector<WeightPlan> plans;
  std::vector<WeightBits> bits;
  for (const std::string& weights : flags.weights) {
    TREADLE_ASSIGN_OR_RETURN(plans.emplace_back(), ParseWeights(weights, *checkpoint));
    TREADLE_ASSIGN_OR_RETURN(bits.emplace_back(), CountWeightBits(*checkpoint, plans.back()));
  }
  std::unique_ptr<AccuracyReference> reference;
  {
    Progress progress("reference");
    TREADLE_ASSIGN_OR_RETURN(
        reference, AccuracyReference::Create(*checkpoint, tokens, flags.options,
                                             [&](double fraction) { progress.Set(fraction); }));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(const auto variant, LoadTeacherForced(*checkpoint, flags.forcing,
                                                                   plans[i], flags.options.window));
    Progress progress("comparing");
    const AccuracyReport report =
        reference->Compare(*variant, [&](double fraction) { progress.Set(fraction); });
    std::fputs(Row(plans[i].text(), report, bits[i], flags.json).c_str(), stdout);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace

int BenchAccuracy(int argc, char** argv) {
  AccuracyFlags flags;
  CLI::App app(
      "What compute modes and weight formats cost in quality: KL divergence, on a text, from the "
      "weights as stored, exact, with a 32-bit K/V cache.");
  app.add_option("--model", flags.model, "a .gguf file or a Hugging Face folder")->required();
  AddTextFlags(app, flags.forcing);
  AddVariantFlags(app, flags.forcing);
  app.get_option("--compute")
      ->description("exact, int8, int16 or auto; default: int16, or exact with --weights");
  app.get_option("--kv-dtype")->description("f16 or f32; default: f16, or f32 with --weights");
  app.add_option("--weights", flags.weights,
                 "convert matrices while loading, as for treadle serve; may be repeated")
      ->allow_extra_args(false);
  app.add_option("--window", flags.options.window, "tokens per chunk, each from position 0");
  app.add_option("--max-tokens", flags.options.max_tokens, "of the text");
  app.add_flag("--json", flags.json, "print a JSON object per line");
  if (auto code = ParseFlags(app, "bench accuracy", argc, argv)) return *code;
  const bool converted = !flags.weights.empty();
  if (app.count("--compute") == 0) {
    flags.forcing.compute = converted ? ComputeMode::kExact : ComputeMode::kInt16;
  }
  if (app.count("--kv-dtype") == 0) {
    flags.forcing.kv_dtype = converted ? DType::kF32 : DType::kF16;
  }
  return Finish("bench accuracy", RunAccuracy(flags));
}

}  // namespace treadle
