#include "scheduler/request_level.h"

#include <algorithm>

namespace treadle {
namespace {

// The requests that form the next batch: in arrival order, up to the cap and the free pages.
Selection NextBatch(std::span<const std::unique_ptr<Request>> pool, const KvCapacity& kv,
                    const BatchLimits& limits) {
  Selection selection;
  int64_t sequences = 0;
  int64_t free_pages = kv.free_pages;
  for (const auto& request : pool) {
    if (request->state != RequestState::kWaiting) continue;
    sequences += BatchSequences(*request);
    free_pages -= PagesNeeded(*request, kv.page_size);
    if (sequences > limits.max_batch_size || free_pages < 0) break;
    selection.push_back({request.get(), 0});
  }
  return selection;
}

}  // namespace

Selection RequestLevel::Select(std::span<const std::unique_ptr<Request>> pool, const KvCapacity& kv,
                               const BatchLimits& limits) const {
  const bool running = std::any_of(pool.begin(), pool.end(), [](const auto& request) {
    return request->state == RequestState::kRunning;
  });
  Selection selection;
  if (!running) {
    selection = NextBatch(pool, kv, limits);
  } else {
    for (const auto& request : pool) {
      if (IsReady(*request, limits)) selection.push_back({request.get(), 0});
    }
  }
  AssignTokens(selection, limits);
  return selection;
}

}  // namespace treadle
