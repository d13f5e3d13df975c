// treadle serve: loads a model and serves it until SIGTERM or SIGINT, then drains. A second signal
// ends the process at once.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <thread>

#include "kernels/status.h"
#include "server/address.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"
#include "server/cli/signals.h"
#include "server/configuration.h"
#include "server/ledger_follower.h"
#include "server/metrics.h"
#include "server/service.h"
#include "server/serving_stack.h"

namespace treadle {
namespace {

// Before minutes of loading: what would fail afterwards anyway.
absl::Status CheckPorts(const ServeOptions& options) {
  for (const std::string& text : {options.listen, options.metrics_listen}) {
    if (text == "none") continue;
    TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
    TREADLE_RETURN_IF_ERROR(ProbeListen(address));
  }
  return absl::OkStatus();
}

// Waits for a signal, then drains; a second signal does not wait.
void ServeUntilSignal(Signals& signals, InferenceServer& server, const ServeOptions& options) {
  const int first = signals.Wait();
  std::fprintf(stderr, "signal %d: draining, at most %lld ms; a second signal ends at once\n",
               first, static_cast<long long>(options.drain_timeout.count()));
  bool drained = false;
  std::thread drain([&] {
    drained = server.DrainAndStop(options.drain_timeout);
    signals.Interrupt();
  });
  if (const int second = signals.Wait(); second != 0) _exit(128 + second);
  drain.join();
  std::fprintf(stderr, drained ? "drained\n" : "the drain timeout passed; the rest was ended\n");
}

absl::Status Serve(const ServeOptions& options) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(options));
  Signals signals;
  TREADLE_RETURN_IF_ERROR(CheckPorts(options));
  std::fputs(Describe(options).c_str(), stderr);

  absl::StatusOr<OpenedModel> opened = absl::UnknownError("");
  {
    Progress progress("loading " + options.model);
    opened = OpenModel(options, [&](double fraction) { progress.Set(fraction); });
  }
  TREADLE_RETURN_IF_ERROR(opened.status());
  if (!opened->notice.empty()) std::fprintf(stderr, "note: %s\n", opened->notice.c_str());
  const ServedModel& model = opened->served;
  if (!model.tokenizer) {
    std::fprintf(stderr, "note: the checkpoint has no tokenizer; token ids only\n");
  } else if (!model.chat_template) {
    std::fprintf(stderr, "note: no chat: %s\n", model.chat_template_problem.c_str());
  }
  std::fprintf(stderr, "%s (%s), %.1f M parameters, weights %.1f MB; %s; %s\n", model.name.c_str(),
               model.architecture.c_str(), model.parameters / 1e6, opened->weight_bytes / 1e6,
               model.backend.c_str(), opened->kv.ToString().c_str());

  TREADLE_ASSIGN_OR_RETURN(
      std::unique_ptr<ServingStack> stack,
      ServingStack::Create(std::move(opened->served), std::move(opened->engine),
                           SchedulingFrom(options)));
  Metrics metrics(stack->model().name, stack->pool());
  std::vector<LedgerFollower::Sink> sinks = {
      [&metrics](const LedgerRecord& record, uint64_t) { metrics.Record(record); }};
  if (!options.ledger_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(LedgerFollower::Sink file, OpenLedgerFile(options.ledger_file));
    sinks.push_back(std::move(file));
  }
  LedgerFollower follower(stack->ledger(), std::move(sinks));
  TREADLE_RETURN_IF_ERROR(stack->Start());

  ServiceOptions service;
  service.listen = options.listen;
  service.default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens);
  service.stream_stall_timeout = options.stream_stall_timeout;
  service.max_request_bytes = options.max_request_bytes;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<InferenceServer> server,
                           InferenceServer::Start(*stack, follower, service));
  std::string metrics_at = "no metrics";
  if (options.metrics_listen != "none") {
    TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(options.metrics_listen));
    TREADLE_ASSIGN_OR_RETURN(address.port, metrics.Listen(options.metrics_listen));
    metrics_at = "metrics at http://" + ToString(address) + "/metrics";
  }
  std::fprintf(stderr, "listening on %s (gRPC), %s\n", ToString(server->address()).c_str(),
               metrics_at.c_str());
  ServeUntilSignal(signals, *server, options);
  follower.Stop();
  return absl::OkStatus();
}

}  // namespace

int RunServe(int argc, char** argv) {
  ServeOptions options;
  CLI::App app("Loads a model and serves it over gRPC until SIGTERM.");
  AddServeFlags(app, options);
  if (auto code = ParseFlags(app, "serve", argc, argv)) return *code;
  const absl::Status status = Serve(options);
  return status.ok() ? 0 : Fail("serve", status);
}

}  // namespace treadle
