// One sequence's K and V in the host's memory by position: through its page table, in the layout's
// key order.
//
// Keeps references to what it is made of. Thread safety: as the pages.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/kv_elements.h"

namespace treadle {

class SequenceCache {
 public:
  SequenceCache(const KvView& kv, const SequenceSpan& span) : kv_(kv), span_(span) {}

  double Key(int64_t position, int64_t head, int64_t i) const {
    return Row(position, KvPart::kKey, head).Load(i);
  }
  double Value(int64_t position, int64_t head, int64_t i) const {
    return Row(position, KvPart::kValue, head).Load(i);
  }
  // key, value: [head_dim]; where V is a part of K, `value` is not read.
  void Store(int64_t position, int64_t head, const float* key, const float* value) const {
    Row(position, KvPart::kKey, head).Store(key);
    if (kv_.layout.latent_dim == 0) Row(position, KvPart::kValue, head).Store(value);
  }

 private:
  KvRow Row(int64_t position, KvPart part, int64_t head) const {
    return {kv_.layout, Page(position), part, head, position % kv_.layout.page_size};
  }
  std::byte* Page(int64_t position) const {
    const int32_t page = span_.pages[position / kv_.layout.page_size];
    TREADLE_CHECK(page >= 0 && page < kv_.layout.num_pages);
    return kv_.pages + page * kv_.layout.PageStride();
  }

  const KvView& kv_;
  const SequenceSpan& span_;
};

}  // namespace treadle
