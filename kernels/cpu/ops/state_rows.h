// A span's rows, page by page of a layer that keeps a state.
//
// Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kv_view.h"

namespace treadle {

// Rows of a span that lie in one page.
struct PageRows {
  int64_t row;  // the first, of the batch
  int64_t rows;
  int64_t slot;  // of the first
  float* page;
  float* before;  // the page before it, if the rows begin theirs; null: position 0
};

// How many pages the span has rows in.
inline int64_t PagesOf(const KvView& kv, const SequenceSpan& span) {
  const int64_t size = kv.layout.page_size, first = span.first_position;
  return span.num_rows == 0 ? 0 : (first + span.num_rows - 1) / size - first / size + 1;
}

// The rows in page `i` of these.
inline PageRows RowsIn(const KvView& kv, const SequenceSpan& span, int64_t i) {
  const int64_t size = kv.layout.page_size, first = span.first_position;
  const auto page_at = [&](int64_t page) {
    return reinterpret_cast<float*>(kv.pages + span.pages[page] * kv.layout.PageStride());
  };
  const int64_t page = first / size + i, at = std::max(first, page * size), slot = at % size;
  return {span.first_row + at - first, std::min((page + 1) * size, first + span.num_rows) - at,
          slot, page_at(page), slot == 0 && page > 0 ? page_at(page - 1) : nullptr};
}

}  // namespace treadle
