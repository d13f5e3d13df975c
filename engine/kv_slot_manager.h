// Accountant of K/V slots on the host: who holds which pages of the cache.
//
// A slot holds K and V of one token in all layers of a stage. Slots come in pages, so nothing
// fragments, and pages are reference-counted, so that candidates of one request can share a prompt
// (and later a prefix cache can). The manager decides page ids; every stage obeys (ORCA
// section 4.2, which reserves max_tokens slots per request; pages as in vLLM's PagedAttention).
//
// Invariants: free + held == capacity; a page is free iff its count is 0; Reserve is
// all-or-nothing. Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace treadle {

struct KvCapacity {
  int64_t page_size = 0;
  int64_t total_pages = 0;
  int64_t free_pages = 0;
};

class KvSlotManager {
 public:
  KvSlotManager(int64_t total_pages, int64_t page_size);

  KvCapacity Capacity() const;
  int64_t PagesFor(int64_t tokens) const;  // ceil(tokens / page_size)

  // `count` pages with one reference each, or nullopt and no change.
  std::optional<std::vector<int32_t>> Reserve(int64_t count);
  // Adds a reference to each page; they must be held.
  void Share(std::span<const int32_t> pages);
  // Drops a reference of each page; those that reach 0 become free at once.
  void Release(std::span<const int32_t> pages);
  // All pages free again (a new epoch).
  void Reset();

 private:
  int64_t page_size_;
  std::vector<int32_t> references_;  // by page id
  std::vector<int32_t> free_;        // last in, first out: memory in use stays small
};

}  // namespace treadle
