// The bytes of the K/V cache of one rank: its layers, its K/V heads. It knows pages, not requests
// (KvSlotManager does).
//
// One allocation, [kinds][pages][layers of the kind], made once. The backend fills it with zeros
// lazily, so a page that was never written costs no memory. A page is in one piece over all layers:
// the system gives memory at the first write, 2 MiB at a time where it can, and that takes so long
// (up to 5 ms in a virtual machine) that an iteration should not come upon a new piece in every
// layer at once. Pages are not cleared on reuse:
// attention never reads past what a sequence wrote. Tags beside the bytes say which row each slot
// holds.
//
// Thread safety: confined to the rank's thread after Create.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/kept_memory.h"
#include "engine/kv/slot_tags.h"
#include "engine/plan/defaults.h"
#include "engine/plan/kv_paging.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

// How an error begins that says that a device has not the memory; where it comes from a worker, the
// worker's name stands before it.
inline constexpr char kNoKvMemory[] = "no memory for a K/V cache of ";

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
  // out of range; ResourceExhausted, with kNoKvMemory and the bytes, if the device has not that
  // much memory. `backend` must outlive the cache.
  static absl::StatusOr<KvCache> Create(Backend& backend, const Model& model,
                                        const Options& options);

  // Valid as long as the cache is.
  KvPages pages() const {
    return {layouts_[PageKind::kWhole], layers_, layouts_[PageKind::kWindow]};
  }
  const KvLayout& layout() const { return layouts_[PageKind::kWhole]; }
  const PageCounts& num_pages() const { return num_pages_; }

  SlotTags& tags() { return tags_; }

  // The bytes of a whole page in all layers of its kind. For a cache in the host's memory.
  int64_t whole_page_bytes() const { return layouts_[PageKind::kWhole].PageStride(); }
  // Empty if the row of its last slot has another tag, or some slot holds nothing to rely on.
  std::vector<std::byte> ReadWholePage(int32_t page, uint64_t last_tag) const;
  // `bytes`: [whole_page_bytes()]; `tags`: of the page's slots from then on.
  void WriteWholePage(int32_t page, std::span<const std::byte> bytes,
                      std::span<const uint64_t> tags);

  // Copies pages, in all layers of their kind, in order, and their tags. Page ids are in range (the
  // plan was checked).
  void CopyPages(const ByKind<std::vector<PageCopy>>& copies);

 private:
  explicit KvCache(SlotTags tags) : tags_(std::move(tags)) {}

  Backend* backend_ = nullptr;
  PageCounts num_pages_;
  ByKind<KvLayout> layouts_;
  Buffer memory_;
  SlotTags tags_;
  ByKind<std::byte*> first_;  // the first page of a kind, in memory_
  // The first page's part of each layer; of one without K/V of its own, the layer's that it reads.
  std::vector<std::byte*> layers_;
  std::vector<std::pair<PageKind, std::byte*>> own_;  // of layers_, those with pages of their own
};

}  // namespace treadle
