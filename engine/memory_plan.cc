#include "engine/memory_plan.h"

#include <algorithm>

#include "base/status.h"
#include "kernels/kv_view.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

absl::Status CheckRequest(const KvMemoryRequest& request) {
  const struct {
    const char* name;
    int64_t value;
  } positive[] = {{"max batch size", request.max_batch_size},
                  {"max context", request.max_context},
                  {"max batch tokens", request.max_batch_tokens},
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

// "33 pages of 32 tokens x 23040 bytes = 24330240 bytes"
std::string Product(const PageCounts& pages, const KvMemoryPlan& plan) {
  std::string out;
  int64_t bytes = 0;
  for (const PageKind kind : kPageKinds) {
    if (pages[kind] == 0) continue;
    out += Str(out.empty() ? "" : " + ", pages[kind],
               kind == PageKind::kWhole ? " pages of " : " window pages of ", plan.paging.page_size,
               " tokens x ", plan.bytes_per_token[kind], " bytes");
    bytes += pages[kind] * plan.bytes_per_page[kind];
  }
  return Str(out, " = ", bytes, " bytes");
}

// " (2 x 30 layers x 3 heads x 64 elements of f16 per token)", with latents without the 2; nothing
// where layers differ.
std::string Factors(const ModelConfig& config, const KvMemoryRequest& request) {
  if (config.local_head_dim > 0) return "";
  return Str(config.latent_dim > 0 ? " (" : " (2 x ", config.layers, " layers x ",
             std::max(config.kv_heads, request.tensor_parallel), " heads x ", config.head_dim,
             " elements of ", Name(request.kv_dtype),
             request.kv_dtype == DType::kI8 ? " and a scale" : "", " per token)");
}

}  // namespace

KvMemoryPlan KvMemoryOf(const ModelConfig& config, const KvMemoryRequest& request,
                        const PageCounts& pages) {
  const auto [begin, end] = request.layers;
  const int64_t last = begin == end ? config.layers : end;
  KvMemoryPlan plan;
  plan.paging = KvPaging::Of(config, request.page_size, request.max_batch_tokens);
  plan.pages_per_request = plan.paging.PagesFor(request.max_context);
  plan.pages = pages;
  for (const PageKind kind : kPageKinds) {
    const bool local = kind == PageKind::kWindow;
    // Beyond the model's heads, several ranks hold the same one each.
    KvLayout layout{.kv_heads = std::max(config.KvHeads(local), request.tensor_parallel),
                    .head_dim = config.HeadDim(local),
                    .page_size = request.page_size,
                    .dtype = request.kv_dtype,
                    .latent_dim = config.latent_dim};
    if (local) layout.state = StateOf(config, config.StateUnits());
    plan.bytes_per_page[kind] = layout.PageBytes() * config.KvLayers(begin, last, local);
    plan.bytes_per_token[kind] = plan.bytes_per_page[kind] / request.page_size;
    plan.bytes += pages[kind] * plan.bytes_per_page[kind];
  }
  return plan;
}

absl::StatusOr<KvMemoryPlan> PlanKvMemory(const ModelConfig& config,
                                          const KvMemoryRequest& request) {
  TREADLE_RETURN_IF_ERROR(CheckRequest(request));
  const KvMemoryPlan each = KvMemoryOf(config, request, {});
  const PageCounts& need = each.pages_per_request;
  __int128_t request_bytes = 0;
  for (const PageKind kind : kPageKinds) {
    request_bytes += __int128_t{need[kind]} * each.bytes_per_page[kind];
  }
  const bool automatic = !request.kv_bytes.has_value();
  const auto share =
      static_cast<int64_t>(static_cast<double>(request.available_bytes) * request.available_share);
  const int64_t budget = automatic ? share : *request.kv_bytes;
  if (!automatic && request.available_bytes > 0 && budget > request.available_bytes) {
    return ResourceExhausted(
        "--kv-memory is ", budget >> 20, "M, but the memory beside the weights is ",
        request.available_bytes >> 20, "M; expected no more than that, or auto");
  }
  __int128_t used = budget;
  if (automatic) used = std::min(used, request.max_batch_size * request_bytes);
  PageCounts pages;
  for (const PageKind kind : kPageKinds) {
    // A stage whose layers have no pages leaves the others room for all requests of a batch.
    const __int128_t fit = request_bytes > 0 ? need[kind] * used / request_bytes
                                             : __int128_t{need[kind]} * request.max_batch_size;
    pages[kind] = static_cast<int64_t>(std::min<__int128_t>(fit, INT32_MAX));  // an id's
  }
  if (!need.FitsIn(pages)) {
    return ResourceExhausted(
        "K/V memory: one request of ", request.max_context, " tokens needs ", Product(need, each),
        Factors(config, request), ", but ",
        automatic ? Str(request.available_share * 100, " % of the available memory are ")
                  : "--kv-memory is ",
        budget, " bytes; lower --max-context or give more memory");
  }
  return KvMemoryOf(config, request, pages);
}

std::string KvMemoryPlan::ToString() const {
  return Str("K/V cache: ", Product(pages, *this), " (", (bytes + (1 << 19)) >> 20, " MiB)");
}

}  // namespace treadle
