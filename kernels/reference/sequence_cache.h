// One sequence's K and V in the host's memory by position: through its page table, in the layout's
// key order.
//
// Keeps references to what it is made of. Thread safety: as the pages.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/kv_view.h"

namespace treadle {

class SequenceCache {
 public:
  SequenceCache(const KvView& kv, const SequenceSpan& span) : kv_(kv), span_(span) {}

  double Key(int64_t position, int64_t head, int64_t i) const {
    return LoadElement(kv_.layout.dtype, Page(position),
                       kv_.layout.KeyElement(head, Slot(position), i));
  }
  double Value(int64_t position, int64_t head, int64_t i) const {
    return LoadElement(kv_.layout.dtype, Page(position),
                       kv_.layout.ValueElement(head, Slot(position), i));
  }
  void Store(int64_t position, int64_t head, int64_t i, float key, float value) const {
    const KvLayout& layout = kv_.layout;
    std::byte* const page = Page(position);
    StoreElement(layout.dtype, key, page, layout.KeyElement(head, Slot(position), i));
    StoreElement(layout.dtype, value, page, layout.ValueElement(head, Slot(position), i));
  }

 private:
  int64_t Slot(int64_t position) const { return position % kv_.layout.page_size; }
  std::byte* Page(int64_t position) const {
    const int32_t page = span_.pages[position / kv_.layout.page_size];
    TREADLE_CHECK(page >= 0 && page < kv_.layout.num_pages);
    return kv_.pages + page * kv_.layout.PageBytes();
  }

  const KvView& kv_;
  const SequenceSpan& span_;
};

}  // namespace treadle
