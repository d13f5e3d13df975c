// Everything that an operator can set, with documented defaults: one table of flags gives --help,
// the parser, the environment's and the file's names, the configuration that is printed, and the
// values of the Helm chart (`make chart-flags` writes them). Pure; no state.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/choice.h"
#include "engine/choices.h"
#include "engine/plan/defaults.h"
#include "engine/plan/iteration_plan.h"
#include "models/checkpoints/weight_plan.h"
#include "scheduler/request/drafter.h"
#include "server/observe/log_event.h"
#include "server/observe/vllm_metrics.h"

namespace CLI {
class App;
}

namespace treadle {

inline constexpr Choice<bool> kSwitch[] = {{"on", true}, {"off", false}};

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
enum class PlanForwarding : uint8_t { kEarly, kLate };
enum class WeightsFrom : uint8_t { kFile, kMaster };
enum class OnWorkerLoss : uint8_t { kFail, kRestart, kRecover };
enum class Padding : uint8_t { kCount, kCompute };
enum class MetricsAuth : uint8_t { kNone, kApiKey };
enum class GenerationConfig : uint8_t { kAuto, kNone };
inline constexpr Choice<DeviceChoice> kDevices[] = {
    {"auto", DeviceChoice::kAuto}, {"cpu", DeviceChoice::kCpu}, {"cuda", DeviceChoice::kCuda}};

// A folder, and how much may be in it.
struct FolderSpace {
  std::string folder;  // empty: none
  int64_t bytes = 0;
};

struct ServeOptions {
  std::string model;
  std::vector<std::string> served_model_names;  // the first is told; empty: by the path
  std::string model_sha256;                     // lower case; empty: not checked
  std::vector<std::string> loras;               // adapters, each NAME=PATH
  std::string lora_dir;                         // folder of adapters; empty: none
  int64_t max_loras = 16;                       // in memory at once
  int64_t lora_memory = 0;                      // bytes of these; 0: no bound
  std::string listen = "127.0.0.1:50051";
  std::string http_listen = "127.0.0.1:8080";     // "none": no OpenAI API
  std::vector<std::string> http_allow_origins;    // of pages of others that may ask; "*": all
  std::string metrics_listen = "127.0.0.1:9400";  // "none": no metrics server
  MetricsDialect metrics_dialect = MetricsDialect::kTreadle;
  int64_t max_batch_size = 0;    // 0: auto (scheduler/batch_sizes.h)
  int64_t max_batch_tokens = 0;  // 0: auto
  std::chrono::milliseconds target_itl{100};
  int64_t max_queue = 1024;
  int64_t max_context = 0;  // 0: the model's
  int64_t kv_memory = 0;    // bytes; 0: auto
  bool prefix_cache = true;
  std::optional<Speculate> speculate;  // unset: SpeculateOf
  std::string draft_model;             // path, with Speculate::kDraft
  int64_t prefix_cache_memory = 0;     // bytes of kv_memory; 0: all
  FolderSpace prefix_cache_disk;
  bool kv_events = false;
  int64_t replay_log_memory = kDefaultReplayLogMemory;  // bytes
  DType kv_dtype = DType::kF16;
  int64_t page_size = kDefaultPageSize;
  WeightPlan weights;                      // empty: as stored
  std::optional<float> outlier_threshold;  // unset: the checkpoint's, else 6
  OutlierRule outlier_rule = OutlierRule::kPerRow;
  ComputeMode compute = ComputeMode::kAuto;
  DeviceChoice device = DeviceChoice::kAuto;
  DType dtype = DType::kBF16;  // of products on a GPU
  bool deterministic = false;
  std::string policy = "fcfs";
  int64_t microbatch_size = 0;            // of --policy faster-transformer; 0: the batch's
  Padding padding = Padding::kCount;      // of --policy faster-transformer
  std::chrono::milliseconds max_ttft{0};  // 0: nothing is refused for its time
  int64_t tensor_parallel = 1;            // ranks of each stage
  int64_t pipeline_parallel = 1;          // stages; more than 1: worker processes of this machine
  int64_t spares = 0;                     // workers without a stage
  std::vector<std::string> workers;  // instead: addresses of workers that run already, by stage
  WireType wire = WireType::kF32;
  DataPlane data_plane = DataPlane::kGloo;  // between stages
  PlanForwarding plan_forwarding = PlanForwarding::kEarly;
  int64_t placement_prompt_tokens = 32;  // beside 8 decoding sequences
  WeightsFrom weights_from = WeightsFrom::kFile;
  OnWorkerLoss on_worker_loss = OnWorkerLoss::kRecover;
  int64_t threads = 0;  // of all ranks and local workers together; 0: one per CPU of this process
  bool pin_threads = true;
  int64_t engine_depth = 2;
  int64_t default_max_new_tokens = 512;
  GenerationConfig generation_config = GenerationConfig::kAuto;
  Pooling embedding_pooling = Pooling::kNone;
  std::chrono::milliseconds drain_timeout{30'000};
  std::chrono::milliseconds stream_stall_timeout{60'000};
  std::chrono::milliseconds iteration_deadline{120'000};
  int64_t max_request_bytes = 4 << 20;
  int64_t max_receive_memory = 32 << 20;
  int64_t max_unread_bytes = 32 << 20;
  int64_t max_unread_requests = 1024;
  int64_t max_connections = 1024;
  int64_t max_connections_per_address = 512;
  int64_t max_calls_per_connection = 256;
  int64_t max_header_bytes = 64 << 10;
  LogFormat log_format = LogFormat::kText;
  Severity log_level = Severity::kInfo;
  std::string log_file;  // empty: stderr
  bool log_requests = true;
  std::string ledger_file;  // empty: none
  std::string durable;      // folder; empty: requests are not stored
  std::chrono::milliseconds durable_keep{600'000};
  int64_t durable_space = int64_t{1} << 30;
  std::string record;  // file; empty: none
  int64_t record_size = 256 << 20;
  std::string health_listen = "none";
  std::string tls_cert, tls_key;    // PEM files; empty: plaintext
  std::string tls_client_ca;        // clients need a certificate from it; empty: they need none
  std::string control_tls;          // folder; empty: workers in plaintext
  std::string control_secret_file;  // empty: workers are not asked for a proof
  std::string api_keys_file;        // empty: everybody may call
  MetricsAuth metrics_auth = MetricsAuth::kNone;
  std::string metrics_tls_cert, metrics_tls_key;  // PEM files; empty: plaintext
  std::string metrics_tls_client_ca;              // as tls_client_ca, for scrapes
  std::string metrics_token_file;                 // empty: scrapes need no token of their own

  int64_t stages() const {
    return workers.empty() ? pipeline_parallel : static_cast<int64_t>(workers.size()) - spares;
  }
  // Worker processes run the model, not this one.
  bool remote() const { return pipeline_parallel > 1 || !workers.empty(); }
};

// How one kind of value reads and shows. An error says what was found and what was expected; the
// caller adds the flag's name.
struct FlagValue {
  std::function<absl::Status(ServeOptions&, const std::string&)> read;
  std::function<std::string(const ServeOptions&)> show;
  std::string schema;         // what the Helm chart takes for it: a JSON schema on one line
  bool list = false;          // a flag that is given several times is one with commas
  std::string type = "TEXT";  // for --help: "SIZE", or the words, "{on,off}"
};

// Where the Helm chart has a flag: as a word under its `server`, set by the chart itself from other
// values, or nowhere (extraArgs can name it).
enum class InChart : uint8_t { kServer, kOwn, kNowhere };

struct ServeFlag {
  const char* name;  // "--listen"
  bool engine;  // concerns model and engine (also flags of in-process `generate` and benchmarks)
  InChart chart;
  FlagValue value;
  const char* help;
  const char* group = "";  // title in --help
};
const std::vector<ServeFlag>& ServeFlags();
// The group, before all others, of the flags that most people need.
inline constexpr char kFirstFlags[] = "What matters first";

// Adds the flags (all, or those of the engine) to a command, which then takes the model without its
// flag, too; a bad value is a CLI::ValidationError.
void AddServeFlags(CLI::App& command, ServeOptions& options, bool engine_only = false);

// The guesses of requests that do not say. Unset is n-grams on a CPU and nothing on GPUs, which
// verify guesses outside their captured graphs and lose more by that than they gain.
inline Speculate SpeculateOf(const ServeOptions& options, bool cuda) {
  return options.speculate.value_or(cuda ? Speculate::kOff : Speculate::kNgram);
}

// Checks that concern several options, for instance max_batch_tokens > max_batch_size.
absl::Status CheckServeOptions(const ServeOptions& options);

// The effective configuration, as the event `configuration`; in text one "name = value" per line.
// Either all of it, or what differs from the defaults.
LogEvent Describe(const ServeOptions& options, bool all);

}  // namespace treadle
