#include "scheduler/fcfs.h"

#include <algorithm>

namespace treadle {

int64_t Fcfs::BatchCap(const PolicyView& view) {
  const BatchLimits& limits = view.limits;
  if (limits.stages == 1) return limits.max_batch_size;
  int64_t sequences = 0;
  int64_t free_pages = view.kv.free_pages;
  for (const auto& request : view.pool) {
    if (request->state == RequestState::kFinished) continue;
    if (request->state == RequestState::kWaiting) {
      free_pages -= PagesNeeded(*request, view.kv.page_size);
      if (free_pages < 0) break;
    }
    sequences += BatchSequences(*request);
  }
  return std::min(limits.max_batch_size, (sequences + limits.stages - 1) / limits.stages);
}

Selection Fcfs::Select(const PolicyView& view) {
  const int64_t cap = BatchCap(view);
  Selection selection;
  int64_t sequences = 0;
  int64_t free_pages = view.kv.free_pages;
  // Admission is in arrival order, so whoever runs arrived before whoever waits: one pass does.
  for (const auto& request : view.pool) {
    const bool waiting = request->state == RequestState::kWaiting;
    if (!waiting && !IsReady(*request, view.limits)) continue;
    const int64_t size = BatchSequences(*request);
    if (sequences > 0 && sequences + size > cap) break;
    if (waiting) {
      free_pages -= PagesNeeded(*request, view.kv.page_size);
      if (free_pages < 0) break;
    }
    sequences += size;
    selection.push_back({request.get(), 0});
  }
  AssignTokens(selection, view.limits);
  return selection;
}

}  // namespace treadle
