// Accountant of K/V slots on the host: who holds which pages of the cache, and what pages hold that
// nobody does.
//
// A slot holds K and V of one token in all layers of a kind (kv_paging.h). Slots come in pages, so
// nothing fragments, and pages are reference-counted, so that candidates of one request can share a
// prompt and requests a prefix. The manager decides page ids; every stage obeys (ORCA section 4.2,
// which reserves max_tokens slots per request; pages as in vLLM's PagedAttention).
//
// The prefix cache. Pages whose rows are known are *kept*: found again by the ids of their tokens
// and all before them (prefix_index.h), by requests of the same salt. A kept page that nobody holds
// is idle: free, for whoever needs one, after the pages that hold nothing, least recently used
// first and the end of a sequence before its beginning. Held pages are never taken. Whole pages are
// shared; window pages, which a sequence overwrites, are copied, and kept until they are
// overwritten. Where that has happened and a prompt parts from a kept one, its own window pages are
// copied for those that come later: a branch (SGLang's radix cache does it for Mamba's states).
//
// The second tier (page_files.h), if there is one, gets every whole page that is kept of a sequence
// that is over and not there yet: a plan has the engine give the page's bytes. Until then the page
// is as free as others; one that is taken before is not stored.
//
// Invariants, for each kind: free + held == capacity, where idle pages are free; a page is free iff
// its count is 0; reserving is all-or-nothing. Thread safety: confined to the serving loop's
// thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/kv/kv_events.h"
#include "engine/kv/page_files.h"
#include "engine/kv/prefix_index.h"
#include "engine/plan/iteration_plan.h"
#include "engine/plan/kv_paging.h"

namespace treadle {

// The first tokens of a sequence, and who may have them from the cache: requests of one salt.
struct CachedPrefix {
  std::string_view salt;
  std::span<const int32_t> ids;
  uint64_t adapter = 0;  // theirs (SequenceStart::adapter), which the salt says, too
};

class KvSlotManager {
 public:
  using Prefix = CachedPrefix;
  // How much of a prefix is kept: that many tokens, whole pages.
  struct Found {
    int32_t tokens = 0;
    // The pages among these that sequences hold, and that a request shares from its admission on.
    // None where there are windows: their pages may be gone before it begins.
    PageCounts held;
  };

  // `most_idle`: idle pages at most; none of any kind: no prefix cache. `events`: told which blocks
  // are kept, by their pages of whole sequences if there are some, else by those of windows; null:
  // nobody is. `files`: the second tier, for pages of whole sequences without windows; null: none.
  KvSlotManager(const PageCounts& total_pages, const KvPaging& paging,
                const PageCounts& most_idle = {}, KvEventLog* events = nullptr,
                PageFiles* files = nullptr);
  // Pages of whole sequences only.
  KvSlotManager(int64_t total_pages, int64_t page_size)
      : KvSlotManager(PageCounts(total_pages), KvPaging{.page_size = page_size}) {}
  KvSlotManager(const KvSlotManager&) = delete;
  KvSlotManager& operator=(const KvSlotManager&) = delete;

  KvCapacity Capacity() const;

  // The tables of a request's candidates, as SequenceStart has them: of sequences that have
  // `prompt` tokens and grow to `tokens` positions, and begin at the prompt's last one but for the
  // first. The kept part of `prefix`, which ends before the prompt's last token, is shared. Nullopt
  // and no change if there are not as many pages as KvPaging::Needed says, less those that Find
  // says are held.
  std::optional<std::vector<SequencePages>> Admit(int64_t prompt, int64_t tokens,
                                                  int64_t candidates, const Prefix& prefix = {});
  // Drops a candidate's references.
  void Release(const SequencePages& pages);
  // Rows a candidate copies from the first, in the plan that starts it, once a plan has run the
  // prompt.
  void AddCopies(const SequencePages& first, const SequencePages& candidate, int64_t prompt,
                 IterationPlan& plan) const;

  // -- the prefix cache -----------------------------------------------------------------------
  Found Find(const Prefix& prefix) const;
  // Has an admitted request that has not begun share what is kept by now. Returns how many
  // positions its pages hold then, its window pages after AddPrefixCopies.
  int32_t ShareKept(const Prefix& prefix, std::span<SequencePages* const> candidates);
  // Copies of window pages to the first candidate's, before it begins after `prefix`, of which
  // ShareKept has just said that all is kept.
  void AddPrefixCopies(const Prefix& prefix, const SequencePages& first, IterationPlan& plan) const;
  // The branch of a prompt: the end of the whole pages that are kept of it (without such, of the
  // pages whose ids are known), if window pages for who begins there may be lost; else 0.
  int32_t BranchOf(const Prefix& prompt) const;
  // The window pages that are needed to go on at `position` may be kept beside what is held.
  bool HasRoomForCopies(int64_t position) const;
  // Copies of the window pages that a sequence needs to go on after `prefix`, made of a sequence's
  // own, which holds them; the cache keeps the copies. Returns these pages: none if it has others,
  // or there are not enough that are free.
  std::vector<int32_t> KeepCopies(const Prefix& prefix, const SequencePages& pages,
                                  IterationPlan& plan);
  // A plan with such copies was lost.
  void ForgetCopies(std::span<const int32_t> pages);
  // Plans that were submitted have a sequence write positions [first, end): what its window pages
  // held before is lost.
  void NoteWrites(const SequencePages& pages, int64_t first, int64_t end);
  // The positions that a sequence has written: from where it began to before `end`.
  struct Rows {
    int64_t begin = 0;
    int64_t end = 0;
  };
  // The sequence's pages hold these tokens once the plans that were submitted have run, in order.
  // Whole pages are kept.
  void Keep(const Prefix& prefix, const SequencePages& pages, const Rows& rows);
  // The same for a sequence that is over, and drops its references.
  void KeepAndRelease(const Prefix& prefix, const SequencePages& pages, const Rows& rows);
  // The pages do not hold what lies from `position` on, whatever Keep was told.
  void Forget(const SequencePages& pages, int64_t position);
  // No page holds anything.
  void ForgetAll() { index_.Clear(); }
  PageFiles* files() const { return files_; }
  bool has_stores() const { return !to_store_.empty(); }
  // Has the plan give pages for the second tier, at most kMaxStoredBytes of them. Returns their
  // names, in the plan's order.
  std::vector<PageName> AddStores(IterationPlan& plan);
  static constexpr int64_t kMaxStoredBytes = 16 << 20;
  // Gives those who follow the events a snapshot, if they want one.
  void TellWhatIsKept() const;
  int64_t idle_pages(PageKind kind) const { return pools_[kind].idle; }

  // -- single pages ---------------------------------------------------------------------------
  // `count` pages with one reference each, or nullopt and no change.
  std::optional<std::vector<int32_t>> Reserve(int64_t count, PageKind kind = PageKind::kWhole);
  // Adds a reference to each page; they must be held or kept.
  void Share(std::span<const int32_t> pages, PageKind kind = PageKind::kWhole);
  // Drops a reference of each page; those that reach 0 become free at once.
  void Release(std::span<const int32_t> pages, PageKind kind = PageKind::kWhole);
  // The references to a page that holds whole-context rows.
  int32_t references(int32_t page) const { return pools_[PageKind::kWhole].references[page]; }
  // All pages free again, and nothing kept.
  void Reset();

 private:
  // By page id, or lists of page ids.
  struct Pool {
    std::vector<int32_t> references;
    std::vector<int32_t> free;  // hold nothing; last in, first out: memory in use stays small
    std::vector<PrefixIndex::Node> nodes;  // kNone: the page is not kept
    // The idle pages, in the order of their last use.
    std::vector<int32_t> older, newer;  // -1: none
    int32_t oldest = -1, newest = -1;
    int64_t idle = 0;
  };

  void PushIdle(Pool& pool, int32_t page);
  void RemoveIdle(Pool& pool, int32_t page);
  void TakeOldest(PageKind kind);
  void OnForgotten(PageKind kind, int32_t page);
  void Name(PrefixIndex::Node node, PageKind kind, int32_t page);
  std::vector<PrefixIndex::Node> Usable(const Prefix& prefix) const;
  std::vector<PrefixIndex::Node> Uncopied(std::span<const PrefixIndex::Node> nodes) const;
  std::vector<PrefixIndex::Node> Attach(const Prefix& prefix, const SequencePages& pages,
                                        const Rows& rows, int64_t begin);

  KvBlockEvent EventOf(PrefixIndex::Node node) const;
  void NoteStores(const Prefix& prefix, std::span<const PrefixIndex::Node> nodes);

  const KvPaging paging_;
  const PageCounts most_idle_;
  KvEventLog* const events_;
  PageFiles* const files_;
  const PageKind told_;  // kind of pages that events are about
  ByKind<Pool> pools_;
  PrefixIndex index_;
  struct ToStore {
    uint64_t tag = 0;  // of its last slot
    PageName name;
  };
  std::map<int32_t, ToStore> to_store_;  // by page
};

}  // namespace treadle
