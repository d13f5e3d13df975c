#include "server/configuration.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>

#include "base/status.h"
#include "scheduler/policy.h"
#include "server/address.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

absl::Status ReadListen(ServeOptions& options, const std::string& text) {
  options.listen = text;
  return ParseAddress(text).status();
}
ReadFlag ReadOptionalListen(std::string ServeOptions::*field) {
  return [=](ServeOptions& options, const std::string& text) {
    options.*field = text.empty() ? "none" : text;
    return options.*field == "none" ? absl::OkStatus() : ParseAddress(text).status();
  };
}
constexpr int64_t kMostBatchTokens = 1 << 20;

absl::Status ReadKvMemory(ServeOptions& options, const std::string& text) {
  options.kv_memory = 0;
  if (text == "auto") return absl::OkStatus();
  auto parsed = ParseSize(text);
  if (!parsed.ok() || *parsed == 0) {
    return InvalidArgument("is '", text, "', expected auto or a size such as 2G");
  }
  options.kv_memory = *parsed;
  return absl::OkStatus();
}
absl::Status ReadBatchTokens(ServeOptions& options, const std::string& text) {
  options.max_batch_tokens = 0;
  if (text == "auto") return absl::OkStatus();
  if (ReadInteger(&ServeOptions::max_batch_tokens, 2, kMostBatchTokens)(options, text).ok()) {
    return absl::OkStatus();
  }
  return InvalidArgument("is '", text, "', expected auto or a whole number from 2 to ",
                         kMostBatchTokens);
}
absl::Status ReadRequestBytes(ServeOptions& options, const std::string& text) {
  auto parsed = ParseSize(text);
  if (!parsed.ok() || *parsed < 1024 || *parsed > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("is '", text, "', expected a size from 1K to 2047M");
  }
  options.max_request_bytes = *parsed;
  return absl::OkStatus();
}
absl::Status ReadPageSize(ServeOptions& options, const std::string& text) {
  TREADLE_RETURN_IF_ERROR(ReadInteger(&ServeOptions::page_size, 16, 4096)(options, text));
  if ((options.page_size & (options.page_size - 1)) == 0) return absl::OkStatus();
  return InvalidArgument("is '", text, "', expected a power of two from 16 to 4096");
}
absl::Status ReadPolicy(ServeOptions& options, const std::string& text) {
  options.policy = text;
  const auto policy = Policy::Create(text);
  if (policy.ok()) return absl::OkStatus();
  return InvalidArgument("is '", text, "': ", std::string(policy.status().message()));
}
absl::Status ReadWeights(ServeOptions& options, const std::string& text) {
  auto plan = WeightPlan::Parse(text);
  if (!plan.ok()) return InvalidArgument("has ", std::string(plan.status().message()));
  options.weights = *std::move(plan);
  return absl::OkStatus();
}
absl::Status ReadOutlierThreshold(ServeOptions& options, const std::string& text) {
  constexpr float kLargest = 1e6f;
  float value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= 0 && value <= kLargest)) {
    return InvalidArgument("is '", text, "', expected a number from 0 to ", kLargest);
  }
  options.outlier_threshold = value;
  return absl::OkStatus();
}
absl::Status ReadSha256(ServeOptions& options, const std::string& text) {
  std::string digits = text;
  for (char& c : digits) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (digits.size() != 64 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return InvalidArgument("is '", text, "', expected 64 hexadecimal digits");
  }
  options.model_sha256 = digits;
  return absl::OkStatus();
}
// host:port, or unix:path.
absl::Status CheckWorkerAddress(const std::string& text) {
  if (text.starts_with("unix:") && text.size() > 5) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
  if (address.port > 0) return absl::OkStatus();
  return InvalidArgument("address is '", text, "', expected the port of a worker that listens");
}
absl::Status ReadWorkers(ServeOptions& options, const std::string& text) {
  options.workers.clear();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string worker = text.substr(begin, end - begin);
    TREADLE_RETURN_IF_ERROR(CheckWorkerAddress(worker));
    const auto& known = options.workers;
    if (std::find(known.begin(), known.end(), worker) != known.end()) {
      return InvalidArgument("has ", worker, " twice; a worker is one stage");
    }
    options.workers.push_back(worker);
    begin = end + 1;
  }
  return absl::OkStatus();
}
std::string ShowWorkers(const ServeOptions& options) {
  std::string text;
  for (const std::string& worker : options.workers) text += (text.empty() ? "" : ",") + worker;
  return text.empty() ? "none" : text;
}

}  // namespace

const std::vector<ServeFlag>& ServeFlags() {
  using O = ServeOptions;
  constexpr int64_t kMany = 1'000'000'000;
  static const std::vector<ServeFlag> flags = {
      {"--model", "model: a .gguf file or a Hugging Face folder", true, ReadText(&O::model),
       ShowText(&O::model)},
      {"--model-sha256", "what the model file's SHA-256 must be, in hexadecimal digits", false,
       ReadSha256, ShowText(&O::model_sha256)},
      {"--listen", "gRPC address, host:port; port 0 takes a free one", false, ReadListen,
       ShowText(&O::listen)},
      {"--metrics-listen", "address of http://.../metrics; none: no such server", false,
       ReadOptionalListen(&O::metrics_listen), ShowText(&O::metrics_listen)},
      {"--health-listen",
       "address of a plaintext port with grpc.health.v1 alone (started, ready, live); none: only "
       "on "
       "--listen",
       false, ReadOptionalListen(&O::health_listen), ShowText(&O::health_listen)},
      {"--tls-cert", "PEM chain of --listen, read anew when it changes; none: plaintext", false,
       ReadText(&O::tls_cert), ShowText(&O::tls_cert)},
      {"--tls-key", "its private key, PEM without a password", false, ReadText(&O::tls_key),
       ShowText(&O::tls_key)},
      {"--tls-client-ca", "clients must show a certificate from this PEM file (mutual TLS)", false,
       ReadText(&O::tls_client_ca), ShowText(&O::tls_client_ca)},
      {"--api-keys-file",
       "callers need a bearer token from here, read anew when it changes; lines of: key [name "
       "[requests/min [tokens/min]]]",
       false, ReadText(&O::api_keys_file), ShowText(&O::api_keys_file)},
      {"--metrics-auth", "whether scrapes need a key of --api-keys-file: api-key or none", false,
       ReadChoice(&O::metrics_auth, {"none", "api-key"}), ShowText(&O::metrics_auth)},
      {"--metrics-tls-cert",
       "PEM chain of --metrics-listen, read anew when it changes; none: plaintext", false,
       ReadText(&O::metrics_tls_cert), ShowText(&O::metrics_tls_cert)},
      {"--metrics-tls-key", "its private key, PEM without a password", false,
       ReadText(&O::metrics_tls_key), ShowText(&O::metrics_tls_key)},
      {"--metrics-tls-client-ca",
       "scrapers must show a certificate from this PEM file (mutual TLS)", false,
       ReadText(&O::metrics_tls_client_ca), ShowText(&O::metrics_tls_client_ca)},
      {"--metrics-token-file",
       "scrapes need a bearer token from here, one per line, read anew when it changes", false,
       ReadText(&O::metrics_token_file), ShowText(&O::metrics_token_file)},
      {"--max-batch-size", "sequences in one iteration, at most", true,
       ReadInteger(&O::max_batch_size, 1, 65536), ShowInteger(&O::max_batch_size)},
      {"--max-batch-tokens",
       "tokens in one iteration, at most; longer prompts are split; auto: twice --max-batch-size, "
       "at "
       "least 64, on GPUs 512",
       true, ReadBatchTokens, ShowInteger(&O::max_batch_tokens, "auto")},
      {"--max-queue", "waiting requests, at most; more get RESOURCE_EXHAUSTED", false,
       ReadInteger(&O::max_queue, 1, kMany), ShowInteger(&O::max_queue)},
      {"--max-context", "prompt and generated tokens of one sequence; 0: what the model allows",
       true, ReadInteger(&O::max_context, 0, kMany), ShowInteger(&O::max_context, "the model's")},
      {"--kv-memory", "bytes for the K/V cache (2G, 512M), in each stage, or auto", true,
       ReadKvMemory, [](const O& o) { return o.kv_memory == 0 ? "auto" : ShowBytes(o.kv_memory); }},
      {"--kv-dtype", "type of the K/V cache: f16 or f32; on a GPU also bf16", true,
       ReadChoice(&O::kv_dtype, {"f16", "bf16", "f32"}), ShowText(&O::kv_dtype)},
      {"--page-size", "tokens in one K/V page: a power of two from 16", true, ReadPageSize,
       ShowInteger(&O::page_size)},
      {"--weights",
       "convert matrices while loading: nf4, int8, fp8, q4_0, kbit-int4:64 ...; parts of the model "
       "by name: 'nf4,lm_head=int8,blk.0.=keep'",
       true, ReadWeights,
       [](const O& o) { return o.weights.empty() ? "as stored" : o.weights.text(); }},
      {"--outlier-threshold",
       "int8 weights: activations this large multiply as floats; 0: none do; default: what the "
       "checkpoint says, else 6",
       true, ReadOutlierThreshold,
       [](const O& o) {
         return o.outlier_threshold ? Str(*o.outlier_threshold) : "the model's, else 6";
       }},
      {"--outlier-rule",
       "int8 weights: outliers per-row, or columns per-call (the paper's; answers depend on the "
       "batch)",
       true, ReadChoice(&O::outlier_rule, {"per-row", "per-call"}), ShowText(&O::outlier_rule)},
      {"--compute", "arithmetic of quantized weights: auto, exact, int8 or int16", true,
       ReadChoice(&O::compute, {"auto", "exact", "int8", "int16"}), ShowText(&O::compute)},
      {"--device",
       "cpu, cuda, or auto: GPUs if this machine has any (with --workers: cpu); a GPU for each "
       "rank",
       true, ReadChoice(&O::device, {"auto", "cpu", "cuda"}), ShowText(&O::device)},
      {"--dtype", "on a GPU: what products take in and float weights are kept as: bf16, fp16, fp32",
       true, ReadChoice(&O::dtype, {"bf16", "fp16", "fp32"}), ShowText(&O::dtype)},
      {"--deterministic",
       "on a GPU: answers do not depend on the rest of the batch (on the CPU they never do): on or "
       "off",
       true, ReadSwitch(&O::deterministic), ShowSwitch(&O::deterministic)},
      {"--policy", "fcfs (iteration-level) or request-level (the baseline)", false, ReadPolicy,
       ShowText(&O::policy)},
      {"--tensor-parallel", "ranks that share each layer, in every stage", true,
       ReadInteger(&O::tensor_parallel, 1, 64), ShowInteger(&O::tensor_parallel)},
      {"--pipeline-parallel",
       "stages that share the layers out, each in a worker process on this machine; 1: no workers",
       true, ReadInteger(&O::pipeline_parallel, 1, 256), ShowInteger(&O::pipeline_parallel)},
      {"--workers",
       "instead: workers that were started by hand (treadle worker), one stage each: host:port,...",
       true, ReadWorkers, ShowWorkers},
      {"--wire", "activations between stages: f32 (exact), bf16 or int8", true,
       ReadChoice(&O::wire, {"f32", "bf16", "int8"}), ShowText(&O::wire)},
      {"--data-plane",
       "what carries activations between stages: gloo (through the hosts), or nccl (from GPU to "
       "GPU; stages on GPUs, --wire f32)",
       true, ReadChoice(&O::data_plane, {"gloo", "nccl"}), ShowText(&O::data_plane)},
      {"--plan-forwarding",
       "a stage passes a plan on before it runs it (early), or once it has (late: a baseline to "
       "measure; same answers)",
       true, ReadChoice(&O::plan_forwarding, {"early", "late"}), ShowText(&O::plan_forwarding)},
      {"--placement-prompt-tokens",
       "stages are balanced for iterations of 8 decoding sequences and so many prompt tokens: more "
       "for long prompts and short answers, 0 for the opposite",
       true, ReadInteger(&O::placement_prompt_tokens, 0, 1 << 20),
       ShowInteger(&O::placement_prompt_tokens)},
      {"--weights-from", "workers read their own file, or get their layers from the master", true,
       ReadChoice(&O::weights_from, {"file", "master"}), ShowText(&O::weights_from)},
      {"--on-worker-loss",
       "fail: end every request and exit; restart: end those that ran, and go on once the worker "
       "is "
       "back",
       false, ReadChoice(&O::on_worker_loss, {"fail", "restart"}), ShowText(&O::on_worker_loss)},
      {"--control-tls",
       "folder with tls.crt, tls.key and ca.crt: mutual TLS with --workers; activations between "
       "workers are not encrypted",
       true, ReadText(&O::control_tls), ShowText(&O::control_tls)},
      {"--threads", "compute threads of all ranks and local workers; 0: one per CPU", true,
       ReadInteger(&O::threads, 0, 4096), ShowInteger(&O::threads, "one per CPU")},
      {"--pin-threads", "bind each compute thread to one CPU: on or off", true,
       ReadSwitch(&O::pin_threads), ShowSwitch(&O::pin_threads)},
      {"--engine-depth", "iterations in flight at once: 1 or 2", true,
       ReadInteger(&O::engine_depth, 1, 2), ShowInteger(&O::engine_depth)},
      {"--default-max-new-tokens", "for requests that give none; clipped to the context", false,
       ReadInteger(&O::default_max_new_tokens, 1, kMany), ShowInteger(&O::default_max_new_tokens)},
      {"--drain-timeout", "after SIGTERM, accepted requests may take this long", false,
       ReadDuration(&O::drain_timeout), ShowDuration(&O::drain_timeout)},
      {"--stream-stall-timeout", "a client that reads nothing for this long is cancelled", false,
       ReadDuration(&O::stream_stall_timeout), ShowDuration(&O::stream_stall_timeout)},
      {"--iteration-deadline", "an iteration that takes longer is given up, with all in it", true,
       ReadDuration(&O::iteration_deadline), ShowDuration(&O::iteration_deadline)},
      {"--max-request-bytes", "size of one request message, at most", false, ReadRequestBytes,
       [](const O& o) { return ShowBytes(o.max_request_bytes); }},
      {"--log-format", "lines of the log: text, or json with time, severity, event and fields",
       false, ReadChoice(&O::log_format, {"text", "json"}), ShowText(&O::log_format)},
      {"--log-level", "log what is at least this: info, warning or error", false,
       ReadChoice(&O::log_level, {"info", "warning", "error"}), ShowText(&O::log_level)},
      {"--log-file",
       "append the log to this file, opened anew when it was renamed; without it: stderr", false,
       ReadText(&O::log_file), ShowText(&O::log_file)},
      {"--log-requests", "log every request at its end, without its texts: on or off", false,
       ReadSwitch(&O::log_requests), ShowSwitch(&O::log_requests)},
      {"--ledger-file", "write the iteration ledger there, one JSON line per iteration", false,
       ReadText(&O::ledger_file), ShowText(&O::ledger_file)},
  };
  return flags;
}

void AddServeFlags(CLI::App& command, ServeOptions& options, bool engine_only) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (engine_only && !flag.engine) continue;
    CLI::Option* option = command.add_option_function<std::string>(
        flag.name,
        [&flag, &options](const std::string& text) {
          const absl::Status status = flag.read(options, text);
          if (!status.ok()) {
            throw CLI::ValidationError(flag.name, std::string(status.message()));
          }
        },
        flag.help);
    option->default_str(flag.show(options));
    option->type_name("");
  }
}

namespace {

absl::Status CheckParallelism(const ServeOptions& options) {
  const auto workers = static_cast<int64_t>(options.workers.size());
  if (workers > 0 && options.pipeline_parallel > 1 && options.pipeline_parallel != workers) {
    return InvalidArgument("--pipeline-parallel is ", options.pipeline_parallel, ", but --workers ",
                           "has ", workers, "; expected ", workers, ", or one of the two flags");
  }
  if (options.wire != "f32" && options.stages() == 1) {
    return InvalidArgument("--wire is ", options.wire,
                           ", but with one stage nothing is sent; expected --pipeline-parallel 2 "
                           "or more, or f32");
  }
  if (options.data_plane != "gloo") {
    const auto refuse = [&](const auto&... parts) {
      return InvalidArgument("--data-plane is ", options.data_plane, ", but ", parts...,
                             ", or gloo");
    };
    if (options.stages() == 1) {
      return refuse("with one stage nothing is sent; expected --pipeline-parallel 2 or more");
    }
    if (options.wire != "f32") {
      return refuse("--wire is ", options.wire, ", which only the host encodes; expected f32");
    }
    if (options.device == "cpu") return refuse("--device is cpu; expected cuda");
  }
  if (options.plan_forwarding != "early" && options.stages() == 1) {
    return InvalidArgument("--plan-forwarding is ", options.plan_forwarding,
                           ", but with one stage nothing is passed on; expected "
                           "--pipeline-parallel 2 or more, or early");
  }
  if (options.weights_from == "master" && !options.remote()) {
    return InvalidArgument(
        "--weights-from is master, but there are no workers; expected --workers, "
        "--pipeline-parallel 2 or more, or file");
  }
  return absl::OkStatus();
}

absl::Status CheckTls(const std::string& flags, const std::string& certificate,
                      const std::string& key, const std::string& client_ca) {
  if (certificate.empty() != key.empty()) {
    return InvalidArgument(flags, key.empty() ? "-key" : "-cert", " is missing, expected both of ",
                           flags, "-cert and ", flags, "-key, or none");
  }
  if (!client_ca.empty() && certificate.empty()) {
    return InvalidArgument(flags, "-client-ca needs ", flags, "-cert and ", flags, "-key");
  }
  return absl::OkStatus();
}

absl::Status CheckSecurity(const ServeOptions& options) {
  TREADLE_RETURN_IF_ERROR(
      CheckTls("--tls", options.tls_cert, options.tls_key, options.tls_client_ca));
  TREADLE_RETURN_IF_ERROR(CheckTls("--metrics-tls", options.metrics_tls_cert,
                                   options.metrics_tls_key, options.metrics_tls_client_ca));
  if (!options.control_tls.empty() && options.workers.empty()) {
    return InvalidArgument(
        "--control-tls needs --workers; workers of this machine are reached through a socket of "
        "this user");
  }
  if (options.metrics_auth == "api-key" && options.api_keys_file.empty()) {
    return InvalidArgument("--metrics-auth is api-key, but there is no --api-keys-file");
  }
  if (options.metrics_auth == "api-key" && !options.metrics_token_file.empty()) {
    return InvalidArgument(
        "--metrics-auth is api-key, but there is a --metrics-token-file; expected one of them");
  }
  return absl::OkStatus();
}

}  // namespace

int64_t BatchTokens(const ServeOptions& options, bool cuda) {
  if (options.max_batch_tokens > 0) return options.max_batch_tokens;
  return std::max<int64_t>(2 * options.max_batch_size, cuda ? 512 : 64);
}

absl::Status CheckServeOptions(const ServeOptions& options) {
  if (options.model.empty()) {
    return InvalidArgument("--model is missing, expected a .gguf file or a Hugging Face folder");
  }
  if (options.max_batch_tokens > 0 && options.max_batch_tokens <= options.max_batch_size) {
    return InvalidArgument("--max-batch-tokens is ", options.max_batch_tokens,
                           ", expected more than --max-batch-size (", options.max_batch_size, ")");
  }
  TREADLE_RETURN_IF_ERROR(CheckSecurity(options));
  return CheckParallelism(options);
}

LogEvent Describe(const ServeOptions& options) {
  LogEvent event{.name = "configuration",
                 .message = "the effective configuration",
                 .text = LogEvent::Text::kFieldLines};
  for (const ServeFlag& flag : ServeFlags()) {
    event.fields.push_back({flag.name + 2, flag.show(options)});
  }
  return event;
}

}  // namespace treadle
