#include "engine/memory_plan.h"

#include <algorithm>

#include "base/status.h"
#include "kernels/kv_view.h"

namespace treadle {
namespace {

absl::Status CheckRequest(const KvMemoryRequest& request) {
  const struct {
    const char* name;
    int64_t value;
  } positive[] = {{"max batch size", request.max_batch_size},
                  {"max context", request.max_context},
                  {"page size", request.page_size},
                  {"tensor-parallel degree", request.tensor_parallel}};
  for (const auto& [name, value] : positive) {
    if (value < 1 || value > INT32_MAX) {
      return InvalidArgument("K/V memory: ", name, " is ", value, ", expected 1 to ", INT32_MAX);
    }
  }
  if (request.kv_bytes && *request.kv_bytes < 1) {
    return InvalidArgument("K/V memory is ", *request.kv_bytes, " bytes, expected at least 1");
  }
  return absl::OkStatus();
}

// Beyond the model's heads, several ranks hold the same one each.
int64_t HeadsOfAllRanks(const ModelConfig& config, const KvMemoryRequest& request) {
  return std::max(config.kv_heads, request.tensor_parallel);
}

}  // namespace

KvMemoryPlan KvMemoryOf(const ModelConfig& config, const KvMemoryRequest& request, int64_t pages) {
  const KvLayout layout{.kv_heads = HeadsOfAllRanks(config, request),
                        .head_dim = config.head_dim,
                        .page_size = request.page_size,
                        .dtype = request.kv_dtype};
  KvMemoryPlan plan;
  plan.bytes_per_page = layout.PageBytes() * config.layers;
  plan.bytes_per_token = plan.bytes_per_page / request.page_size;
  plan.pages = pages;
  plan.bytes = pages * plan.bytes_per_page;
  plan.tokens = pages * request.page_size;
  return plan;
}

absl::StatusOr<KvMemoryPlan> PlanKvMemory(const ModelConfig& config,
                                          const KvMemoryRequest& request) {
  TREADLE_RETURN_IF_ERROR(CheckRequest(request));
  const KvMemoryPlan page = KvMemoryOf(config, request, 1);
  const int64_t pages_per_request =
      (request.max_context + request.page_size - 1) / request.page_size;
  const bool automatic = !request.kv_bytes.has_value();
  const auto share =
      static_cast<int64_t>(static_cast<double>(request.available_bytes) * request.available_share);
  const int64_t budget = automatic ? share : *request.kv_bytes;
  int64_t limit = INT32_MAX;  // page ids are 32 bits
  if (automatic) limit = std::min(limit, request.max_batch_size * pages_per_request);
  KvMemoryPlan plan = KvMemoryOf(config, request, std::min(budget / page.bytes_per_page, limit));
  plan.pages_per_request = pages_per_request;
  if (plan.pages < plan.pages_per_request) {
    return ResourceExhausted(
        "K/V memory: one request of ", request.max_context, " tokens needs ",
        plan.pages_per_request, " pages of ", request.page_size, " tokens x ", plan.bytes_per_token,
        " bytes = ", plan.pages_per_request * plan.bytes_per_page, " bytes (2 x ", config.layers,
        " layers x ", HeadsOfAllRanks(config, request), " heads x ", config.head_dim,
        " elements of ", Name(request.kv_dtype), " per token), but ",
        automatic ? Str(request.available_share * 100, " % of the available memory are ")
                  : "--kv-memory is ",
        budget, " bytes; lower --max-context or give more memory");
  }
  return plan;
}

std::string KvMemoryPlan::ToString() const {
  return Str("K/V cache: ", pages, " pages, ", tokens, " tokens x ", bytes_per_token,
             " bytes = ", (bytes + (1 << 19)) >> 20, " MiB");
}

}  // namespace treadle
