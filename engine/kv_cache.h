// The bytes of the K/V cache of one rank: its layers, its K/V heads. It knows pages, not requests
// (KvSlotManager does).
//
// One allocation, [layers][pages of the layer's kind][page], made once. The backend fills it with
// zeros lazily, so a page that was never written costs no memory. Pages are not cleared on reuse:
// attention never reads past what a sequence wrote.
//
// Thread safety: confined to the rank's thread after Create.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/defaults.h"
#include "engine/kept_memory.h"
#include "engine/kv_paging.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

class KvCache {
 public:
  struct Options {
    int64_t page_size = kDefaultPageSize;  // slots: a power of two, at least 16
    PageCounts num_pages;
    DType dtype = DType::kF16;  // kF16 or kF32
    // Where its bytes lie, which may be there already; null: the backend's memory. On the host.
    KeptMemory* memory = nullptr;
  };

  // For the layers and K/V heads that this model holds. InvalidArgument names the option that is
  // out of range; ResourceExhausted if the device has not that much memory. `backend` must outlive
  // the cache.
  static absl::StatusOr<KvCache> Create(Backend& backend, const Model& model,
                                        const Options& options);

  // Valid as long as the cache is.
  KvPages pages() const { return {layout_, layers_, num_pages_.window}; }
  const KvLayout& layout() const { return layout_; }  // of whole pages
  const PageCounts& num_pages() const { return num_pages_; }

  // Copies pages, in all layers of their kind, in order. Page ids are in range (the plan was
  // checked).
  void CopyPages(const ByKind<std::vector<PageCopy>>& copies);

 private:
  KvCache() = default;

  Backend* backend_ = nullptr;
  PageCounts num_pages_;
  KvLayout layout_;
  Buffer memory_;
  std::vector<std::byte*> layers_;  // into memory_
  std::vector<PageKind> kinds_;     // of layers_
};

}  // namespace treadle
