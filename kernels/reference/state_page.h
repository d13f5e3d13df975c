// One sequence's state pages in the host's memory, by position.
//
// Keeps references to what it is made of. Thread safety: as the pages.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/kv_view.h"

namespace treadle {

class StatePages {
 public:
  StatePages(const KvView& kv, const SequenceSpan& span) : kv_(kv), span_(span) {}

  const StateLayout& layout() const { return kv_.layout.state; }
  int64_t page_size() const { return kv_.layout.page_size; }
  // The page that holds a position.
  float* Page(int64_t position) const {
    const int32_t page = span_.pages[position / page_size()];
    TREADLE_CHECK(page >= 0 && page < kv_.layout.num_pages);
    return reinterpret_cast<float*>(kv_.pages + page * kv_.layout.PageStride());
  }
  // Input `i` of a page: the i-th of the taps - 1 before it and of its own.
  float* Input(int64_t position, int64_t i) const { return Page(position) + i * layout().channels; }
  float* Key(int64_t position, int64_t head) const {
    const int64_t at = position % page_size() * layout().key_heads + head;
    return Page(position) + layout().Keys(page_size()) + at * layout().key_dim;
  }
  float* Change(int64_t position, int64_t head) const {
    const int64_t at = position % page_size() * layout().heads + head;
    return Page(position) + layout().Changes(page_size()) + at * layout().value_dim;
  }
  float& Decay(int64_t position, int64_t head) const {
    const int64_t at = position % page_size() * layout().heads + head;
    return Page(position)[layout().Decays(page_size()) + at];
  }
  // [key_dim, value_dim], before the page of the position.
  float* State(int64_t position, int64_t head) const {
    const int64_t floats = layout().key_dim * layout().value_dim;
    return Page(position) + layout().State(page_size()) + head * floats;
  }

 private:
  const KvView& kv_;
  const SequenceSpan& span_;
};

}  // namespace treadle
