// treadle bench trace: a timeline of some iterations over all stages and ranks.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/iteration/timeline.h"
#include "server/cli/bench/bench.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/configuration.h"

namespace treadle {
namespace {

absl::Status Record(ServeOptions serve, TimelineOptions options, const std::string& path) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(serve));
  std::ofstream file(path);  // before the work
  if (!file) return InvalidArgument("--out: cannot write ", path);
  if (serve.max_context == 0) serve.max_context = options.prompt_tokens + options.new_tokens;
  TREADLE_ASSIGN_OR_RETURN(const OpenedModel opened, OpenModel(serve, {}));
  std::fprintf(stderr, "%s; %s\n", opened.served.name.c_str(), opened.served.backend.c_str());
  if (options.requests == 0) options.requests = static_cast<int32_t>(2 * serve.stages());
  options.max_batch_size = serve.max_batch_size;
  options.max_batch_tokens = opened.max_batch_tokens;
  options.page_size = opened.served.page_size;
  options.total_pages = opened.served.kv_pages;
  options.vocab = opened.served.vocab;
  TREADLE_ASSIGN_OR_RETURN(const std::vector<TraceEvent> events,
                           RecordTimeline(*opened.engine, options));
  file << ToChromeTrace(events);
  if (!file.flush()) return InvalidArgument("--out: cannot write ", path);
  std::fputs(ToTable(events).c_str(), stdout);
  std::fprintf(stderr, "%s: open it in https://ui.perfetto.dev or chrome://tracing\n",
               path.c_str());
  return absl::OkStatus();
}

}  // namespace

int BenchTrace(int argc, char** argv) {
  ServeOptions serve;
  TimelineOptions options;
  options.requests = 0;
  std::string path = "trace.json";
  CLI::App app("Records what every stage and rank did during some iterations.");
  AddServeFlags(app, serve, /*engine_only=*/true);
  app.add_option("--out", path, "file for the timeline, Chrome trace JSON");
  app.add_option("--requests", options.requests, "requests at once; 0: two per stage")
      ->check(CLI::Range(0, 65536));
  app.add_option("--prompt-tokens", options.prompt_tokens, "of each request")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--new-tokens", options.new_tokens, "of each request")
      ->check(CLI::Range(1, 1 << 20));
  if (auto code = ParseFlags(app, "bench trace", argc, argv)) return *code;
  return Finish("bench trace", Record(std::move(serve), options, path));
}

}  // namespace treadle
