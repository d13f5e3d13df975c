#include "engine/remote/stage_description.h"

#include "engine/memory_plan.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"
#include "kernels/status.h"

namespace treadle {

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
  if (!hello.compute().empty() && hello.compute() != Name(options.compute)) {
    return refuse("the worker computes ", hello.compute(), ", this master wants ",
                  Name(options.compute));
  }
  const uint64_t memory = hello.memory_available() + hello.held_bytes();
  if (weight_bytes > memory) {
    return ResourceExhausted("its weights need ", weight_bytes >> 20, " MiB of memory, it has ",
                             memory >> 20, " MiB");
  }
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
  out.set_backend("cpu");
  out.set_compute(std::string(Name(options.compute)));
  out.set_weights(options.weights);
  if (options.outlier_threshold) out.set_outlier_threshold(*options.outlier_threshold);
  out.set_outliers_per_call(options.outlier_rule == OutlierRule::kPerCall);
  out.set_kv_dtype(std::string(Name(options.kv_dtype)));
  out.set_wire(std::string(Name(options.wire)));
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
                                                 .max_batch_size = options.max_batch_size,
                                                 .max_context = context,
                                                 .page_size = options.page_size,
                                                 .kv_dtype = options.kv_dtype}));
  return plan.pages;
}

}  // namespace treadle
