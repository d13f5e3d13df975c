// Says which row each slot of a K/V cache holds, so that a stage can check at the point of use what
// others infer: that pages which outlived an epoch, or their process, hold the rows of these
// tokens.
//
// A row's bits depend on the ids of its sequence up to its own position and on nothing else
// (docs/design.md, N1 and N2). The tag of a slot is a 64-bit hash chain of these ids (NextTag,
// engine/plan/sequence_table.h); 0 is the tag of a slot that holds nothing to rely on. A tag is
// cleared before its row is written and set after the row is whole, so a process that is killed at
// any instruction leaves no tag that is not true. The tags lie where the cache lies and are lost
// with it.
//
// Thread safety: confined to the rank's thread after Create.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/kept_memory.h"
#include "engine/plan/kv_paging.h"
#include "kernels/buffer.h"
#include "kernels/kv_view.h"

namespace treadle {

class SlotTags {
 public:
  // `memory`: where the tags lie, after the cache; null: memory of their own. ResourceExhausted if
  // there is none.
  static absl::StatusOr<SlotTags> Create(const PageCounts& pages, int64_t page_size,
                                         KeptMemory* memory);

  // Positions [first, end) of a sequence with these tables of pages are about to be written.
  void Clear(const SequencePages& pages, int64_t first, int64_t end);
  // They are written: position first + i has tags[i].
  void Set(const SequencePages& pages, int64_t first, std::span<const uint64_t> tags);
  // The first position of first + [0, tags.size()) that the pages of a kind do not hold; nullopt:
  // they hold all, or the sequence has no pages of the kind.
  std::optional<int64_t> FirstMissing(PageKind kind, const SequencePages& pages, int64_t first,
                                      std::span<const uint64_t> tags) const;

  // The tags of a page's slots.
  std::span<uint64_t> Of(PageKind kind, int32_t page) const {
    return {PageOf(kind, page), static_cast<size_t>(page_size_)};
  }

  // The pages `to` of a kind are about to be overwritten, and hold what `from` hold.
  void ClearCopies(PageKind kind, std::span<const PageCopy> copies);
  void SetCopies(PageKind kind, std::span<const PageCopy> copies);

 private:
  explicit SlotTags(int64_t page_size) : page_size_(page_size) {}
  uint64_t* PageOf(PageKind kind, int32_t page) const {
    return reinterpret_cast<uint64_t*>(tags_[kind].data()) + page * page_size_;
  }
  // The tag of a position; null: the sequence has no pages of the kind.
  uint64_t* At(PageKind kind, const SequencePages& pages, int64_t position) const;

  int64_t page_size_;
  ByKind<Buffer> tags_;  // [pages][page_size]
};

}  // namespace treadle
