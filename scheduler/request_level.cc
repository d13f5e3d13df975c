#include "scheduler/request_level.h"

#include <algorithm>

namespace treadle {
namespace {

// The requests that form the next batch: in arrival order, up to the cap and the free pages.
Selection NextBatch(const PolicyView& view) {
  Selection selection;
  int64_t sequences = 0;
  int64_t free_pages = view.kv.free_pages;
  for (const auto& request : view.pool) {
    if (request->state != RequestState::kWaiting) continue;
    sequences += BatchSequences(*request);
    free_pages -= PagesNeeded(*request, view.kv.page_size);
    if (sequences > view.limits.max_batch_size || free_pages < 0) break;
    selection.push_back({request.get(), 0});
  }
  return selection;
}

}  // namespace

Selection RequestLevel::Select(const PolicyView& view) {
  const bool running = std::ranges::any_of(
      view.pool, [](const auto& request) { return request->state == RequestState::kRunning; });
  Selection selection;
  if (!running) {
    selection = NextBatch(view);
  } else {
    for (const auto& request : view.pool) {
      if (IsReady(*request, view.limits)) selection.push_back({request.get(), 0});
    }
  }
  AssignTokens(selection, view.limits);
  return selection;
}

}  // namespace treadle
