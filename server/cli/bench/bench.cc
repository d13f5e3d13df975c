// treadle bench: one row of the table each; here bench iteration.
#include "server/cli/bench/bench.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "base/status.h"
#include "bench/iteration/iteration_bench.h"
#include "models/checkpoints/random/random_checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"

namespace treadle {
namespace {

absl::StatusOr<std::string> RunIteration(ServeOptions serve, IterationBenchOptions options,
                                         const std::string& batch_sizes, bool json) {
  TREADLE_ASSIGN_OR_RETURN(const auto sizes, ParseNumbers("--batch-sizes", batch_sizes, 1, 65536));
  options.batch_sizes.assign(sizes.begin(), sizes.end());
  const int32_t largest = *std::max_element(options.batch_sizes.begin(), options.batch_sizes.end());
  serve.max_batch_size = std::max<int64_t>(serve.max_batch_size, largest);
  if (serve.max_batch_tokens > 0) {
    serve.max_batch_tokens = std::max<int64_t>(serve.max_batch_tokens, largest + 1);
  }
  const int32_t longest = std::ranges::max(options.prompt_tokens);
  if (serve.max_context == 0) serve.max_context = int64_t{longest} + options.new_tokens;
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(serve));
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(serve, {}));
  options.max_batch_tokens = opened.max_batch_tokens;
  options.page_size = opened.served.page_size;
  options.total_pages = opened.served.kv_pages;
  options.vocab = opened.served.vocab;
  const IterationBenchSubject subject = {opened.served.name, opened.served.backend,
                                         opened.weight_bytes};
  std::fprintf(stderr, "%s; %s; weights %.1f MB\n", subject.model.c_str(), subject.backend.c_str(),
               static_cast<double>(subject.weight_bytes) * 1e-6);
  TREADLE_ASSIGN_OR_RETURN(const auto rows, RunIterationBench(*opened.engine, options));
  return json ? ToJson(subject, rows) : ToTable(rows);
}

int BenchIteration(int argc, char** argv) {
  ServeOptions serve;
  IterationBenchOptions options;
  std::string batch_sizes = "1,2,4,8,16,32";
  bool json = false;
  CLI::App app("The engine alone: one batch from prompt to last token (ORCA's Figure 9).");
  AddServeFlags(app, serve, /*engine_only=*/true);
  AddRandomModelFlag(app, serve);
  app.add_option("--prompt-tokens", options.prompt_tokens,
                 "of each sequence; several, separated by commas: one after the other")
      ->delimiter(',');
  app.add_option("--new-tokens", options.new_tokens, "of each sequence");
  app.add_option("--batch-sizes", batch_sizes, "sequences, separated by commas");
  app.add_option("--repeats", options.repeats, "runs of each size; the median counts");
  app.add_flag("--one-at-a-time", options.one_at_a_time,
               "no iteration is submitted before the last one's result: the gap between them is "
               "what the host takes, which working ahead hides");
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "bench iteration", argc, argv)) return *code;
  return Finish("bench iteration", RunIteration(serve, options, batch_sizes, json));
}

constexpr Command kBenchmarks[] = {
    {"serve", "replay a trace against a server (ORCA's Figure 10)", BenchServe},
    {"iteration", "the engine alone (ORCA's Figure 9)", BenchIteration},
    {"trace", "a timeline of all stages and ranks, for Perfetto", BenchTrace},
    {"kernels", "each op on real shapes, beside the machine's ceilings", BenchKernels},
    {"scheduler", "scheduling and bookkeeping, with an engine that does nothing", BenchScheduler},
    {"accuracy", "KL divergence of compute modes and weight formats from exact", BenchAccuracy},
    {"int8", "ways to quantize to 8 bits (LLM.int8(), Table 2.1)", BenchInt8},
};

void PrintHelp(std::FILE* out) {
  std::fprintf(out, "usage: treadle bench BENCHMARK [flags]; --help lists a benchmark's flags\n\n");
  for (const Command& benchmark : kBenchmarks) {
    std::fprintf(out, "  %-10s %s\n", benchmark.name, benchmark.help);
  }
}

}  // namespace

absl::StatusOr<std::vector<double>> ParseNumbers(const char* flag, const std::string& text,
                                                 double low, double high) {
  std::vector<double> numbers;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    char* end = nullptr;
    const double number = std::strtod(part.c_str(), &end);
    if (part.empty() || *end != '\0' || !(number >= low && number <= high)) {
      return InvalidArgument(flag, " has '", part, "', expected numbers from ", low, " to ", high,
                             " separated by commas");
    }
    numbers.push_back(number);
  }
  if (numbers.empty()) return InvalidArgument(flag, " is empty");
  return numbers;
}

CLI::Option* AddRandomModelFlag(CLI::App& command, ServeOptions& options) {
  CLI::Option* const flag = command.add_option_function<std::string>(
      "--random-model",
      [&options](const std::string& shape) {
        options.model = Str(RandomCheckpoint::kPrefix, shape);
      },
      Str("instead of --model: random weights in the shape of ", RandomCheckpoint::Shapes(),
          "; changed by ',layers=4' and the like"));
  return flag->type_name("SHAPE")->excludes(command.get_option("--model"));
}

int RunBench(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Command& benchmark : kBenchmarks) {
    if (name == benchmark.name) return benchmark.run(argc - 1, argv + 1);
  }
  const bool help = name == "--help" || name == "-h";
  PrintHelp(help ? stdout : stderr);
  if (!help && !name.empty()) std::fprintf(stderr, "\n'%s' is no benchmark\n", argv[1]);
  return help ? 0 : 2;
}

}  // namespace treadle
