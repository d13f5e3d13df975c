#include "engine/remote/stage_description.h"

#include "base/status.h"
#include "engine/memory_plan.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"

namespace treadle {
namespace {

bool OnGpus(const RemoteEngineOptions& options) { return options.backend == "cuda"; }

// What a worker was told to keep to.
absl::Status CheckNumerics(const RemoteEngineOptions& options, const control::WorkerHello& hello) {
  const bool gpus = OnGpus(options);
  const struct {
    const char* does;
    const std::string& kept_to;
    std::string_view wanted;
    bool counts;
  } rows[] = {
      {"runs on ", hello.device(), options.backend, true},
      {"computes ", hello.compute(), Name(options.compute), true},
      {"computes in ", hello.dtype(), Name(options.dtype), gpus},
      {"is deterministic: ", hello.deterministic(), options.deterministic ? "on" : "off", gpus}};
  for (const auto& [does, kept_to, wanted, counts] : rows) {
    if (!counts || kept_to.empty() || kept_to == wanted) continue;
    return absl::FailedPreconditionError(
        Str("the worker ", does, kept_to, ", this master wants ", wanted));
  }
  return absl::OkStatus();
}

absl::Status CheckMemory(const RemoteEngineOptions& options, uint64_t weight_bytes,
                         const control::WorkerHello& hello) {
  uint64_t memory = hello.memory_available() + hello.held_bytes();
  if (OnGpus(options)) {
    if (hello.gpus() == 0) {
      return absl::FailedPreconditionError(Str("it has no GPU: ", hello.no_gpu()));
    }
    if (hello.gpus() < options.tensor_parallel) {
      return absl::FailedPreconditionError(
          Str("its ", options.tensor_parallel, " ranks need a GPU each, it has ", hello.gpus()));
    }
    memory = hello.gpu_memory() * static_cast<uint64_t>(options.tensor_parallel);
  }
  if (weight_bytes <= memory) return absl::OkStatus();
  return ResourceExhausted("its weights need ", weight_bytes >> 20, " MiB of memory, it has ",
                           memory >> 20, " MiB");
}

}  // namespace

absl::Status CheckHello(const RemoteEngineOptions& options, const std::string& fingerprint,
                        size_t stage, const control::WorkerHello& hello) {
  const uint64_t weight_bytes = options.stages[stage].weight_bytes;
  const auto refuse = [](const auto&... parts) {
    return absl::FailedPreconditionError(Str(parts...));
  };
  if (hello.protocol() != kControlProtocol || hello.version() != options.version) {
    return refuse("the worker is version ", hello.version(), " (protocol ", hello.protocol(),
                  "), this is ", options.version, " (protocol ", kControlProtocol, ")");
  }
  TREADLE_RETURN_IF_ERROR(CheckNumerics(options, hello));
  TREADLE_RETURN_IF_ERROR(CheckMemory(options, weight_bytes, hello));
  if (options.weights_from_master) return absl::OkStatus();
  if (!hello.problem().empty()) return refuse(hello.problem());
  if (hello.model_path().empty()) {
    return refuse("the worker has no model of its own: start it with --model, or send it the ",
                  "weights with --weights-from master");
  }
  if (hello.fingerprint() != fingerprint) {
    return refuse("its model ", hello.model_path(), " is another file: SHA-256 ",
                  hello.fingerprint().substr(0, 16), "..., the master's is ",
                  fingerprint.substr(0, 16), "...");
  }
  return absl::OkStatus();
}

void DescribeStage(const RemoteEngineOptions& options, size_t stage, const std::string& fingerprint,
                   control::Configure& out) {
  out.set_stage(static_cast<int32_t>(stage));
  out.set_stages(static_cast<int32_t>(options.stages.size()));
  out.set_tensor_parallel(options.tensor_parallel);
  out.set_first_layer(options.stages[stage].layers.begin);
  out.set_end_layer(options.stages[stage].layers.end);
  out.set_fingerprint(fingerprint);
  out.set_backend(options.backend);
  if (OnGpus(options)) {
    out.set_dtype(std::string(Name(options.dtype)));
    out.set_deterministic(options.deterministic);
  }
  out.set_compute(std::string(Name(options.compute)));
  out.set_weights(options.weights);
  if (options.outlier_threshold) out.set_outlier_threshold(*options.outlier_threshold);
  out.set_outliers_per_call(options.outlier_rule == OutlierRule::kPerCall);
  out.set_kv_dtype(std::string(Name(options.kv_dtype)));
  out.set_wire(std::string(Name(options.wire)));
  out.set_data_plane(std::string(Name(options.data_plane)));
  out.set_max_batch_tokens(options.max_batch_tokens);
  out.set_max_context(options.max_context);
  out.set_page_size(options.page_size);
  out.set_iteration_deadline_ms(static_cast<uint32_t>(options.iteration_deadline.count()));
}

absl::StatusOr<int64_t> PagesOf(const RemoteEngineOptions& options, size_t stage, int64_t kv_heads,
                                uint64_t available) {
  ModelConfig config = options.checkpoint->config();
  const int64_t context = options.max_context > 0 ? options.max_context : config.context;
  config.layers = options.stages[stage].layers.end - options.stages[stage].layers.begin;
  config.kv_heads = kv_heads;
  TREADLE_ASSIGN_OR_RETURN(const KvMemoryPlan plan,
                           PlanKvMemory(config, {.kv_bytes = options.kv_memory,
                                                 .available_bytes = static_cast<int64_t>(available),
                                                 .available_share = OnGpus(options) ? 0.9 : 0.5,
                                                 .max_batch_size = options.max_batch_size,
                                                 .max_context = context,
                                                 .page_size = options.page_size,
                                                 .kv_dtype = options.kv_dtype}));
  return plan.pages;
}

}  // namespace treadle
