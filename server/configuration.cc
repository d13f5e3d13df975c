#include "server/configuration.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

constexpr Choice<PlanForwarding> kPlanForwarding[] = {{"early", PlanForwarding::kEarly},
                                                      {"late", PlanForwarding::kLate}};
constexpr Choice<WeightsFrom> kWeightsFrom[] = {{"file", WeightsFrom::kFile},
                                                {"master", WeightsFrom::kMaster}};
constexpr Choice<Padding> kPaddings[] = {{"count", Padding::kCount},
                                         {"compute", Padding::kCompute}};
constexpr Choice<OnWorkerLoss> kOnWorkerLoss[] = {{"fail", OnWorkerLoss::kFail},
                                                  {"restart", OnWorkerLoss::kRestart},
                                                  {"recover", OnWorkerLoss::kRecover}};
constexpr Choice<GenerationConfig> kGenerationConfigs[] = {{"auto", GenerationConfig::kAuto},
                                                           {"none", GenerationConfig::kNone}};
constexpr Choice<MetricsAuth> kMetricsAuth[] = {{"none", MetricsAuth::kNone},
                                                {"api-key", MetricsAuth::kApiKey}};

using O = ServeOptions;
using Flags = std::vector<ServeFlag>;
using enum InChart;
constexpr bool kEngine = true;  // else for serving alone
constexpr bool kServing = false;
constexpr int64_t kMany = 1'000'000'000;
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// A heading in the table: the group of the flags after it.
ServeFlag Group(const char* title) {
  return {.name = "", .engine = false, .chart = {}, .value = {}, .help = "", .group = title};
}

constexpr std::string_view kFirst[] = {
    "--model",       "--listen",    "--http-listen", "--api-keys-file", "--max-batch-size",
    "--max-context", "--kv-memory", "--weights",     "--device",        "--threads"};

Flags ModelFlags() {
  return {
      Group("Model"),
      {"--model", kEngine, kOwn, Text(&O::model), "model: a .gguf file or a Hugging Face folder"},
      {"--served-model-name", kServing, kServer, ModelNames(&O::served_model_names),
       "names of the model for clients: NAME,...; all are accepted, answers say the first; "
       "none: that of the file or folder"},
      {"--model-sha256", kServing, kNowhere, Sha256Digits(&O::model_sha256),
       "SHA-256 that the model's file must have, in hexadecimal digits"},
      {"--lora", kServing, kServer, Loras(&O::loras),
       "LoRA adapters and soft prompts that clients may name as the model: NAME=PATH,...; a path "
       "is a PEFT folder or a .gguf file; none: none"},
      {"--lora-dir", kServing, kServer, Text(&O::lora_dir, kAbsolutePath),
       "folder whose folders and .gguf files are adapters of that name, read when they are first "
       "asked for; none: none"},
      {"--max-loras", kServing, kServer, Integer(&O::max_loras, 1, 512),
       "adapters in memory at once; those asked least recently make room for others, and requests "
       "wait where all are in use"},
      {"--lora-memory", kServing, kServer,
       Size(&O::lora_memory, 0, kAny, "a size such as 1G, or 0"),
       "most bytes of adapters in memory; 0: as many as --max-loras"},
  };
}

Flags DoorFlags() {
  return {
      Group("Addresses"),
      {"--listen", kServing, kOwn, Listen(&O::listen, /*optional=*/false),
       "address of gRPC, host:port; port 0 takes a free one; "
       "gateways find vllm.grpc.engine.VllmEngine there"},
      {"--http-listen", kServing, kOwn, Listen(&O::http_listen, /*optional=*/true),
       "address of the page and of OpenAI's API over HTTP, with the TLS and keys of --listen; "
       "none: no HTTP"},
      {"--http-allow-origin", kServing, kServer, Origins(&O::http_allow_origins),
       "other servers' web pages that may ask over HTTP: https://host,..., or * for all; "
       "none: the server's own page alone"},
      {"--metrics-listen", kServing, kOwn, Listen(&O::metrics_listen, /*optional=*/true),
       "address of http://.../metrics; none: no metrics"},
      {"--metrics-dialect", kServing, kServer, OneOf(&O::metrics_dialect, kMetricsDialects),
       "names of the metrics: treadle, vllm (its names, labels and buckets, for dashboards and "
       "gateways that were made for it; docs/metrics.md), or both"},
      {"--health-listen", kServing, kOwn, Listen(&O::health_listen, /*optional=*/true),
       "address of a plaintext port with grpc.health.v1 alone (started, ready, live); "
       "none: probes ask --listen"},
      Group("TLS and keys"),
      {"--tls-cert", kServing, kOwn, Text(&O::tls_cert),
       "certificate chain (PEM) of --listen and --http-listen, read again when it changes; "
       "none: plaintext"},
      {"--tls-key", kServing, kOwn, Text(&O::tls_key),
       "private key of --tls-cert, PEM without a password"},
      {"--tls-client-ca", kServing, kOwn, Text(&O::tls_client_ca),
       "CA (PEM) whose certificates clients must show (mutual TLS)"},
      {"--api-keys-file", kServing, kOwn, Text(&O::api_keys_file),
       "file of the keys that callers need, read again when it changes; a line is: "
       "key [name [requests/min [tokens/min [operator] [weight=N]]]]"},
      {"--metrics-auth", kServing, kOwn, OneOf(&O::metrics_auth, kMetricsAuth),
       "key that scrapes need: api-key (one of --api-keys-file) or none"},
      {"--metrics-tls-cert", kServing, kOwn, Text(&O::metrics_tls_cert),
       "certificate chain (PEM) of --metrics-listen, read again when it changes; none: plaintext"},
      {"--metrics-tls-key", kServing, kOwn, Text(&O::metrics_tls_key),
       "private key of --metrics-tls-cert, PEM without a password"},
      {"--metrics-tls-client-ca", kServing, kOwn, Text(&O::metrics_tls_client_ca),
       "CA (PEM) whose certificates scrapers must show (mutual TLS)"},
      {"--metrics-token-file", kServing, kOwn, Text(&O::metrics_token_file),
       "file of the tokens that scrapes need, one per line, read again when it changes"},
  };
}

Flags BatchAndCacheFlags() {
  return {
      Group("Scheduling"),
      {"--max-batch-size", kEngine, kServer, Integer(&O::max_batch_size, 1, 65536, "auto"),
       "most sequences in one iteration; auto: by what iterations cost here, measured at start, so "
       "many that twice as many would bring less than 10 % more tokens/s"},
      {"--max-batch-tokens", kEngine, kServer, Integer(&O::max_batch_tokens, 2, 1 << 20, "auto"),
       "most tokens in one iteration; longer prompts are split; auto: as many as --target-itl "
       "allows, up to 512"},
      {"--target-itl", kServing, kServer, Duration(&O::target_itl),
       "time between two tokens of a stream beside long prompts, such as 100ms, which decides what "
       "--max-batch-tokens auto is"},
      {"--max-queue", kServing, kServer, Integer(&O::max_queue, 1, kMany),
       "most requests that wait; further ones get RESOURCE_EXHAUSTED"},
      {"--max-context", kEngine, kServer, Integer(&O::max_context, 0, kMany, "the model's"),
       "most tokens of one sequence, prompt and answer; 0: what the model allows"},
      Group("K/V cache"),
      {"--kv-memory", kEngine, kServer, Size(&O::kv_memory, 1, kAny, "a size such as 2G", "auto"),
       "bytes of the K/V cache in each stage, such as 2G or 512M; or auto"},
      {"--prefix-cache", kServing, kServer, OneOf(&O::prefix_cache, kSwitch),
       "reuse of what prompts have in common with earlier requests, and with their answers; "
       "answers are the same: on or off"},
      {"--prefix-cache-memory", kServing, kServer,
       Size(&O::prefix_cache_memory, 0, kAny, "a size such as 1G, or 0"),
       "most bytes of the K/V cache that hold what no request uses; 0: all that is free"},
      {"--prefix-cache-disk", kServing, kServer, FolderAndSize(&O::prefix_cache_disk),
       "FOLDER:SIZE, such as /var/cache/treadle:20G: files of what the prefix cache holds, which "
       "outlive the server; for one process on the CPU; none: no files"},
      {"--kv-events", kServing, kServer, OneOf(&O::kv_events, kSwitch),
       "tell gateways that ask (SubscribeKvEvents) which token ids the prefix cache holds, "
       "so that they send requests where most is cached; with keys an operator's alone: on or off"},
      {"--kv-dtype", kEngine, kServer, OneOf(&O::kv_dtype, kKvTypes),
       "type of the K/V cache: f16 or f32; on the CPU also int8, on a GPU bf16"},
      {"--page-size", kEngine, kServer, PageSize(&O::page_size),
       "tokens in one K/V page: a power of two from 16 to 4096"},
  };
}

Flags ArithmeticAndPolicyFlags() {
  return {
      Group("Weights and arithmetic"),
      {"--weights", kEngine, kServer, Weights(&O::weights),
       "format that matrices get while loading: nf4, int8, fp8, q4_0, kbit-int4:64 ...; "
       "parts of the model by name: 'nf4,lm_head=int8,blk.0.=keep'"},
      {"--outlier-threshold", kEngine, kServer, OutlierThreshold(&O::outlier_threshold),
       "magnitude from which activations of int8 weights multiply as floats; 0: none do; "
       "default: what the checkpoint says, else 6"},
      {"--outlier-rule", kEngine, kServer, OneOf(&O::outlier_rule, kOutlierRules),
       "outliers of int8 weights: per-row, or whole columns per-call "
       "(the paper's rule, with which answers depend on the batch)"},
      {"--compute", kEngine, kServer, OneOf(&O::compute, kComputeModes),
       "arithmetic of products: auto, exact, int8, int12, int16, mixed (int8 where answers bear "
       "it), or bf16 (for long prompts on processors with AMX)"},
      {"--device", kEngine, kServer, OneOf(&O::device, kDevices),
       "device: cpu, cuda (a GPU for each rank), or auto: GPUs if this machine has any; "
       "with --workers auto is cpu"},
      {"--dtype", kEngine, kServer, OneOf(&O::dtype, kProductTypes),
       "type of float weights and of products' inputs on a GPU: bf16, fp16 or fp32"},
      {"--deterministic", kEngine, kServer, OneOf(&O::deterministic, kSwitch),
       "answers on a GPU that do not depend on the rest of the batch: on or off; "
       "on a CPU they never depend on it"},
      Group("Scheduling"),
      {"--speculate", kServing, kServer, SpeculateValue(),
       "guesses of a request's next tokens, several of which one iteration verifies; answers are "
       "the same: ngram (what followed the same tokens earlier in the request), draft:MODEL (what "
       "a smaller model of the same vocabulary says, or ngram where that is surer), off, or auto: "
       "ngram on a CPU, off on GPUs, where it costs more than it brings"},
      {"--policy", kServing, kServer, PolicyName(&O::policy),
       "scheduling policy: fcfs (first come, first served), priority (by the requests' field), "
       "fair-share (by API key and its weight), or baselines to compare with: request-level, "
       "faster-transformer, faster-transformer-padded"},
      {"--microbatch-size", kServing, kServer, Integer(&O::microbatch_size, 0, kMany),
       "sequences, of batches under --policy faster-transformer on several stages; 0: the batch's"},
      {"--padding", kServing, kServer, OneOf(&O::padding, kPaddings),
       "rows that --policy faster-transformer would compute for nobody: count (in the ledger) or "
       "compute (as well, for true times)"},
      {"--max-ttft", kServing, kServer, Duration(&O::max_ttft),
       "longest time to first token: a request that would wait longer, or longer than its "
       "deadline, by what iterations cost and what is before it, is refused when it comes; 0s: "
       "none is"},
  };
}

Flags StageFlags() {
  return {
      Group("Stages and workers"),
      {"--tensor-parallel", kEngine, kOwn, Integer(&O::tensor_parallel, 1, 64),
       "ranks that share each layer, in every stage"},
      {"--pipeline-parallel", kEngine, kOwn, Integer(&O::pipeline_parallel, 1, 256),
       "stages that share the layers out, each a worker process on this machine; 1: no workers"},
      {"--workers", kEngine, kOwn, WorkerAddresses(&O::workers),
       "addresses of workers that were started by hand (treadle worker), one stage each, "
       "instead of --pipeline-parallel's: host:port,..."},
      {"--spares", kEngine, kNowhere, Integer(&O::spares, 0, 256),
       "workers beyond the stages, one of which takes the place of a lost worker: "
       "the last ones of --workers, or so many more on this machine"},
      {"--wire", kEngine, kOwn, OneOf(&O::wire, kWireTypes),
       "type of activations between stages: f32 (exact), bf16 or int8"},
      {"--data-plane", kEngine, kOwn, OneOf(&O::data_plane, kDataPlanes),
       "carrier of activations between stages: gloo (through the hosts), "
       "or nccl (from GPU to GPU; needs stages on GPUs and --wire f32)"},
      {"--plan-forwarding", kEngine, kNowhere, OneOf(&O::plan_forwarding, kPlanForwarding),
       "moment at which a stage passes a plan on: early (before it runs it), "
       "or late (after; a baseline to measure, with the same answers)"},
      {"--placement-prompt-tokens", kEngine, kServer,
       Integer(&O::placement_prompt_tokens, 0, 1 << 20),
       "prompt tokens, beside 8 decoding sequences, of the iteration that balances stages: "
       "more for long prompts and short answers, 0 for the opposite"},
      {"--weights-from", kEngine, kOwn, OneOf(&O::weights_from, kWeightsFrom),
       "source of the workers' weights: file (their own), or master (which sends each its layers)"},
      {"--on-worker-loss", kServing, kOwn, OneOf(&O::on_worker_loss, kOnWorkerLoss),
       "fate of what runs when a worker is lost: "
       "recover (it goes on with the tokens that it would have had), "
       "restart (it ends), or fail (it ends, and the server exits)"},
      {"--replay-log-memory", kEngine, kServer,
       Size(&O::replay_log_memory, 0, kAny, "a size such as 1G, or 0"),
       "most bytes, in each stage, of the log of what it sent to the next one, "
       "from which a lost stage computes again (in use as the K/V cache is); "
       "0: no log, so the stages before a lost one run again, too"},
      {"--control-tls", kEngine, kOwn, Text(&O::control_tls),
       "folder with tls.crt, tls.key and ca.crt, for mutual TLS with --workers; "
       "activations between workers are not encrypted"},
      {"--control-secret-file", kEngine, kOwn, Text(&O::control_secret_file),
       "file of the secret, 16 characters or more, that server and --workers prove to have"},
      Group("Threads"),
      {"--threads", kEngine, kServer, Integer(&O::threads, 0, 4096, "one per CPU"),
       "compute threads of all ranks and local workers; 0: one per CPU"},
      {"--pin-threads", kEngine, kServer, OneOf(&O::pin_threads, kSwitch),
       "bind each compute thread to one CPU: on or off"},
      {"--engine-depth", kEngine, kServer, Integer(&O::engine_depth, 1, 2),
       "iterations in flight at once: 1 or 2"},
  };
}

Flags RequestFlags() {
  return {
      Group("Requests"),
      {"--default-max-new-tokens", kServing, kServer, Integer(&O::default_max_new_tokens, 1, kMany),
       "most new tokens of requests that do not say; clipped to the context"},
      {"--generation-config", kEngine, kServer, OneOf(&O::generation_config, kGenerationConfigs),
       "sampling parameters that requests leave out: auto (what the model's authors recommend, in "
       "generation_config.json or the .gguf file's general.sampling), or none"},
      {"--embedding-pooling", kServing, kServer, OneOf(&O::embedding_pooling, kPoolings),
       "embedding of a prompt: the mean of its final hidden states, or the last one; "
       "none: embeddings are refused (few models that generate text have useful ones)"},
      Group("Time limits"),
      {"--drain-timeout", kServing, kOwn, Duration(&O::drain_timeout),
       "time that accepted requests have after SIGTERM"},
      {"--stream-stall-timeout", kServing, kServer, Duration(&O::stream_stall_timeout),
       "time after which a client that reads nothing is cancelled"},
      {"--iteration-deadline", kEngine, kServer, Duration(&O::iteration_deadline),
       "time after which an iteration is given up; on workers sooner: "
       "after five times what iterations took lately, and at least 2s"},
      Group("Limits of clients"),
      {"--max-request-bytes", kServing, kServer,
       Size(&O::max_request_bytes, 1024, std::numeric_limits<int32_t>::max(),
            "a size from 1K to 2047M"),
       "most bytes of one request"},
      {"--max-receive-memory", kServing, kServer,
       Size(&O::max_receive_memory, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G"),
       "most bytes of requests that have not come whole, for gRPC and HTTP each"},
      {"--max-unread-bytes", kServing, kServer,
       Size(&O::max_unread_bytes, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G"),
       "most bytes of whole requests that wait to be tokenized"},
      {"--max-unread-requests", kServing, kServer, Integer(&O::max_unread_requests, 1, kMany),
       "most requests that wait to be tokenized"},
      {"--max-connections", kServing, kServer, Integer(&O::max_connections, 4, kMany),
       "most clients connected at once, for gRPC and HTTP each; "
       "fewer where the process may not open that many files"},
      {"--max-connections-per-address", kServing, kServer,
       Integer(&O::max_connections_per_address, 1, kMany), "most connections from one address"},
      {"--max-calls-per-connection", kServing, kServer,
       Integer(&O::max_calls_per_connection, 1, kMany),
       "most calls open at once on one connection"},
      {"--max-header-bytes", kServing, kServer,
       Size(&O::max_header_bytes, 8192, std::numeric_limits<int32_t>::max(),
            "a size from 8K to 2047M"),
       "most bytes of the headers of one call"},
  };
}

Flags RecordFlags() {
  return {
      Group("Log"),
      {"--log-format", kServing, kOwn, OneOf(&O::log_format, kLogFormats),
       "lines of the log: text, or json with time, severity, event and fields"},
      {"--log-level", kServing, kOwn, OneOf(&O::log_level, kSeverities),
       "least severity that is logged: info, warning or error"},
      {"--log-file", kServing, kNowhere, Text(&O::log_file),
       "file that the log is appended to, opened again when it was renamed; none: stderr"},
      {"--log-requests", kServing, kOwn, OneOf(&O::log_requests, kSwitch),
       "log every request at its end, without its texts: on or off"},
      Group("Stored requests"),
      {"--durable", kServing, kServer, Text(&O::durable, kAbsolutePath),
       "folder where requests and answers are stored before they are told, one for each server; "
       "clients resume them, after a crash, too; none: nothing is stored"},
      {"--durable-keep", kServing, kServer, Duration(&O::durable_keep),
       "time for which a request can be resumed after its client had the last of it"},
      {"--durable-space", kServing, kServer,
       Size(&O::durable_space, 1 << 20, int64_t{1} << 50, "a size from 1M"),
       "most bytes of stored requests and answers; the oldest go first"},
      Group("Records of iterations"),
      {"--ledger-file", kServing, kServer, Text(&O::ledger_file, kAbsolutePath),
       "file for the iteration ledger: one JSON line per iteration"},
      {"--record", kServing, kServer, Text(&O::record, kAbsolutePath),
       "file for what `treadle replay` runs again: requests, plans, results and token ids "
       "(which are text to whoever has the tokenizer)"},
      {"--record-size", kServing, kServer,
       Size(&O::record_size, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G"),
       "most bytes of --record, together with the file of its older part, "
       "whose name ends in .1"},
  };
}

// The flags, each with its group.
Flags Grouped(const std::vector<Flags>& parts) {
  Flags flags;
  const char* group = "";
  for (const Flags& part : parts) {
    for (ServeFlag row : part) {
      const bool first = std::ranges::find(kFirst, row.name) != std::end(kFirst);
      if (*row.name == '\0') {
        group = row.group;
      } else {
        row.group = first ? kFirstFlags : group;
        flags.push_back(std::move(row));
      }
    }
  }
  return flags;
}

}  // namespace

const std::vector<ServeFlag>& ServeFlags() {
  static const Flags flags =
      Grouped({ModelFlags(), DoorFlags(), BatchAndCacheFlags(), ArithmeticAndPolicyFlags(),
               StageFlags(), RequestFlags(), RecordFlags()});
  return flags;
}

void AddServeFlags(CLI::App& command, ServeOptions& options, bool engine_only) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (engine_only && !flag.engine) continue;
    CLI::Option* option = command.add_option_function<std::string>(
        // The model may also stand alone.
        flag.name == std::string_view("--model") ? "--model,model" : flag.name,
        [&flag, &options](const std::string& text) {
          // Several values of a list come as lines.
          const absl::Status status = flag.value.read(
              options, flag.value.list ? absl::StrReplaceAll(text, {{"\n", ","}}) : text);
          if (!status.ok()) {
            throw CLI::ValidationError(flag.name, std::string(status.message()));
          }
        },
        flag.help);
    option->default_str(flag.value.show(options));
    option->type_name(flag.value.type);
    option->group(!engine_only                ? flag.group
                  : flag.group == kFirstFlags ? "Engine"
                                              : Str("Engine: ", flag.group));
    if (flag.value.list) option->join();
  }
}

LogEvent Describe(const ServeOptions& options, bool all) {
  static const ServeOptions kDefaults;
  LogEvent event{.name = "configuration",
                 .message = "the effective configuration",
                 .text = LogEvent::Text::kFieldLines};
  for (const ServeFlag& flag : ServeFlags()) {
    std::string shown = flag.value.show(options);
    if (all || shown != flag.value.show(kDefaults)) {
      event.fields.push_back({flag.name + 2, std::move(shown)});
    }
  }
  return event;
}

}  // namespace treadle
