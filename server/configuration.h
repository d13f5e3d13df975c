// Everything that an operator can set, with documented defaults: one table of flags gives --help,
// the parser and the effective configuration that is printed at start. Pure; no state.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "models/checkpoints/weight_plan.h"
#include "server/observe/log_event.h"

namespace CLI {
class App;
}

namespace treadle {

struct ServeOptions {
  std::string model;
  std::string model_sha256;  // lower case; empty: not checked
  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9400";  // "none": no metrics server
  int64_t max_batch_size = 32;
  int64_t max_batch_tokens = 0;  // 0: auto, see BatchTokens
  int64_t max_queue = 1024;
  int64_t max_context = 0;  // 0: the model's
  int64_t kv_memory = 0;    // bytes; 0: auto
  std::string kv_dtype = "f16";
  int64_t page_size = 32;
  WeightPlan weights;                      // empty: as stored
  std::optional<float> outlier_threshold;  // unset: the checkpoint's, else 6
  std::string outlier_rule = "per-row";
  std::string compute = "auto";
  std::string device = "auto";
  std::string dtype = "bf16";
  bool deterministic = false;
  std::string policy = "fcfs";
  int64_t tensor_parallel = 1;       // ranks of each stage
  int64_t pipeline_parallel = 1;     // stages; more than 1: worker processes of this machine
  std::vector<std::string> workers;  // instead: addresses of workers that run already, by stage
  std::string wire = "f32";
  std::string data_plane = "gloo";  // between stages
  std::string plan_forwarding = "early";
  int64_t placement_prompt_tokens = 32;  // beside 8 decoding sequences
  std::string weights_from = "file";
  std::string on_worker_loss = "restart";
  int64_t threads = 0;  // of all ranks and local workers together; 0: one per CPU of this process
  bool pin_threads = true;
  int64_t engine_depth = 2;
  int64_t default_max_new_tokens = 512;
  std::chrono::milliseconds drain_timeout{30'000};
  std::chrono::milliseconds stream_stall_timeout{60'000};
  std::chrono::milliseconds iteration_deadline{120'000};
  int64_t max_request_bytes = 4 << 20;
  std::string log_format = "text";
  std::string log_level = "info";
  std::string log_file;  // empty: stderr
  bool log_requests = true;
  std::string ledger_file;  // empty: none
  std::string health_listen = "none";
  std::string tls_cert, tls_key;  // PEM files; empty: plaintext
  std::string tls_client_ca;      // clients need a certificate from it; empty: they need none
  std::string control_tls;        // folder; empty: workers in plaintext
  std::string api_keys_file;      // empty: everybody may call
  std::string metrics_auth = "none";
  std::string metrics_tls_cert, metrics_tls_key;  // PEM files; empty: plaintext
  std::string metrics_tls_client_ca;              // as tls_client_ca, for scrapes
  std::string metrics_token_file;                 // empty: scrapes need no token of their own

  int64_t stages() const {
    return workers.empty() ? pipeline_parallel : static_cast<int64_t>(workers.size());
  }
  // Worker processes run the model, not this one.
  bool remote() const { return pipeline_parallel > 1 || !workers.empty(); }
};

// One flag: how it reads and how it shows. An error says what was expected.
struct ServeFlag {
  const char* name;  // "--listen"
  const char* help;
  bool engine;  // concerns model and engine (also flags of in-process `generate` and benchmarks)
  std::function<absl::Status(ServeOptions&, const std::string&)> read;
  std::function<std::string(const ServeOptions&)> show;
};
const std::vector<ServeFlag>& ServeFlags();

// Adds the flags (all, or those of the engine) to a command; a bad value is a CLI::ValidationError.
void AddServeFlags(CLI::App& command, ServeOptions& options, bool engine_only = false);

// What max_batch_tokens is, with `auto` resolved. A larger iteration uses the weights better and
// makes everybody's next token wait longer. CPUs compute at their full rate from some ten rows on:
// as many tokens for prompts as for decoding sequences, and at least 64 in all. GPUs want hundreds.
int64_t BatchTokens(const ServeOptions& options, bool cuda);

// What holds between several options, for instance max_batch_tokens > max_batch_size.
absl::Status CheckServeOptions(const ServeOptions& options);

// The effective configuration, as the event `configuration`; in text one "name = value" per line.
LogEvent Describe(const ServeOptions& options);

}  // namespace treadle
