#include "engine/kv_slot_manager.h"

#include <numeric>

#include "base/status.h"

namespace treadle {

KvSlotManager::KvSlotManager(int64_t total_pages, int64_t page_size)
    : page_size_(page_size), references_(static_cast<size_t>(total_pages)) {
  TREADLE_CHECK(page_size > 0 && total_pages >= 0 && total_pages <= INT32_MAX);
  free_.reserve(references_.size());
  Reset();
}

KvCapacity KvSlotManager::Capacity() const {
  return {.page_size = page_size_,
          .total_pages = static_cast<int64_t>(references_.size()),
          .free_pages = static_cast<int64_t>(free_.size())};
}

int64_t KvSlotManager::PagesFor(int64_t tokens) const {
  TREADLE_CHECK(tokens >= 0);
  return (tokens + page_size_ - 1) / page_size_;
}

std::optional<std::vector<int32_t>> KvSlotManager::Reserve(int64_t count) {
  TREADLE_CHECK(count >= 0);
  if (count > static_cast<int64_t>(free_.size())) return std::nullopt;
  std::vector<int32_t> pages(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - static_cast<size_t>(count));
  for (const int32_t page : pages) references_[page] = 1;
  return pages;
}

void KvSlotManager::Share(std::span<const int32_t> pages) {
  for (const int32_t page : pages) {
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < references_.size());
    TREADLE_CHECK(references_[page] > 0);
    ++references_[page];
  }
}

void KvSlotManager::Release(std::span<const int32_t> pages) {
  // Backwards, so that a later reservation of as many gets them in the same order.
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < references_.size());
    TREADLE_CHECK(references_[page] > 0);
    if (--references_[page] == 0) free_.push_back(page);
  }
}

void KvSlotManager::Reset() {
  references_.assign(references_.size(), 0);
  free_.resize(references_.size());
  std::iota(free_.rbegin(), free_.rend(), 0);  // page 0 is on top
}

}  // namespace treadle
