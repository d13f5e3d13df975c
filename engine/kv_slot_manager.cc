#include "engine/kv_slot_manager.h"

#include <algorithm>
#include <numeric>

#include "base/status.h"

namespace treadle {

KvSlotManager::KvSlotManager(const PageCounts& total_pages, const KvPaging& paging)
    : paging_(paging) {
  TREADLE_CHECK(paging.page_size > 0);
  for (const PageKind kind : kPageKinds) {
    TREADLE_CHECK(total_pages[kind] >= 0 && total_pages[kind] <= INT32_MAX);
    pools_[kind].references.resize(static_cast<size_t>(total_pages[kind]));
    pools_[kind].free.reserve(pools_[kind].references.size());
  }
  Reset();
}

KvCapacity KvSlotManager::Capacity() const {
  const auto& [whole, window] = pools_;
  return {.paging = paging_,
          .total_pages = {std::ssize(whole.references), std::ssize(window.references)},
          .free_pages = {std::ssize(whole.free), std::ssize(window.free)}};
}

std::optional<std::vector<SequencePages>> KvSlotManager::Admit(int64_t prompt, int64_t tokens,
                                                               int64_t candidates) {
  if (!paging_.Needed(prompt, tokens, candidates).FitsIn(Capacity().free_pages)) {
    return std::nullopt;
  }
  std::vector<SequencePages> all(static_cast<size_t>(candidates));
  for (const PageKind kind : kPageKinds) {
    const auto [total, held, shared] = paging_.ShareOf(kind, prompt, tokens);
    const std::vector<int32_t> common = *Reserve(shared, kind);
    for (SequencePages& pages : all) {
      if (&pages != &all[0]) Share(common, kind);
      const std::vector<int32_t> own = *Reserve(held - shared, kind);
      std::vector<int32_t>& table = pages[kind];
      table.resize(static_cast<size_t>(total));
      std::ranges::copy(own, std::ranges::copy(common, table.end() - held).out);
      for (int64_t i = total - held; i-- > 0;) table[i] = table[i + held];
    }
  }
  return all;
}

void KvSlotManager::Release(const SequencePages& pages) {
  Release(pages.whole);
  const std::span<const int32_t> window = pages.window;
  const auto held = std::min(window.size(), static_cast<size_t>(paging_.ring));
  Release(window.last(held), PageKind::kWindow);
}

void KvSlotManager::AddCopies(const SequencePages& first, const SequencePages& candidate,
                              int64_t prompt, IterationPlan& plan) const {
  const int64_t last = (prompt - 1) / paging_.page_size;  // which the candidate writes first
  for (const PageKind kind : kPageKinds) {
    const std::vector<int32_t>&from = first[kind], &to = candidate[kind];
    if (from.empty()) continue;
    const int64_t held = kind == PageKind::kWhole ? last + 1 : paging_.ring;
    // Whether that has earlier positions too: its own, or those of a page that lay there before.
    const bool earlier = (prompt - 1) % paging_.page_size != 0 || last >= held;
    for (int64_t i = std::max<int64_t>(0, last + 1 - held); i < last + (earlier ? 1 : 0); ++i) {
      if (from[i] != to[i]) plan.page_copies[kind].push_back({from[i], to[i]});
    }
  }
}

std::optional<std::vector<int32_t>> KvSlotManager::Reserve(int64_t count, PageKind kind) {
  auto& [references, free] = pools_[kind];
  TREADLE_CHECK(count >= 0);
  if (count > std::ssize(free)) return std::nullopt;
  std::vector<int32_t> pages(free.rbegin(), free.rbegin() + count);
  free.resize(free.size() - static_cast<size_t>(count));
  for (const int32_t page : pages) references[page] = 1;
  return pages;
}

void KvSlotManager::Share(std::span<const int32_t> pages, PageKind kind) {
  std::vector<int32_t>& references = pools_[kind].references;
  for (const int32_t page : pages) {
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < references.size());
    TREADLE_CHECK(references[page] > 0);
    ++references[page];
  }
}

void KvSlotManager::Release(std::span<const int32_t> pages, PageKind kind) {
  auto& [references, free] = pools_[kind];
  // Backwards, so that a later reservation of as many gets them in the same order.
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < references.size());
    TREADLE_CHECK(references[page] > 0);
    if (--references[page] == 0) free.push_back(page);
  }
}

void KvSlotManager::Reset() {
  for (const PageKind kind : kPageKinds) {
    auto& [references, free] = pools_[kind];
    references.assign(references.size(), 0);
    free.resize(references.size());
    std::iota(free.rbegin(), free.rend(), 0);  // page 0 is on top
  }
}

}  // namespace treadle
