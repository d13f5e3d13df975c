// treadle quantize: makes a checkpoint in other weight formats of one that there is.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/version.h"
#include "bench/quality/importance_of_text.h"
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
  q8_0, q5_0, q5_1, q4_0, q4_1, iq4_nl, q6_k, q5_k, q4_k, q3_k, iq4_xs
                     GGUF blocks; OUT must end in .gguf
  q3_k_m, q4_k_m, q5_k_m
                     llama-quantize's mixtures, embedding and head included; OUT must end in .gguf
  f32, f16, bf16     floats
  keep               as stored
A format alone is for the matrices of all linear layers, not the embedding and the head. Others by name:
NAME=FORMAT, where NAME is part of tensors' names, or lm_head, or embedding. Later entries win.

Examples:
  treadle quantize model.gguf small.gguf --weights q4_0
  treadle quantize Llama-3.2-1B Llama-3.2-1B.gguf --weights q4_k_m --calibration-text book.txt
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
  std::string imatrix;
  std::string write_imatrix;
};

// So many tokens of a text are read to find the importance of columns.
constexpr size_t kMaxImportanceTokens = 65536;

bool IsGguf(const std::string& path) { return path.ends_with(".gguf"); }

// Reads the calibration text for outlier features of the model as it is stored, and for the
// importance of columns.
absl::Status Calibrate(const Arguments& arguments, std::optional<OutlierReport>& outliers,
                       std::optional<Importance>& importance) {
  if (arguments.calibration_text.empty()) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(arguments.in));
  TREADLE_ASSIGN_OR_RETURN(
      const std::vector<int32_t> tokens,
      EncodeTextFile(*checkpoint, arguments.calibration_text, "--calibration-text"));
  const auto progress = ShowProgress("reading " + arguments.calibration_text);
  CpuBackendOptions cpu;
  cpu.threads = arguments.threads;
  if (arguments.report || arguments.json) {
    TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
    OutlierOptions options;
    options.threads = arguments.threads;
    options.progress = progress;
    TREADLE_ASSIGN_OR_RETURN(outliers,
                             FindOutlierFeatures(*checkpoint, std::move(backend), tokens, options));
  }
  if (!IsGguf(arguments.out)) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  const auto some = std::span(tokens).first(std::min(tokens.size(), kMaxImportanceTokens));
  TREADLE_ASSIGN_OR_RETURN(importance, ImportanceOfText(*checkpoint, std::move(backend), some,
                                                        arguments.threads, progress));
  if (arguments.write_imatrix.empty()) return absl::OkStatus();
  const auto chunks = (std::ssize(some) + kImportanceChunk - 1) / kImportanceChunk;
  return importance->Write(arguments.write_imatrix, arguments.calibration_text, chunks,
                           kImportanceChunk);
}

// Refuses flags that contradict each other.
absl::Status CheckFlags(const Arguments& arguments) {
  const bool text = !arguments.calibration_text.empty();
  if (text && !arguments.report && !arguments.json && !IsGguf(arguments.out)) {
    return InvalidArgument(
        "--calibration-text is for an OUT that ends in .gguf, --report or --json");
  }
  if (!arguments.imatrix.empty() && !IsGguf(arguments.out)) {
    return InvalidArgument("--imatrix is for an OUT that ends in .gguf");
  }
  if (!arguments.imatrix.empty() && text && IsGguf(arguments.out)) {
    return InvalidArgument("--imatrix and --calibration-text both say what columns are important, ",
                           "expected one of them");
  }
  if (!arguments.write_imatrix.empty() && !(text && IsGguf(arguments.out))) {
    return InvalidArgument(
        "--write-imatrix is of --calibration-text, for an OUT that ends in .gguf");
  }
  return absl::OkStatus();
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
  TREADLE_RETURN_IF_ERROR(CheckFlags(arguments));
  std::optional<OutlierReport> outliers;
  std::optional<Importance> importance;
  TREADLE_RETURN_IF_ERROR(Calibrate(arguments, outliers, importance));
  if (!arguments.imatrix.empty()) {
    TREADLE_ASSIGN_OR_RETURN(importance, Importance::Read(arguments.imatrix));
  }
  QuantizeOptions options;
  options.importance = importance ? &*importance : nullptr;
  options.weights = *std::move(plan);
  options.version = kVersion;
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
  app.add_option(
         "in", arguments.in,
         ".gguf file, Hugging Face folder, or random:SHAPE (shapes: treadle bench iteration "
         "--help), for comparisons with other engines")
      ->required();
  app.add_option("out", arguments.out, "new .gguf file, or a new Hugging Face folder")->required();
  app.add_option("--weights", arguments.weights, "formats: 'nf4', 'q4_0,lm_head=q8_0'")->required();
  app.add_option("--outlier-threshold", arguments.outlier_threshold,
                 "written beside int8 matrices; 0: no outliers; default: what IN says, else 6")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--threads", arguments.threads, "0: one per CPU of this process")
      ->check(CLI::Range(0, 4096));
  app.add_flag("--report", arguments.report, "print bits and errors of each matrix");
  app.add_flag("--json", arguments.json, "print the report as one JSON object");
  app.add_option(
      "--calibration-text", arguments.calibration_text,
      "a text, UTF-8, that IN reads: what its columns are multiplied by there (on the "
      "first 65536 tokens) says which errors of GGUF blocks matter; a report has its "
      "outlier features (LLM.int8()'s, of magnitude 6) on the first 2048; default: none");
  app.add_option("--imatrix", arguments.imatrix,
                 "such importance from a file of llama-imatrix or --write-imatrix; default: none");
  app.add_option("--write-imatrix", arguments.write_imatrix,
                 "write what --calibration-text found, as llama-imatrix does; default: no file");
  if (auto code = ParseFlags(app, "quantize", argc, argv)) return *code;
  return Finish("quantize", Quantize(arguments));
}

}  // namespace treadle
