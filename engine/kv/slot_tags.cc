#include "engine/kv/slot_tags.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "base/status.h"

namespace treadle {

absl::StatusOr<SlotTags> SlotTags::Create(const PageCounts& pages, int64_t page_size,
                                          KeptMemory* memory) {
  SlotTags tags(page_size);
  for (const PageKind kind : kPageKinds) {
    if (pages[kind] == 0) continue;
    const size_t bytes = static_cast<size_t>(pages[kind] * page_size) * sizeof(uint64_t);
    if (memory != nullptr) {
      TREADLE_ASSIGN_OR_RETURN(tags.tags_[kind], memory->Take(bytes));
      continue;
    }
    tags.tags_[kind] = Buffer(std::calloc(bytes, 1), bytes, std::free);
    if (tags.tags_[kind].data() == nullptr) {
      return ResourceExhausted("no memory for the tags of ", pages[kind], " pages: ", bytes,
                               " bytes");
    }
  }
  return tags;
}

uint64_t* SlotTags::At(PageKind kind, const SequencePages& pages, int64_t position) const {
  const std::vector<int32_t>& table = pages[kind];
  const auto index = static_cast<size_t>(position / page_size_);
  return index < table.size() ? PageOf(kind, table[index]) + position % page_size_ : nullptr;
}

// The fences keep the compiler from moving tags across what they speak of: a successor sees the
// stores of a killed process in the order of its instructions.
void SlotTags::Clear(const SequencePages& pages, int64_t first, int64_t end) {
  for (const PageKind kind : kPageKinds) {
    for (int64_t position = first; position < end; ++position) {
      if (uint64_t* const tag = At(kind, pages, position)) *tag = 0;
    }
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SlotTags::Set(const SequencePages& pages, int64_t first, std::span<const uint64_t> tags) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const PageKind kind : kPageKinds) {
    for (size_t i = 0; i < tags.size(); ++i) {
      if (uint64_t* const tag = At(kind, pages, first + static_cast<int64_t>(i))) *tag = tags[i];
    }
  }
}

std::optional<int64_t> SlotTags::FirstMissing(PageKind kind, const SequencePages& pages,
                                              int64_t first, std::span<const uint64_t> tags) const {
  if (pages[kind].empty()) return std::nullopt;
  for (size_t i = 0; i < tags.size(); ++i) {
    const int64_t position = first + static_cast<int64_t>(i);
    const uint64_t* const tag = At(kind, pages, position);
    if (tag == nullptr || *tag != tags[i]) return position;
  }
  return std::nullopt;
}

void SlotTags::ClearCopies(PageKind kind, std::span<const PageCopy> copies) {
  for (const PageCopy& copy : copies) std::fill_n(PageOf(kind, copy.to), page_size_, 0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SlotTags::SetCopies(PageKind kind, std::span<const PageCopy> copies) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const PageCopy& copy : copies) {
    std::copy_n(PageOf(kind, copy.from), page_size_, PageOf(kind, copy.to));
  }
}

}  // namespace treadle
