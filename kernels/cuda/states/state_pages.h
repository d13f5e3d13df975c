// Pages of states (kernels/state_layout.h) as kernels see them: the rows of a sequence, page by
// page.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/runtime/batch.h"
#include "kernels/cuda/runtime/simt.h"
#include "kernels/kv_view.h"

namespace treadle::cuda {

struct StatePages {
  float* pages = nullptr;  // this layer's
  int64_t stride = 0;      // of pages, in floats
  int32_t page_size = 0;
  DeviceBatch batch;

  StatePages(const KvView& kv, const DeviceBatch& on_device)
      : pages(reinterpret_cast<float*>(kv.pages)),
        stride(kv.layout.PageStride() / static_cast<int64_t>(sizeof(float))),
        page_size(static_cast<int32_t>(kv.layout.page_size)),
        batch(on_device) {}
};

// Rows of a sequence that lie in one page.
struct PageRows {
  int32_t row = 0;  // the first, of the batch
  int32_t rows = 0;
  int32_t slot = 0;  // of the first
  float* page = nullptr;
  const float* before = nullptr;  // the page before, if the rows begin theirs; null: position 0
};

// The rows in page `i` of those that the sequence has rows in; none if there are no more.
TREADLE_DEVICE PageRows RowsIn(const StatePages& p, int32_t sequence, int32_t i) {
  const DeviceSequence s = p.batch.sequences[sequence];
  const int32_t page = s.first_position / p.page_size + i;
  const int32_t begin = page * p.page_size, end = begin + p.page_size;
  const int32_t last = s.first_position + s.num_rows;
  const int32_t at = begin > s.first_position ? begin : s.first_position;
  PageRows found;
  if (at >= last) return found;
  const auto page_at = [&](int32_t index) {
    return p.pages + p.batch.pages[s.first_page + index] * p.stride;
  };
  found.row = s.first_row + at - s.first_position;
  found.rows = (end < last ? end : last) - at;
  found.slot = at - begin;
  found.page = page_at(page);
  if (found.slot == 0 && page > 0) found.before = page_at(page - 1);
  return found;
}

}  // namespace treadle::cuda
