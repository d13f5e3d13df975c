// Options that do not go together.
#include <memory>
#include <utility>

#include "base/status.h"
#include "scheduler/policy.h"
#include "server/configuration.h"

namespace treadle {
namespace {

absl::Status CheckParallelism(const ServeOptions& options) {
  const auto workers = static_cast<int64_t>(options.workers.size());
  if (options.spares > 0 && (!options.remote() || options.stages() < 1)) {
    return InvalidArgument("--spares is ", options.spares, ", but there are ",
                           options.remote() ? workers : 0,
                           " workers; expected more of them, --pipeline-parallel 2 or more, or 0");
  }
  if (workers > 0 && options.pipeline_parallel > 1 &&
      options.pipeline_parallel != options.stages()) {
    return InvalidArgument("--pipeline-parallel is ", options.pipeline_parallel, ", but --workers ",
                           "has ", workers, "; expected ", options.stages(),
                           ", or one of the two flags");
  }
  if (options.wire != WireType::kF32 && options.stages() == 1) {
    return InvalidArgument("--wire is ", Name(options.wire),
                           ", but with one stage nothing is sent; expected --pipeline-parallel 2 "
                           "or more, or f32");
  }
  if (options.data_plane != DataPlane::kGloo) {
    const auto refuse = [&](const auto&... parts) {
      return InvalidArgument("--data-plane is ", Name(options.data_plane), ", but ", parts...,
                             ", or gloo");
    };
    if (options.stages() == 1) {
      return refuse("with one stage nothing is sent; expected --pipeline-parallel 2 or more");
    }
    if (options.wire != WireType::kF32) {
      return refuse("--wire is ", Name(options.wire),
                    ", which only the host encodes; expected f32");
    }
    if (options.device == DeviceChoice::kCpu) return refuse("--device is cpu; expected cuda");
  }
  if (options.plan_forwarding == PlanForwarding::kLate && options.stages() == 1) {
    return InvalidArgument(
        "--plan-forwarding is late, but with one stage nothing is passed on; expected "
        "--pipeline-parallel 2 or more, or early");
  }
  if (options.weights_from == WeightsFrom::kMaster && !options.remote()) {
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
  for (const auto& [flag, value] :
       {std::pair<const char*, const std::string&>("--control-tls", options.control_tls),
        {"--control-secret-file", options.control_secret_file}}) {
    if (value.empty() || !options.workers.empty()) continue;
    return InvalidArgument(flag,
                           " needs --workers; workers of this machine are reached through a "
                           "socket of this user");
  }
  if (options.metrics_auth == MetricsAuth::kApiKey && options.api_keys_file.empty()) {
    return InvalidArgument("--metrics-auth is api-key, but there is no --api-keys-file");
  }
  if (options.metrics_auth == MetricsAuth::kApiKey && !options.metrics_token_file.empty()) {
    return InvalidArgument(
        "--metrics-auth is api-key, but there is a --metrics-token-file; expected one of them");
  }
  return absl::OkStatus();
}

absl::Status CheckPrefixCacheDisk(const ServeOptions& options) {
  const std::pair<bool, const char*> others[] = {
      {!options.prefix_cache, "--prefix-cache is off; expected on"},
      {options.remote(), "the model is in worker processes; expected it in this one"},
      {options.tensor_parallel > 1, "--tensor-parallel is more than 1; expected 1"},
      {!options.record.empty(), "--record has no place for pages that are read; expected none"}};
  for (const auto& [refused, why] : others) {
    if (options.prefix_cache_disk.folder.empty() || !refused) continue;
    return InvalidArgument("--prefix-cache-disk is set, but ", why,
                           ", or --prefix-cache-disk none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckServeOptions(const ServeOptions& options) {
  if (options.model.empty()) {
    return InvalidArgument("--model is missing, expected a .gguf file or a Hugging Face folder");
  }
  if (options.max_batch_tokens > 0 && options.max_batch_tokens <= options.max_batch_size) {
    return InvalidArgument("--max-batch-tokens is ", options.max_batch_tokens,
                           ", expected more than --max-batch-size (", options.max_batch_size, ")");
  }
  for (const auto& [flag, bytes] : {std::pair("--max-receive-memory", options.max_receive_memory),
                                    std::pair("--max-unread-bytes", options.max_unread_bytes)}) {
    if (bytes < options.max_request_bytes) {
      return InvalidArgument(flag, " is ", bytes, ", expected at least --max-request-bytes (",
                             options.max_request_bytes, ")");
    }
  }
  if (options.kv_events && !options.prefix_cache) {
    return InvalidArgument(
        "--kv-events is on, but --prefix-cache is off and holds nothing to tell of; expected both "
        "on, or --kv-events off");
  }
  TREADLE_RETURN_IF_ERROR(CheckPrefixCacheDisk(options));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Policy> policy, Policy::Create(options.policy));
  if (options.max_ttft.count() > 0 && policy->delivery() == Policy::Delivery::kWhenIdle) {
    return InvalidArgument("--max-ttft is set, but --policy is ", options.policy,
                           ", whose answers come as a whole; expected another policy, or 0s");
  }
  const bool baseline = options.policy.starts_with("faster-transformer");
  if (options.microbatch_size > 0 && !baseline) {
    return InvalidArgument("--microbatch-size is ", options.microbatch_size, ", but --policy is ",
                           options.policy,
                           ", which has no microbatches; expected faster-transformer, or 0");
  }
  if (options.padding == Padding::kCompute && !baseline) {
    return InvalidArgument("--padding is compute, but --policy is ", options.policy,
                           ", which has no padding; expected faster-transformer, or count");
  }
  TREADLE_RETURN_IF_ERROR(CheckSecurity(options));
  return CheckParallelism(options);
}

}  // namespace treadle
