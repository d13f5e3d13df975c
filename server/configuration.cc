#include "server/configuration.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/model_path.h"
#include "net/address.h"
#include "scheduler/policy.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

absl::StatusOr<int64_t> ParsePageSize(const std::string& text) {
  const std::optional<int64_t> size = NumberIn<int64_t>(text);
  if (!size || *size < 16 || *size > 4096) {
    return InvalidArgument("is '", text, "', expected a whole number from 16 to 4096");
  }
  if (std::has_single_bit(static_cast<uint64_t>(*size))) return *size;
  return InvalidArgument("is '", text, "', expected a power of two from 16 to 4096");
}

absl::StatusOr<std::string> ParsePolicy(const std::string& text) {
  const auto policy = Policy::Create(text);
  if (policy.ok()) return text;
  return InvalidArgument("is '", text, "': ", std::string(policy.status().message()));
}

absl::StatusOr<WeightPlan> ParseWeights(const std::string& text) {
  auto plan = WeightPlan::Parse(text);
  if (!plan.ok()) return InvalidArgument("has ", std::string(plan.status().message()));
  return plan;
}
std::string ShowWeights(const WeightPlan& plan) { return plan.empty() ? "as stored" : plan.text(); }

absl::StatusOr<std::optional<float>> ParseOutlierThreshold(const std::string& text) {
  constexpr float kMaxValue = 1e6f;
  const std::optional<float> value = NumberIn<float>(text);
  if (value && *value >= 0 && *value <= kMaxValue) return value;
  return InvalidArgument("is '", text, "', expected a number from 0 to ", kMaxValue);
}
std::string ShowOutlierThreshold(const std::optional<float>& threshold) {
  return threshold ? Str(*threshold) : "the model's, else 6";
}

absl::StatusOr<std::string> ParseSha256(const std::string& text) {
  const std::string digits = absl::AsciiStrToLower(text);
  if (digits.size() == 64 && digits.find_first_not_of("0123456789abcdef") == digits.npos) {
    return digits;
  }
  return InvalidArgument("is '", text, "', expected 64 hexadecimal digits");
}

// A word, draft:MODEL, or auto.
FlagValue SpeculateValue() {
  constexpr std::string_view kDraft = "draft:";
  return {.read = [kDraft](ServeOptions& options, const std::string& text) -> absl::Status {
            const bool draft = text.starts_with(kDraft) && text.size() > kDraft.size();
            const auto word = ValueOf(kSpeculate, text);
            if (!draft && text != "auto" && (!word || *word == Speculate::kDraft)) {
              return InvalidArgument("is '", text, "', expected auto, off, ngram or draft:MODEL");
            }
            options.speculate = draft ? Speculate::kDraft : word;
            options.draft_model = draft ? text.substr(kDraft.size()) : "";
            return absl::OkStatus();
          },
          .show =
              [kDraft](const ServeOptions& options) {
                if (!options.speculate) return std::string("auto");
                return options.speculate == Speculate::kDraft
                           ? Str(kDraft, options.draft_model)
                           : std::string(WordOf(kSpeculate, *options.speculate));
              },
          .schema = R"({"type": "string", "pattern": "^(auto|off|ngram|draft:[^ ]+)$"})"};
}

// host:port, or unix:path.
absl::Status CheckWorkerAddress(const std::string& text) {
  if (text.starts_with("unix:") && text.size() > 5) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
  if (address.port > 0) return absl::OkStatus();
  return InvalidArgument("address is '", text, "', expected the port of a worker that listens");
}
absl::StatusOr<std::vector<std::string>> ParseWorkers(const std::string& text) {
  const std::vector<std::string> workers = absl::StrSplit(text, ',');
  for (const std::string& worker : workers) {
    TREADLE_RETURN_IF_ERROR(CheckWorkerAddress(worker));
    if (std::ranges::count(workers, worker) > 1) {
      return InvalidArgument("has ", worker, " twice; a worker is one stage");
    }
  }
  return workers;
}

// Words with commas between them, or one flag for each.
using Words = std::vector<std::string>;
FlagValue List(Words ServeOptions::*field, absl::StatusOr<Words> (*parse)(const std::string&),
               std::string schema = kAnyText) {
  const auto show = [](const Words& list) { return ShowText(absl::StrJoin(list, ",")); };
  FlagValue value = Value<Words>(field, parse, show, std::move(schema));
  value.list = true;
  return value;
}

absl::StatusOr<Words> ParseModelNames(const std::string& text) {
  if (text.empty() || text == "none") return Words();
  Words names = absl::StrSplit(text, ',');
  for (const std::string& name : names) {
    const auto printable = [](unsigned char c) { return c > ' ' && c != 0x7f; };
    if (!name.empty() && name.size() <= kMaxModelName && std::ranges::all_of(name, printable)) {
      continue;
    }
    return InvalidArgument("has ", Quoted(name), ", expected names of 1 to ", kMaxModelName,
                           " bytes without spaces, and commas between them");
  }
  return names;
}

absl::StatusOr<Words> ParseLoras(const std::string& text) {
  if (text.empty() || text == "none") return Words();
  Words loras = absl::StrSplit(text, ',');
  for (const std::string& lora : loras) {
    const size_t sign = lora.find('=');
    if (sign != lora.npos && sign > 0 && sign + 1 < lora.size()) continue;
    return InvalidArgument("has ", Quoted(lora), ", expected NAME=PATH, and commas between them");
  }
  return loras;
}

// As browsers send them: no path, no slash at the end, lower case.
absl::StatusOr<std::vector<std::string>> ParseOrigins(const std::string& text) {
  if (text.empty() || text == "none") return std::vector<std::string>();
  std::vector<std::string> origins = absl::StrSplit(absl::AsciiStrToLower(text), ',');
  for (const std::string& origin : origins) {
    const size_t host = origin.find("://");
    const bool whole = host != 0 && host != origin.npos && host + 3 < origin.size() &&
                       origin.find_first_of("/ \t\"'", host + 3) == origin.npos;
    if (origin != "*" && !whole) {
      return InvalidArgument("has '", origin, "', expected https://host, http://host:port, or *");
    }
  }
  return origins;
}

absl::StatusOr<FolderSpace> ParseFolderSpace(const std::string& text) {
  if (text.empty() || text == "none") return FolderSpace();
  const size_t colon = text.rfind(':');
  const auto bytes = ParseSize(colon == text.npos ? "" : text.substr(colon + 1));
  if (colon != text.npos && colon > 0 && bytes.ok() && *bytes > 0) {
    return FolderSpace{.folder = text.substr(0, colon), .bytes = *bytes};
  }
  return InvalidArgument("is '", text, "', expected FOLDER:SIZE such as /var/cache/treadle:20G");
}
std::string ShowFolderSpace(const FolderSpace& space) {
  return ShowText(space.folder.empty() ? "" : Str(space.folder, ":", ShowBytes(space.bytes)));
}

constexpr char kPageSizes[] = R"({"enum": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]})";
constexpr char kThreshold[] = R"({"type": "number", "minimum": 0, "maximum": 1000000})";
constexpr char kOrigins[] = R"({"type": "string", "pattern": "^([*]|[a-z]+://[^ ]+)$"})";
constexpr char kNames[] = R"({"type": "string", "pattern": "^[^ ]+$"})";
constexpr char kLoras[] = R"({"type": "string", "pattern": "^(none|[^ =]+=/[^ ]+)$"})";
constexpr char kFolderSpace[] =
    R"({"type": "string", "pattern": "^/[^ ]*[^ /]:[0-9]+([.][0-9]+)?[KMGT]?$"})";
constexpr char kAbsolutePath[] = R"({"type": "string", "pattern": "^/[^ ]*[^ /]$"})";

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

// A heading in the table: the group of the flags after it.
ServeFlag Group(const char* title) {
  return {.name = "", .help = "", .engine = false, .chart = {}, .value = {}, .group = title};
}

constexpr std::string_view kFirst[] = {
    "--model",       "--listen",    "--http-listen", "--api-keys-file", "--max-batch-size",
    "--max-context", "--kv-memory", "--weights",     "--device",        "--threads"};

// The flags, each with its group.
std::vector<ServeFlag> Grouped(std::vector<ServeFlag> rows) {
  std::vector<ServeFlag> flags;
  const char* group = "";
  for (ServeFlag& row : rows) {
    const bool first = std::ranges::find(kFirst, row.name) != std::end(kFirst);
    if (*row.name == '\0') {
      group = row.group;
    } else {
      row.group = first ? kFirstFlags : group;
      flags.push_back(std::move(row));
    }
  }
  return flags;
}

}  // namespace

const std::vector<ServeFlag>& ServeFlags() {
  using O = ServeOptions;
  using enum InChart;
  constexpr bool kEngine = true;  // else for serving alone
  constexpr bool kServing = false;
  constexpr int64_t kMany = 1'000'000'000;
  static const std::vector<ServeFlag> flags = Grouped({
      Group("Model"),
      {"--model", "model: a .gguf file or a Hugging Face folder", kEngine, kOwn, Text(&O::model)},
      {"--served-model-name",
       "names of the model for clients: NAME,...; all are accepted, answers say the first; "
       "none: that of the file or folder",
       kServing, kServer, List(&O::served_model_names, ParseModelNames, kNames)},
      {"--model-sha256", "SHA-256 that the model's file must have, in hexadecimal digits", kServing,
       kNowhere, Value<std::string>(&O::model_sha256, ParseSha256, ShowText)},
      {"--lora",
       "LoRA adapters and soft prompts that clients may name as the model: NAME=PATH,...; a path "
       "is a PEFT folder or a .gguf file; none: none",
       kServing, kServer, List(&O::loras, ParseLoras, kLoras)},
      {"--lora-dir",
       "folder whose folders and .gguf files are adapters of that name, read when they are first "
       "asked for; none: none",
       kServing, kServer, Text(&O::lora_dir, kAbsolutePath)},
      {"--max-loras",
       "adapters in memory at once; those asked least recently make room for others, and requests "
       "wait where all are in use",
       kServing, kServer, Integer(&O::max_loras, 1, 512)},
      {"--lora-memory", "most bytes of adapters in memory; 0: as many as --max-loras", kServing,
       kServer,
       Size(&O::lora_memory, 0, std::numeric_limits<int64_t>::max(), "a size such as 1G, or 0")},
      Group("Addresses"),
      {"--listen",
       "address of gRPC, host:port; port 0 takes a free one; "
       "gateways find vllm.grpc.engine.VllmEngine there",
       kServing, kOwn, Listen(&O::listen, /*optional=*/false)},
      {"--http-listen",
       "address of the page and of OpenAI's API over HTTP, with the TLS and keys of --listen; "
       "none: no HTTP",
       kServing, kOwn, Listen(&O::http_listen, /*optional=*/true)},
      {"--http-allow-origin",
       "other servers' web pages that may ask over HTTP: https://host,..., or * for all; "
       "none: the server's own page alone",
       kServing, kServer, List(&O::http_allow_origins, ParseOrigins, kOrigins)},
      {"--metrics-listen", "address of http://.../metrics; none: no metrics", kServing, kOwn,
       Listen(&O::metrics_listen, /*optional=*/true)},
      {"--metrics-dialect",
       "names of the metrics: treadle, vllm (its names, labels and buckets, for dashboards and "
       "gateways that were made for it; docs/metrics.md), or both",
       kServing, kServer, OneOf(&O::metrics_dialect, kMetricsDialects)},
      {"--health-listen",
       "address of a plaintext port with grpc.health.v1 alone (started, ready, live); "
       "none: probes ask --listen",
       kServing, kOwn, Listen(&O::health_listen, /*optional=*/true)},
      Group("TLS and keys"),
      {"--tls-cert",
       "certificate chain (PEM) of --listen and --http-listen, read again when it changes; "
       "none: plaintext",
       kServing, kOwn, Text(&O::tls_cert)},
      {"--tls-key", "private key of --tls-cert, PEM without a password", kServing, kOwn,
       Text(&O::tls_key)},
      {"--tls-client-ca", "CA (PEM) whose certificates clients must show (mutual TLS)", kServing,
       kOwn, Text(&O::tls_client_ca)},
      {"--api-keys-file",
       "file of the keys that callers need, read again when it changes; a line is: "
       "key [name [requests/min [tokens/min [operator] [weight=N]]]]",
       kServing, kOwn, Text(&O::api_keys_file)},
      {"--metrics-auth", "key that scrapes need: api-key (one of --api-keys-file) or none",
       kServing, kOwn, OneOf(&O::metrics_auth, kMetricsAuth)},
      {"--metrics-tls-cert",
       "certificate chain (PEM) of --metrics-listen, read again when it changes; none: plaintext",
       kServing, kOwn, Text(&O::metrics_tls_cert)},
      {"--metrics-tls-key", "private key of --metrics-tls-cert, PEM without a password", kServing,
       kOwn, Text(&O::metrics_tls_key)},
      {"--metrics-tls-client-ca", "CA (PEM) whose certificates scrapers must show (mutual TLS)",
       kServing, kOwn, Text(&O::metrics_tls_client_ca)},
      {"--metrics-token-file",
       "file of the tokens that scrapes need, one per line, read again when it changes", kServing,
       kOwn, Text(&O::metrics_token_file)},
      Group("Scheduling"),
      {"--max-batch-size",
       "most sequences in one iteration; auto: by what iterations cost here, measured at start, so "
       "many that twice as many would bring less than 10 % more tokens/s",
       kEngine, kServer, Integer(&O::max_batch_size, 1, 65536, "auto")},
      {"--max-batch-tokens",
       "most tokens in one iteration; longer prompts are split; auto: as many as --target-itl "
       "allows, up to 512",
       kEngine, kServer, Integer(&O::max_batch_tokens, 2, 1 << 20, "auto")},
      {"--target-itl",
       "time between two tokens of a stream beside long prompts, such as 100ms, which decides what "
       "--max-batch-tokens auto is",
       kServing, kServer, Duration(&O::target_itl)},
      {"--max-queue", "most requests that wait; further ones get RESOURCE_EXHAUSTED", kServing,
       kServer, Integer(&O::max_queue, 1, kMany)},
      {"--max-context", "most tokens of one sequence, prompt and answer; 0: what the model allows",
       kEngine, kServer, Integer(&O::max_context, 0, kMany, "the model's")},
      Group("K/V cache"),
      {"--kv-memory", "bytes of the K/V cache in each stage, such as 2G or 512M; or auto", kEngine,
       kServer,
       Size(&O::kv_memory, 1, std::numeric_limits<int64_t>::max(), "a size such as 2G", "auto")},
      {"--prefix-cache",
       "reuse of what prompts have in common with earlier requests, and with their answers; "
       "answers are the same: on or off",
       kServing, kServer, OneOf(&O::prefix_cache, kSwitch)},
      {"--prefix-cache-memory",
       "most bytes of the K/V cache that hold what no request uses; 0: all that is free", kServing,
       kServer,
       Size(&O::prefix_cache_memory, 0, std::numeric_limits<int64_t>::max(),
            "a size such as 1G, or 0")},
      {"--prefix-cache-disk",
       "FOLDER:SIZE, such as /var/cache/treadle:20G: files of what the prefix cache holds, which "
       "outlive the server; for one process on the CPU; none: no files",
       kServing, kServer,
       Value<FolderSpace>(&O::prefix_cache_disk, ParseFolderSpace, ShowFolderSpace, kFolderSpace)},
      {"--kv-events",
       "tell gateways that ask (SubscribeKvEvents) which token ids the prefix cache holds, "
       "so that they send requests where most is cached; with keys an operator's alone: on or off",
       kServing, kServer, OneOf(&O::kv_events, kSwitch)},
      {"--kv-dtype", "type of the K/V cache: f16 or f32; on the CPU also int8, on a GPU bf16",
       kEngine, kServer, OneOf(&O::kv_dtype, kKvTypes)},
      {"--page-size", "tokens in one K/V page: a power of two from 16 to 4096", kEngine, kServer,
       Value<int64_t>(&O::page_size, ParsePageSize, Str<int64_t>, kPageSizes, "N")},
      Group("Weights and arithmetic"),
      {"--weights",
       "format that matrices get while loading: nf4, int8, fp8, q4_0, kbit-int4:64 ...; "
       "parts of the model by name: 'nf4,lm_head=int8,blk.0.=keep'",
       kEngine, kServer, Value<WeightPlan>(&O::weights, ParseWeights, ShowWeights)},
      {"--outlier-threshold",
       "magnitude from which activations of int8 weights multiply as floats; 0: none do; "
       "default: what the checkpoint says, else 6",
       kEngine, kServer,
       Value<std::optional<float>>(&O::outlier_threshold, ParseOutlierThreshold,
                                   ShowOutlierThreshold, kThreshold, "NUMBER")},
      {"--outlier-rule",
       "outliers of int8 weights: per-row, or whole columns per-call "
       "(the paper's rule, with which answers depend on the batch)",
       kEngine, kServer, OneOf(&O::outlier_rule, kOutlierRules)},
      {"--compute",
       "arithmetic of products: auto, exact, int8, int12, int16, mixed (int8 where answers bear "
       "it), or "
       "bf16 (for long prompts on processors with AMX)",
       kEngine, kServer, OneOf(&O::compute, kComputeModes)},
      {"--device",
       "device: cpu, cuda (a GPU for each rank), or auto: GPUs if this machine has any; "
       "with --workers auto is cpu",
       kEngine, kServer, OneOf(&O::device, kDevices)},
      {"--dtype", "type of float weights and of products' inputs on a GPU: bf16, fp16 or fp32",
       kEngine, kServer, OneOf(&O::dtype, kProductTypes)},
      {"--deterministic",
       "answers on a GPU that do not depend on the rest of the batch: on or off; "
       "on a CPU they never depend on it",
       kEngine, kServer, OneOf(&O::deterministic, kSwitch)},
      Group("Scheduling"),
      {"--speculate",
       "guesses of a request's next tokens, several of which one iteration verifies; answers are "
       "the same: ngram (what followed the same tokens earlier in the request), draft:MODEL (what "
       "a smaller model of the same vocabulary says, or ngram where that is surer), off, or auto: "
       "ngram on a CPU, off on GPUs, where it costs more than it brings",
       kServing, kServer, SpeculateValue()},
      {"--policy",
       "scheduling policy: fcfs (first come, first served), priority (by the requests' field), "
       "fair-share (by API key and its weight), or baselines to compare with: request-level, "
       "faster-transformer, faster-transformer-padded",
       kServing, kServer,
       Value<std::string>(&O::policy, ParsePolicy, ShowText, EnumSchema(Policy::Names()),
                          EnumType(Policy::Names()))},
      {"--microbatch-size",
       "sequences, of batches under --policy faster-transformer on several stages; 0: the batch's",
       kServing, kServer, Integer(&O::microbatch_size, 0, kMany)},
      {"--padding",
       "rows that --policy faster-transformer would compute for nobody: count (in the ledger) or "
       "compute (as well, for true times)",
       kServing, kServer, OneOf(&O::padding, kPaddings)},
      {"--max-ttft",
       "longest time to first token: a request that would wait longer, or longer than its "
       "deadline, "
       "by what iterations cost and what is before it, is refused when it comes; 0s: none is",
       kServing, kServer, Duration(&O::max_ttft)},
      Group("Stages and workers"),
      {"--tensor-parallel", "ranks that share each layer, in every stage", kEngine, kOwn,
       Integer(&O::tensor_parallel, 1, 64)},
      {"--pipeline-parallel",
       "stages that share the layers out, each a worker process on this machine; 1: no workers",
       kEngine, kOwn, Integer(&O::pipeline_parallel, 1, 256)},
      {"--workers",
       "addresses of workers that were started by hand (treadle worker), one stage each, "
       "instead of --pipeline-parallel's: host:port,...",
       kEngine, kOwn, List(&O::workers, ParseWorkers)},
      {"--spares",
       "workers beyond the stages, one of which takes the place of a lost worker: "
       "the last ones of --workers, or so many more on this machine",
       kEngine, kNowhere, Integer(&O::spares, 0, 256)},
      {"--wire", "type of activations between stages: f32 (exact), bf16 or int8", kEngine, kOwn,
       OneOf(&O::wire, kWireTypes)},
      {"--data-plane",
       "carrier of activations between stages: gloo (through the hosts), "
       "or nccl (from GPU to GPU; needs stages on GPUs and --wire f32)",
       kEngine, kOwn, OneOf(&O::data_plane, kDataPlanes)},
      {"--plan-forwarding",
       "moment at which a stage passes a plan on: early (before it runs it), "
       "or late (after; a baseline to measure, with the same answers)",
       kEngine, kNowhere, OneOf(&O::plan_forwarding, kPlanForwarding)},
      {"--placement-prompt-tokens",
       "prompt tokens, beside 8 decoding sequences, of the iteration that balances stages: "
       "more for long prompts and short answers, 0 for the opposite",
       kEngine, kServer, Integer(&O::placement_prompt_tokens, 0, 1 << 20)},
      {"--weights-from",
       "source of the workers' weights: file (their own), or master (which sends each its layers)",
       kEngine, kOwn, OneOf(&O::weights_from, kWeightsFrom)},
      {"--on-worker-loss",
       "fate of what runs when a worker is lost: "
       "recover (it goes on with the tokens that it would have had), "
       "restart (it ends), or fail (it ends, and the server exits)",
       kServing, kOwn, OneOf(&O::on_worker_loss, kOnWorkerLoss)},
      {"--replay-log-memory",
       "most bytes, in each stage, of the log of what it sent to the next one, "
       "from which a lost stage computes again (in use as the K/V cache is); "
       "0: no log, so the stages before a lost one run again, too",
       kEngine, kServer,
       Size(&O::replay_log_memory, 0, std::numeric_limits<int64_t>::max(),
            "a size such as 1G, or 0")},
      {"--control-tls",
       "folder with tls.crt, tls.key and ca.crt, for mutual TLS with --workers; "
       "activations between workers are not encrypted",
       kEngine, kOwn, Text(&O::control_tls)},
      {"--control-secret-file",
       "file of the secret, 16 characters or more, that server and --workers prove to have",
       kEngine, kOwn, Text(&O::control_secret_file)},
      Group("Threads"),
      {"--threads", "compute threads of all ranks and local workers; 0: one per CPU", kEngine,
       kServer, Integer(&O::threads, 0, 4096, "one per CPU")},
      {"--pin-threads", "bind each compute thread to one CPU: on or off", kEngine, kServer,
       OneOf(&O::pin_threads, kSwitch)},
      {"--engine-depth", "iterations in flight at once: 1 or 2", kEngine, kServer,
       Integer(&O::engine_depth, 1, 2)},
      Group("Requests"),
      {"--default-max-new-tokens",
       "most new tokens of requests that do not say; clipped to the context", kServing, kServer,
       Integer(&O::default_max_new_tokens, 1, kMany)},
      {"--generation-config",
       "sampling parameters that requests leave out: auto (what the model's authors recommend, in "
       "generation_config.json or the .gguf file's general.sampling), or none",
       kEngine, kServer, OneOf(&O::generation_config, kGenerationConfigs)},
      {"--embedding-pooling",
       "embedding of a prompt: the mean of its final hidden states, or the last one; "
       "none: embeddings are refused (few models that generate text have useful ones)",
       kServing, kServer, OneOf(&O::embedding_pooling, kPoolings)},
      Group("Time limits"),
      {"--drain-timeout", "time that accepted requests have after SIGTERM", kServing, kOwn,
       Duration(&O::drain_timeout)},
      {"--stream-stall-timeout", "time after which a client that reads nothing is cancelled",
       kServing, kServer, Duration(&O::stream_stall_timeout)},
      {"--iteration-deadline",
       "time after which an iteration is given up; on workers sooner: "
       "after five times what iterations took lately, and at least 2s",
       kEngine, kServer, Duration(&O::iteration_deadline)},
      Group("Limits of clients"),
      {"--max-request-bytes", "most bytes of one request", kServing, kServer,
       Size(&O::max_request_bytes, 1024, std::numeric_limits<int32_t>::max(),
            "a size from 1K to 2047M")},
      {"--max-receive-memory",
       "most bytes of requests that have not come whole, for gRPC and HTTP each", kServing, kServer,
       Size(&O::max_receive_memory, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G")},
      {"--max-unread-bytes", "most bytes of whole requests that wait to be tokenized", kServing,
       kServer, Size(&O::max_unread_bytes, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G")},
      {"--max-unread-requests", "most requests that wait to be tokenized", kServing, kServer,
       Integer(&O::max_unread_requests, 1, kMany)},
      {"--max-connections",
       "most clients connected at once, for gRPC and HTTP each; "
       "fewer where the process may not open that many files",
       kServing, kServer, Integer(&O::max_connections, 4, kMany)},
      {"--max-connections-per-address", "most connections from one address", kServing, kServer,
       Integer(&O::max_connections_per_address, 1, kMany)},
      {"--max-calls-per-connection", "most calls open at once on one connection", kServing, kServer,
       Integer(&O::max_calls_per_connection, 1, kMany)},
      {"--max-header-bytes", "most bytes of the headers of one call", kServing, kServer,
       Size(&O::max_header_bytes, 8192, std::numeric_limits<int32_t>::max(),
            "a size from 8K to 2047M")},
      Group("Log"),
      {"--log-format", "lines of the log: text, or json with time, severity, event and fields",
       kServing, kOwn, OneOf(&O::log_format, kLogFormats)},
      {"--log-level", "least severity that is logged: info, warning or error", kServing, kOwn,
       OneOf(&O::log_level, kSeverities)},
      {"--log-file",
       "file that the log is appended to, opened again when it was renamed; none: stderr", kServing,
       kNowhere, Text(&O::log_file)},
      {"--log-requests", "log every request at its end, without its texts: on or off", kServing,
       kOwn, OneOf(&O::log_requests, kSwitch)},
      Group("Stored requests"),
      {"--durable",
       "folder where requests and answers are stored before they are told, one for each server; "
       "clients resume them, after a crash, too; none: nothing is stored",
       kServing, kServer, Text(&O::durable, kAbsolutePath)},
      {"--durable-keep",
       "time for which a request can be resumed after its client had the last of it", kServing,
       kServer, Duration(&O::durable_keep)},
      {"--durable-space", "most bytes of stored requests and answers; the oldest go first",
       kServing, kServer, Size(&O::durable_space, 1 << 20, int64_t{1} << 50, "a size from 1M")},
      Group("Records of iterations"),
      {"--ledger-file", "file for the iteration ledger: one JSON line per iteration", kServing,
       kServer, Text(&O::ledger_file, kAbsolutePath)},
      {"--record",
       "file for what `treadle replay` runs again: requests, plans, results and token ids "
       "(which are text to whoever has the tokenizer)",
       kServing, kServer, Text(&O::record, kAbsolutePath)},
      {"--record-size",
       "most bytes of --record, together with the file of its older part, "
       "whose name ends in .1",
       kServing, kServer,
       Size(&O::record_size, 1 << 20, int64_t{1} << 40, "a size from 1M to 1024G")},
  });
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
