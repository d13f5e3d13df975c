// treadle quantize: makes a checkpoint in other weight formats of one that there is.
#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/quality/outlier_features.h"
#include "bench/quality/teacher_forcing.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

constexpr char kExamples[] = R"(Formats:
  nf4, fp4           bitsandbytes' 4-bit types; nf4:128 for blocks of 128 weights, nf4-dq with double
                     quantization, nf4-dq:128 with both
  int8               LLM.int8()
  fp8                E4M3 with a scale per row
  kbit-int4:64       also kbit-float4e2, kbit-dynamic5, kbit-quantile3, blocks of 32 to 1024 or :tensor
  q8_0, q4_0, q4_1   GGUF blocks; OUT must end in .gguf
  f32, f16, bf16     floats
  keep               as stored
A format alone is for the matrices of all linear layers, not the embedding and the head. Others by name:
NAME=FORMAT, where NAME is part of tensors' names, or lm_head, or embedding. Later entries win.

Examples:
  treadle quantize model.gguf small.gguf --weights q4_0
  treadle quantize Llama-3.2-1B Llama-3.2-1B.gguf --weights q8_0,embedding=q8_0
  treadle quantize Llama-3.2-1B Llama-3.2-1B-nf4 --weights nf4-dq
  treadle quantize Llama-3.2-1B mixed --weights 'nf4,down_proj=int8,lm_head=int8' --report)";

volatile std::sig_atomic_t interrupted = 0;
void Interrupt(int) { interrupted = 1; }

struct Arguments {
  std::string in;
  std::string out;
  std::string weights;
  std::optional<float> outlier_threshold;
  int threads = 0;
  bool report = false;
  bool json = false;
  std::string calibration_text;
};

// Finds outlier features of the model as it is stored.
absl::StatusOr<OutlierReport> FindOutliers(const Arguments& arguments) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(arguments.in));
  TREADLE_ASSIGN_OR_RETURN(
      const std::vector<int32_t> tokens,
      EncodeTextFile(*checkpoint, arguments.calibration_text, "--calibration-text"));
  CpuBackendOptions cpu;
  cpu.threads = arguments.threads;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  OutlierOptions options;
  options.threads = arguments.threads;
  options.progress = ShowProgress("reading " + arguments.calibration_text);
  return FindOutlierFeatures(*checkpoint, std::move(backend), tokens, options);
}

void PrintReport(const Arguments& arguments, const QuantizeReport& report,
                 const std::optional<OutlierReport>& outliers) {
  if (arguments.json) {
    auto json = nlohmann::ordered_json::parse(QuantizeReportJson(report, true));
    json["outlier_features"] = nullptr;
    if (outliers) json["outlier_features"] = ToJson(*outliers);
    std::printf("%s\n", json.dump(2).c_str());
  } else if (arguments.report) {
    std::fputs(QuantizeReportText(report, true).c_str(), stdout);
    std::fputs(outliers ? ToTable(*outliers).c_str()
                        : "outlier features: not looked for (--calibration-text FILE does)\n",
               stdout);
  }
}

absl::Status Quantize(const Arguments& arguments) {
  auto plan = WeightPlan::Parse(arguments.weights);
  if (!plan.ok()) return InvalidArgument("--weights: ", plan.status().message());
  std::optional<OutlierReport> outliers;
  if (!arguments.calibration_text.empty()) {
    if (!arguments.report && !arguments.json) {
      return InvalidArgument("--calibration-text is for --report or --json");
    }
    TREADLE_ASSIGN_OR_RETURN(outliers, FindOutliers(arguments));
  }
  QuantizeOptions options;
  options.weights = *std::move(plan);
  options.version = TREADLE_VERSION;
  options.threads = arguments.threads;
  options.errors = arguments.report || arguments.json;
  options.outlier_threshold = arguments.outlier_threshold;
  options.cancelled = [] { return interrupted != 0; };
  std::signal(SIGINT, Interrupt);
  std::signal(SIGTERM, Interrupt);
  const auto begin = std::chrono::steady_clock::now();
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(arguments.in));
  options.progress = ShowProgress("quantizing " + arguments.in, checkpoint->file_bytes());
  TREADLE_ASSIGN_OR_RETURN(const QuantizeReport report,
                           QuantizeCheckpoint(arguments.in, arguments.out, options));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  for (const std::string& notice : report.notices) {
    std::fprintf(stderr, "note: %s\n", notice.c_str());
  }
  PrintReport(arguments, report, outliers);
  const auto parameters = static_cast<double>(report.parameters);
  std::fprintf(
      stderr, "%s: %zu matrices converted, %.1f MB -> %.1f MB, %.2f bits per parameter, %.1f s\n",
      arguments.out.c_str(), report.matrices.size(), static_cast<double>(report.source_bytes) / 1e6,
      static_cast<double>(report.output_bytes) / 1e6,
      8 * static_cast<double>(report.output_bytes) / parameters, seconds.count());
  return absl::OkStatus();
}

}  // namespace

int RunQuantize(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Writes a checkpoint in other weight formats.");
  app.footer(kExamples);
  app.add_option("in", arguments.in, ".gguf file or Hugging Face folder")->required();
  app.add_option("out", arguments.out, "new .gguf file, or a new Hugging Face folder")->required();
  app.add_option("--weights", arguments.weights, "formats: 'nf4', 'q4_0,lm_head=q8_0'")->required();
  app.add_option("--outlier-threshold", arguments.outlier_threshold,
                 "written beside int8 matrices; 0: no outliers; default: what IN says, else 6")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--threads", arguments.threads, "0: one per CPU of this process")
      ->check(CLI::Range(0, 4096));
  app.add_flag("--report", arguments.report, "print bits and errors of each matrix");
  app.add_flag("--json", arguments.json, "print the report as one JSON object");
  app.add_option("--calibration-text", arguments.calibration_text,
                 "a text, UTF-8: the report then has IN's outlier features (LLM.int8()'s, of "
                 "magnitude 6) on its first 2048 tokens; loads all of IN; default: none");
  if (auto code = ParseFlags(app, "quantize", argc, argv)) return *code;
  return Finish("quantize", Quantize(arguments));
}

}  // namespace treadle
