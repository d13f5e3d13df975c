// Accountant of K/V slots on the host: who holds which pages of the cache.
//
// A slot holds K and V of one token in all layers of a kind (kv_paging.h). Slots come in pages, so
// nothing fragments, and pages are reference-counted, so that candidates of one request can share a
// prompt (and later a prefix cache can). The manager decides page ids; every stage obeys (ORCA
// section 4.2, which reserves max_tokens slots per request; pages as in vLLM's PagedAttention).
//
// Invariants, for each kind: free + held == capacity; a page is free iff its count is 0; reserving
// is all-or-nothing. Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/iteration_plan.h"
#include "engine/kv_paging.h"

namespace treadle {

class KvSlotManager {
 public:
  KvSlotManager(const PageCounts& total_pages, const KvPaging& paging);
  // Pages of whole sequences only.
  KvSlotManager(int64_t total_pages, int64_t page_size)
      : KvSlotManager(PageCounts(total_pages), KvPaging{.page_size = page_size}) {}

  KvCapacity Capacity() const;

  // The tables of a request's candidates, as SequenceStart has them: of sequences that have
  // `prompt` tokens and grow to `tokens` positions, and begin at the prompt's last one but for the
  // first. Nullopt and no change if there are not as many pages as KvPaging::Needed says.
  std::optional<std::vector<SequencePages>> Admit(int64_t prompt, int64_t tokens,
                                                  int64_t candidates);
  // Drops a candidate's references.
  void Release(const SequencePages& pages);
  // What a candidate copies from the first, in the plan that starts it, once a plan has run the
  // prompt.
  void AddCopies(const SequencePages& first, const SequencePages& candidate, int64_t prompt,
                 IterationPlan& plan) const;

  // `count` pages with one reference each, or nullopt and no change.
  std::optional<std::vector<int32_t>> Reserve(int64_t count, PageKind kind = PageKind::kWhole);
  // Adds a reference to each page; they must be held.
  void Share(std::span<const int32_t> pages, PageKind kind = PageKind::kWhole);
  // Drops a reference of each page; those that reach 0 become free at once.
  void Release(std::span<const int32_t> pages, PageKind kind = PageKind::kWhole);
  // All pages free again (a new epoch).
  void Reset();

 private:
  struct Pool {
    std::vector<int32_t> references;  // by page id
    std::vector<int32_t> free;        // last in, first out: memory in use stays small
  };

  KvPaging paging_;
  ByKind<Pool> pools_;
};

}  // namespace treadle
