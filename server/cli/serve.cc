// treadle serve: loads a model and serves it until SIGTERM or SIGINT, then drains. A second signal
// ends the process at once.
#include <malloc.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <future>
#include <optional>
#include <system_error>
#include <thread>

#include "absl/strings/str_join.h"
#include "base/file_sums.h"
#include "base/mapped_file.h"
#include "base/status.h"
#include "base/version.h"
#include "models/checkpoints/model_path.h"
#include "net/address.h"
#include "server/cli/command.h"
#include "server/cli/daemon.h"
#include "server/cli/open_model.h"
#include "server/cli/prefix_cache_disk.h"
#include "server/cli/progress.h"
#include "server/cli/serve_doors.h"
#include "server/configuration.h"
#include "server/configuration_sources.h"
#include "server/durable/request_store.h"
#include "server/flag_values.h"
#include "server/grpc/service.h"
#include "server/http_routes.h"
#include "server/observe/ledger_file.h"
#include "server/observe/ledger_follower.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/openai/openai_server.h"
#include "server/serving_stack.h"
#include "server/session/sampling_defaults.h"

namespace treadle {
namespace {

constexpr int kCutOff = 3;  // exit code, see kExitCodes

// Before minutes of loading: what would fail afterwards anyway.
absl::Status CheckPorts(const ServeOptions& options) {
  for (const std::string& text :
       {options.listen, options.http_listen, options.metrics_listen, options.health_listen}) {
    if (text == "none") continue;
    TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
    TREADLE_RETURN_IF_ERROR(ProbeListen(address));
  }
  return absl::OkStatus();
}

absl::Status CheckModelHash(const std::string& path, const std::string& expected) {
  const absl::StatusOr<std::unique_ptr<MappedFile>> file = MappedFile::Open(path);
  const absl::StatusOr<std::string> found = file.ok() ? (*file)->Sum() : file.status();
  if (!found.ok()) {
    return InvalidArgument("--model-sha256: ", found.status().message(), ", expected one file");
  }
  if (*found == expected) return absl::OkStatus();
  return InvalidArgument("--model-sha256: ", path, " has ", *found, ", expected ", expected);
}

// Waits for a signal, then drains; a second signal does not wait. An engine that was given up, for
// the reason that `given_up` then has, is an error, and nothing is left to drain. Gives the exit
// code.
absl::StatusOr<int> ServeUntilSignal(Signals& signals, std::future<absl::Status> given_up,
                                     InferenceServer& server, const ServeOptions& options,
                                     Log& log) {
  const int first = signals.Wait();
  if (first == 0) {
    server.DrainAndStop(options.drain_timeout);
    return given_up.get();
  }
  const int64_t most = options.drain_timeout.count();
  log.Write({.name = "draining",
             .message = Str("signal ", first, ": draining, at most ", most,
                            " ms; a second signal ends at once"),
             .fields = {{"signal", int64_t{first}}, {"timeout_ms", most}}});
  bool drained = false;
  std::atomic<bool> over = false;
  std::thread drain([&] {
    drained = server.DrainAndStop(options.drain_timeout);
    over = true;
    signals.Interrupt();
  });
  while (!over) {  // an engine that is given up now interrupts, too
    if (const int second = signals.Wait(); second != 0) _exit(128 + second);
  }
  drain.join();
  if (drained) {
    log.Write({.name = "drained", .message = "drained"});
  } else {
    log.Write({.severity = Severity::kWarning,
               .name = "cut_off",
               .message = "the drain timeout passed; the rest was ended"});
  }
  if (given_up.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    TREADLE_RETURN_IF_ERROR(given_up.get());
  }
  return drained ? 0 : kCutOff;
}

// A bar on a terminal, if nothing else than the log's text is there.
absl::StatusOr<OpenedModel> Load(const CheckedModel& checked, Log& log) {
  const bool bar = log.options().format == LogFormat::kText && log.options().file.empty() &&
                   isatty(STDERR_FILENO);
  if (bar) log.Flush(std::chrono::seconds(1));
  const std::string what = "loading " + checked.options.model;
  return OpenModel(
      checked, ShowProgress(what, checked.checkpoint->file_bytes(), bar ? LogSink() : log.sink()),
      log.sink());
}

void Introduce(const OpenedModel& opened, Log& log) {
  const ServedModel& model = opened.served;
  const auto note = [&log](const std::string& text) {
    log.Write({.name = "model_note", .message = "note: " + text});
  };
  if (!opened.notice.empty()) note(opened.notice);
  if (!model.tokenizer) {
    note("the checkpoint has no tokenizer; token ids only");
  } else if (!model.chat_template) {
    note("no chat: " + model.chat_template_problem);
  }
  if (model.sampling_defaults) {
    note(Str("requests sample as the model's authors recommend, where they do not say otherwise: ",
             EffectsJson(*model.sampling_defaults), " (--generation-config)"));
  }
  char sizes[64];
  std::snprintf(sizes, sizeof sizes, "%.1f M parameters, weights %.1f MB", model.parameters / 1e6,
                opened.weight_bytes / 1e6);
  log.Write({.name = "model_loaded",
             .message = Str(model.name, " (", model.architecture, "), ", sizes, "; ", model.backend,
                            "; ", opened.kv.ToString()),
             .fields = {{"model", model.name},
                        {"architecture", model.architecture},
                        {"parameters", model.parameters},
                        {"weight_bytes", static_cast<int64_t>(opened.weight_bytes)},
                        {"backend", model.backend},
                        {"kv_pages", model.kv_pages[PageKind::kWhole]},
                        {"kv_window_pages", model.kv_pages[PageKind::kWindow]}}});
}

// The settings that `options` left open, and their values now.
LogEvent Chosen(const ServeOptions& options, const OpenedModel& opened) {
  LogEvent event{.name = "chosen",
                 .message = "chosen automatically:",
                 .text = LogEvent::Text::kMessageAndFields};
  const auto add = [&](bool open, const char* flag, auto value) {
    if (open) event.fields.push_back({flag, std::move(value)});
  };
  add(options.device == DeviceChoice::kAuto, "device", std::string(opened.cuda ? "cuda" : "cpu"));
  add(options.threads == 0 && options.workers.empty(), "threads", int64_t{opened.threads});
  add(!options.speculate, "speculate",
      std::string(WordOf(kSpeculate, SpeculateOf(options, opened.cuda))));
  add(options.max_context == 0, "max-context", opened.served.max_context);
  add(options.kv_memory == 0, "kv-memory", ShowBytes(opened.kv.bytes));
  return event;
}

void AddAdapters(const ServedModel& model, const ServeOptions& options, Metrics& metrics) {
  const std::shared_ptr<AdapterRegistry> adapters = model.adapters;
  if (!adapters) return;
  const auto now = [adapters](int64_t AdapterRegistry::Counts::*member) {
    return [adapters, member] { return static_cast<double>(adapters->counts().*member); };
  };
  metrics.AddGauge("treadle:loras_loaded", "LoRA adapters in memory.",
                   now(&AdapterRegistry::Counts::loaded));
  metrics.AddGauge("treadle:lora_requests_waiting", "Requests whose LoRA adapter is to be loaded.",
                   now(&AdapterRegistry::Counts::waiting));
  metrics.AddCounter("treadle:lora_loads_total", "LoRA adapters brought to memory.",
                     now(&AdapterRegistry::Counts::loads));
  metrics.AddCounter("treadle:lora_evictions_total", "LoRA adapters that made room for others.",
                     now(&AdapterRegistry::Counts::evictions));
  const auto info = [adapters, most = options.max_loras]() -> Metrics::Labels {
    return {{"max_lora", Str(most)},
            {"running_lora_adapters", absl::StrJoin(adapters->Running(), ",")},
            {"waiting_lora_adapters", absl::StrJoin(adapters->Waiting(), ",")}};
  };
  constexpr char kHelp[] = "LoRA adapters that requests have or wait for.";
  metrics.AddInfo("treadle:lora_requests_info", kHelp, info);
  if (options.metrics_dialect == MetricsDialect::kTreadle) return;
  metrics.AddInfo("vllm:lora_requests_info", kHelp, info);
}

// Metrics of the program and its cache that stay as they are.
void Tell(const ServeOptions& options, const ServedModel& model, Metrics& metrics) {
  metrics.AddInfo("treadle:build_info", "The program's version and what it computes on; always 1.",
                  {{"version", kVersion}, {"backend", model.backend}});
  if (options.metrics_dialect == MetricsDialect::kTreadle) return;
  metrics.AddInfo("vllm:cache_config_info", "Information of the K/V cache; always 1.",
                  {{"block_size", Str(model.paging.page_size)},
                   {"num_gpu_blocks", Str(model.kv_pages[PageKind::kWhole])},
                   {"cache_dtype", std::string(Name(options.kv_dtype))},
                   {"enable_prefix_caching", options.prefix_cache ? "True" : "False"},
                   {kVllmEngineLabel, kVllmEngine}});
}

// --record, in front of the engine.
absl::StatusOr<std::shared_ptr<Recording>> Record(const ServeOptions& options,
                                                  std::string configuration, OpenedModel& opened,
                                                  Log& log) {
  opened.setup.configuration = std::move(configuration);
  RecordingOptions recording{
      .file = options.record, .max_bytes = options.record_size, .setup = std::move(opened.setup)};
  recording.ended = [tell = log.sink(), file = options.record](const std::string& why) {
    tell({.severity = Severity::kWarning,
          .name = "recording_ended",
          .message = Str("nothing more is recorded: ", why),
          .fields = {{"file", file}}});
  };
  TREADLE_ASSIGN_OR_RETURN(auto opened_recording, Recording::Open(std::move(recording)));
  opened.engine = Recording::Wrap(opened_recording, std::move(opened.engine));
  return opened_recording;
}

// `configuration`: as --print-config gives it.
absl::StatusOr<int> Serve(const ServeOptions& options, std::string configuration, Log& log) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(options));
  Signals signals;
  std::optional<EndOnSignal> loading(std::in_place, signals, log);
  TREADLE_RETURN_IF_ERROR(ReserveFiles(FilesOf(options)));
  // With --model-sha256 the file is not used before its sum is known.
  std::optional<CheckedModel> checked;
  if (options.model_sha256.empty()) {
    TREADLE_ASSIGN_OR_RETURN(checked, CheckModel(options));
  } else if (std::error_code error; !std::filesystem::exists(options.model, error)) {
    return NoModelAt(options.model);
  }
  TREADLE_RETURN_IF_ERROR(CheckPorts(options));
  TREADLE_ASSIGN_OR_RETURN(Doors doors, OpenDoors(options, log));
  if (!options.durable.empty()) KeepFileSums(options.durable + "/model-sums");
  if (!options.model_sha256.empty()) {
    TREADLE_RETURN_IF_ERROR(CheckModelHash(options.model, options.model_sha256));
    TREADLE_ASSIGN_OR_RETURN(checked, CheckModel(options));
  }
  // A line of JSON has all of it: it is for programs.
  log.Write(Describe(options, /*all=*/log.options().format == LogFormat::kJson));
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, Load(*checked, log));
  checked.reset();
  // The fingerprint of a model in one file is the sum of what was loaded.
  if (!options.model_sha256.empty() && opened.setup.fingerprint != options.model_sha256) {
    return InvalidArgument("--model-sha256: ", options.model,
                           " was replaced or written to after its sum was taken, expected it to "
                           "stay as it is until it is loaded");
  }
  loading.reset();
#ifdef __GLIBC__
  // Blocks of this size go back to the system at once: what a long request took is not kept.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
  opened.served.sha256 = options.model_sha256;
  Introduce(opened, log);
  if (LogEvent chosen = Chosen(options, opened); !chosen.fields.empty()) {
    log.Write(std::move(chosen));
  }

  const Speculate speculate = SpeculateOf(options, opened.cuda);
  std::shared_ptr<Recording> recording;
  if (!options.record.empty()) {
    TREADLE_ASSIGN_OR_RETURN(recording, Record(options, std::move(configuration), opened, log));
  }

  std::promise<absl::Status> given_up;
  SchedulingOptions scheduling = SchedulingFrom(options, opened);
  ChooseBatchAtStart(options, opened, scheduling);
  if (options.remote() && options.on_worker_loss == OnWorkerLoss::kFail) {
    scheduling.give_up = [&](const absl::Status& reason) {
      given_up.set_value(reason);
      signals.Interrupt();
    };
  }
  TREADLE_ASSIGN_OR_RETURN(scheduling.page_files, OpenPageFiles(options, opened, log.sink()));
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<ServingStack> stack,
                           ServingStack::Create(std::move(opened.served), std::move(opened.engine),
                                                scheduling, std::move(opened.draft)));
  std::unique_ptr<LedgerFile> ledger_file;
  Metrics metrics(stack->model().name, stack->pool(),
                  {.dialect = options.metrics_dialect, .max_context = stack->model().max_context});
  Tell(options, stack->model(), metrics);
  metrics.AddCounter("treadle:log_lines_dropped_total",
                     "Log lines dropped: the queue was full, or the file failed.",
                     [&log] { return static_cast<double>(log.dropped()); });
  AddPageFiles(scheduling.page_files, metrics);
  AddAdapters(stack->model(), options, metrics);
  std::vector<LedgerFollower::Sink> sinks = {
      [&metrics](const LedgerRecord& record, uint64_t) { metrics.Record(record); }};
  if (!options.ledger_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(ledger_file, LedgerFile::Open(options.ledger_file, log.sink()));
    LedgerFile& file = *ledger_file;
    sinks.push_back([&file](const LedgerRecord& record, uint64_t) { file.Write(record); });
    metrics.AddCounter("treadle:ledger_records_dropped_total",
                       "Records that the ledger file lacks: it was full, or did not keep up.",
                       [&file] { return static_cast<double>(file.dropped()); });
  }
  if (recording) {
    sinks.push_back([recording](const LedgerRecord& record, uint64_t) {
      recording->Ledger(Ledger::ToJson(record));
    });
  }
  LedgerFollower follower(stack->ledger(), std::move(sinks));
  std::unique_ptr<RequestStore> store;
  if (doors.requests) {
    TREADLE_ASSIGN_OR_RETURN(store, RequestStore::Open(std::move(doors.requests),
                                                       {.fingerprint = stack->model().fingerprint,
                                                        .keep = options.durable_keep,
                                                        .space = options.durable_space,
                                                        .log = log.sink()}));
  }
  TREADLE_RETURN_IF_ERROR(stack->Start());
  log.Write({.name = "batch_sizes",
             .message = stack->chosen().empty()
                            ? Str("at most ", stack->options().max_batch_size, " sequences and ",
                                  stack->options().max_batch_tokens, " tokens in one iteration")
                            : stack->chosen(),
             .fields = {{"max_batch_size", stack->options().max_batch_size},
                        {"max_batch_tokens", stack->options().max_batch_tokens}}});

  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<InferenceServer> server,
                           InferenceServer::Start(*stack, follower,
                                                  ServiceFrom(options, doors, stack->model(),
                                                              speculate, store.get(), log)));
  server->AddTo(metrics);
  TREADLE_ASSIGN_OR_RETURN(const std::string others, ListenForOthers(options, doors, metrics));
  std::unique_ptr<HttpServer> http;
  std::string where;
  if (options.http_listen != "none") {
    TREADLE_ASSIGN_OR_RETURN(
        http, StartOpenAi(options.http_listen, HttpFrom(options, doors), server->sessions(),
                          *doors.health, RoutesBesideOpenAi(follower, server->sessions())));
    where = Str("http", doors.tls ? "s" : "", "://", ToString(http->address()));
  }
  const std::string address = ToString(server->address());
  const std::string both = http ? where + " (page and OpenAI API), gRPC on " + address
                                : Str(address, " (gRPC", doors.tls ? ", TLS" : "", ")");
  log.Write({.name = "listening",
             .message = Str("listening on ", both, ", ", others),
             .fields = {{"address", address}, {"http", where}}});
  const auto connections = static_cast<int64_t>(server->connections());
  if (connections < options.max_connections) {
    log.Write({.severity = Severity::kWarning,
               .name = "connections_limited",
               .message = Str("at most ", connections,
                              " connections: this process may not open more files (ulimit -n)"),
               .fields = {{"connections", connections}}});
  }
  absl::StatusOr<int> ended =
      ServeUntilSignal(signals, given_up.get_future(), *server, options, log);
  follower.Stop();
  return ended;
}

Settings FromCommandLine(const CLI::App& app) {
  Settings settings;
  for (const ServeFlag& flag : ServeFlags()) {
    const CLI::Option& option = *app.get_option(flag.name);
    if (option.count() > 0)
      settings[flag.name] = {absl::StrJoin(option.results(), ","), "the command line"};
  }
  return settings;
}

}  // namespace

int RunServe(int argc, char** argv) {
  ServeOptions options;
  std::string file;
  bool print = false;
  CLI::App app("Loads a model and serves it over gRPC and OpenAI's HTTP API until SIGTERM.");
  app.footer(
      Str("Each of these, but the last two, is also read from the environment (TREADLE_LISTEN "
          "for --listen) and from --config; a flag outranks the environment, and that the "
          "file.\n\n",
          kExitCodes));
  AddServeFlags(app, options);
  app.option_defaults()->group("Configuration");
  app.add_option("--config", file, "file with lines of: name = value, named like the flags")
      ->envname("TREADLE_CONFIG");
  app.add_flag("--print-config", print, "print the configuration as such a file, and end");
  if (auto code = ParseFlags(app, "serve", argc, argv)) return *code;
  const auto settings = ApplySources(FromCommandLine(app), file, options);
  if (!settings.ok()) return Fail("serve", settings.status());
  if (print) {
    if (const absl::Status status = CheckServeOptions(options); !status.ok()) {
      return Fail("serve", status);
    }
    std::fputs(PrintSettings(*settings, options).c_str(), stdout);
    return 0;
  }
  const auto log = Log::Open(
      {.format = options.log_format, .level = options.log_level, .file = options.log_file});
  if (!log.ok()) return Fail("serve", log.status());
  const absl::StatusOr<int> code = Serve(options, PrintSettings(*settings, options), **log);
  return code.ok() ? *code : Fail("serve", code.status(), **log);
}

}  // namespace treadle
