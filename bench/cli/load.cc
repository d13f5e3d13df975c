// treadle-bench load: what the load client can do by itself. A server in this process, on other
// cores, answers each request with tokens at fixed times and computes nothing; the client's two
// threads share one core.
#include <grpcpp/grpcpp.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <nlohmann/json.hpp>
#include <queue>
#include <thread>

#include "absl/strings/str_format.h"
#include "base/background.h"
#include "base/status.h"
#include "base/sync.h"
#include "bench/cli/benchmarks.h"
#include "bench/load/load_report.h"
#include "bench/load/load_target.h"
#include "net/open_files.h"
#include "server/cli/command.h"
#include "server/http/http_server.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kTokens = 5;  // of each answer

struct LoadBenchOptions {
  double rate = 2000;
  int64_t streams = 1000;
  int64_t seconds = 10;
};

// The calling thread, and the threads that it starts, run on this core alone, or on all others.
// False on a machine with one.
bool StayOn(int core, bool others) {
  const unsigned cores = std::thread::hardware_concurrency();
  if (cores < 2) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (unsigned i = 0; i < cores; ++i) {
    if ((static_cast<int>(i) == core) != others) CPU_SET(i, &set);
  }
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

// The share of the time that this core is away from a loop that does nothing, for more than 1 ms
// each: what a hypervisor or other programs take, and no client can be more punctual than that.
double ShareAway() {
  constexpr std::chrono::seconds kLong{2};
  const SteadyClock::time_point begin = SteadyClock::now();
  SteadyClock::duration away{};
  for (SteadyClock::time_point last = begin, now = begin; last < begin + kLong; last = now) {
    now = SteadyClock::now();
    if (now - last > std::chrono::milliseconds(1)) away += now - last;
  }
  return std::chrono::duration<double>(away) / kLong;
}

// Writes what is due to every stream, from one thread.
class Ticker {
 public:
  explicit Ticker(SteadyClock::duration gap) : gap_(gap) {}
  void Add(std::shared_ptr<HttpReply> reply) {
    MutexLock lock(mutex_);
    streams_.push({SteadyClock::now() + gap_, 0, std::move(reply)});
    pulse_.Nudge();
  }

 private:
  struct Stream {
    SteadyClock::time_point due;
    int tokens;
    std::shared_ptr<HttpReply> reply;
  };

  SteadyClock::time_point WriteDue() {
    MutexLock lock(mutex_);
    while (!streams_.empty() && streams_.front().due <= SteadyClock::now()) {
      Stream stream = std::move(streams_.front());
      streams_.pop();
      stream.reply->Write("data: {\"choices\":[{\"text\":\"word\"}]}\n\n");
      if (++stream.tokens == kTokens) {
        stream.reply->Write("data: [DONE]\n\n");
        stream.reply->End();
      } else {
        stream.due += gap_;
        streams_.push(std::move(stream));
      }
    }
    return streams_.empty() ? PulseThread::kNever : streams_.front().due;
  }

  const SteadyClock::duration gap_;
  Mutex mutex_;
  std::queue<Stream> streams_ ABSL_GUARDED_BY(mutex_);  // all gaps are equal: first in, first due
  PulseThread pulse_{[this] { return WriteDue(); }};    // last
};

absl::StatusOr<std::unique_ptr<HttpServer>> ServeEchoes(Ticker& ticker, int64_t streams) {
  HttpOptions options;
  options.connections = options.per_address = static_cast<size_t>(2 * streams + 64);
  const FileNeed needs[] = {{"the load's connections, both ends", 2 * options.connections}};
  TREADLE_RETURN_IF_ERROR(ReserveFiles(needs));
  return HttpServer::Start(
      "127.0.0.1:0", options,
      {{"GET", "/v1/models",
        [](const HttpRequest&, const auto& reply) {
          reply->Send({.body = R"({"data":[{"id":"echo","vocab_size":1000}]})"});
        }},
       {"POST", "/v1/completions", [&ticker](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
          reply->Begin({.content_type = "text/event-stream"});
          ticker.Add(std::move(reply));
        }}});
}

absl::StatusOr<nlohmann::ordered_json> RunLoadBench(const LoadBenchOptions& options) {
  const bool apart = StayOn(0, /*others=*/true);
  const double gap = static_cast<double>(options.streams) / options.rate / kTokens;
  Ticker ticker(
      std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(gap)));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> server,
                           ServeEchoes(ticker, options.streams));
  if (apart) StayOn(0, /*others=*/false);
  const double away = ShareAway();
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<LoadTarget> target,
      ConnectToServer(
          {.protocol = LoadProtocol::kOpenAi,
           .target = ToString(server->address()),
           .access = {.credentials = grpc::InsecureChannelCredentials(), .authorization = {}}}));
  SyntheticTrace trace;
  trace.num_requests = static_cast<int64_t>(options.rate) * options.seconds;
  trace.request_rate = options.rate;
  trace.input = {32, 32};
  trace.output = {kTokens, kTokens};
  TREADLE_ASSIGN_OR_RETURN(const LoadResult result, Replay(MakeTrace(trace), *target, {}));
  const LoadReport report = Analyze(result, {});
  nlohmann::ordered_json about = {
      {"offered_requests_per_second", options.rate},
      {"core_away", away},
      {"cores", apart ? "the client has a core of its own" : "the client shares the only core"}};
  return ToJson(report, result, false, {.percentiles = {50, 90, 99, 99.9}}, std::move(about));
}

}  // namespace

int BenchLoad(int argc, char** argv) {
  LoadBenchOptions options;
  bool json = false;
  CLI::App app(
      "The load client alone, against a server that only echoes: how many requests per second it "
      "offers, and how late it is with them. The client has one core, the server the others.");
  app.add_option("--rate", options.rate, "requests per second, a Poisson process")
      ->check(CLI::Range(1.0, 1e6));
  app.add_option("--streams", options.streams, "answers under way at once, on average")
      ->check(CLI::Range(1, 30'000));
  app.add_option("--seconds", options.seconds, "how long")->check(CLI::Range(1, 3600));
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "treadle-bench load", argc, argv)) return *code;
  const auto report = RunLoadBench(options);
  if (!report.ok()) return Fail("treadle-bench load", report.status());
  const auto number = [&](const char* key) { return (*report)[key].get<double>(); };
  return Finish(
      "treadle-bench load",
      json
          ? report->dump()
          : absl::StrFormat(
                "offered %.0f requests/s, served %.0f/s, %.0f streams at once at most, %.0f "
                "failed\n"
                "client lag: median %.3f ms, p90 %.3f ms, p99 %.3f ms, p99.9 %.3f ms (%s, which is "
                "away from a loop for %.1f %% of the time, more than 1 ms each)\n",
                options.rate, number("request_throughput"), number("max_concurrent_requests"),
                number("failed"), number("p50_client_lag_ms"), number("p90_client_lag_ms"),
                number("p99_client_lag_ms"), number("p99_9_client_lag_ms"),
                (*report)["cores"].get<std::string>(), 100 * number("core_away")));
}

}  // namespace treadle
