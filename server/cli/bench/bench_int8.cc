// treadle bench int8: ways to quantize weights and activations to 8 bits, compared (LLM.int8(),
// Table 2.1); those that are not formats of ours are simulated.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/status.h"
#include "bench/quality/accuracy_bench.h"
#include "bench/quality/int8_simulation.h"
#include "bench/quality/planted_outliers.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/bench/bench.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/cli/teacher_forcing_flags.h"

namespace treadle {
namespace {

struct Int8Flags {
  std::string model;
  TeacherForcingFlags forcing;  // text and threads
  AccuracyOptions options;
  bool plant = false;
  OutlierPlan outliers;
  bool json = false;
};

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

class Int8Comparison {
 public:
  Int8Comparison(const Checkpoint& checkpoint, const Int8Flags& flags)
      : checkpoint_(checkpoint), flags_(flags) {}

  absl::Status Run() {
    TREADLE_ASSIGN_OR_RETURN(const WeightPlan int8, ParseWeights("int8", checkpoint_));
    TREADLE_ASSIGN_OR_RETURN(const auto tokens, EncodeTextFile(checkpoint_, flags_.forcing.text));
    {
      Progress progress("reference");
      TREADLE_ASSIGN_OR_RETURN(reference_,
                               AccuracyReference::Create(checkpoint_, tokens, flags_.options,
                                                         [&](double done) { progress.Set(done); }));
    }
    for (const Int8Variant& variant : Int8Variants()) {
      CpuBackendOptions cpu = {.threads = flags_.forcing.threads, .compute = ComputeMode::kExact};
      TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
      TREADLE_ASSIGN_OR_RETURN(
          const auto model,
          TeacherForcedModel::Create(
              checkpoint_, SimulateInt8(std::move(backend), variant, checkpoint_.config().vocab),
              {.window = flags_.options.window, .kv_dtype = DType::kF32}));
      Report(std::string(variant.name), /*simulated=*/true, *model);
    }
    for (const OwnInt8& own : kOwn) {
      TeacherForcingFlags forcing = flags_.forcing;
      forcing.compute = ComputeMode::kExact;
      forcing.kv_dtype = DType::kF32;
      forcing.outlier_threshold = own.threshold;
      forcing.outlier_rule = own.rule;
      TREADLE_ASSIGN_OR_RETURN(
          const auto model, LoadTeacherForced(checkpoint_, forcing, int8, flags_.options.window));
      Report(own.name, /*simulated=*/false, *model);
    }
    return absl::OkStatus();
  }

 private:
  void Report(const std::string& name, bool simulated, TeacherForcedModel& model) {
    Progress progress(name);
    const AccuracyReport report =
        reference_->Compare(model, [&](double done) { progress.Set(done); });
    if (flags_.json) {
      nlohmann::ordered_json row = {{"name", name},
                                    {"simulated", simulated},
                                    {"planted_factor", flags_.plant ? flags_.outliers.factor : 1}};
      row.update(ToJson(report));
      std::printf("%s\n", row.dump().c_str());
    } else {
      std::printf("%-56s KL %.2e +/- %.0e  argmax equal %5.1f %%  perplexity %.3f (%.3f)%s\n",
                  name.c_str(), report.mean_kl, report.kl_error, 100 * report.argmax_equal,
                  report.perplexity, report.perplexity_reference, simulated ? "  simulated" : "");
    }
    std::fflush(stdout);
  }

  const Checkpoint& checkpoint_;
  const Int8Flags& flags_;
  std::unique_ptr<AccuracyReference> reference_;
};

absl::Status RunInt8(const Int8Flags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(flags.model));
  std::unique_ptr<Checkpoint> planted;
  if (flags.plant) {
    TREADLE_ASSIGN_OR_RETURN(planted, PlantOutliers(*checkpoint, flags.outliers));
  }
  return Int8Comparison(flags.plant ? *planted : *checkpoint, flags).Run();
}

}  // namespace

int BenchInt8(int argc, char** argv) {
  Int8Flags flags;
  CLI::App app(
      "Ways to quantize weights and activations to 8 bits (LLM.int8(), Table 2.1): KL divergence "
      "from the weights as stored, exact. Ways that are not formats of ours are simulated.");
  app.add_option("--model", flags.model, "a .gguf file or a Hugging Face folder")->required();
  AddTextFlags(app, flags.forcing);
  app.add_option("--window", flags.options.window, "tokens per chunk, each from position 0");
  app.add_option("--max-tokens", flags.options.max_tokens, "of the text");
  app.add_flag("--plant-outliers", flags.plant,
               "the same function, with outlier features in every layer");
  app.add_option("--planted-features", flags.outliers.features, "of each norm");
  app.add_option("--planted-factor", flags.outliers.factor, "a power of two");
  app.add_flag("--json", flags.json, "print a JSON object per line");
  if (auto code = ParseFlags(app, "bench int8", argc, argv)) return *code;
  return Finish("bench int8", RunInt8(flags));
}

}  // namespace treadle
