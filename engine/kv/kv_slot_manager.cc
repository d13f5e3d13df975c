#include "engine/kv/kv_slot_manager.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/plan/sequence_table.h"

namespace treadle {
namespace {

std::string RandomSecret() {
  std::random_device device;
  std::string secret;
  while (secret.size() < 32) secret.push_back(static_cast<char>(device()));
  return secret;
}

}  // namespace

KvSlotManager::KvSlotManager(const PageCounts& total_pages, const KvPaging& paging,
                             const PageCounts& most_idle, KvEventLog* events, PageFiles* files)
    : paging_(paging),
      most_idle_(most_idle),
      events_(events),
      files_(files),
      told_(paging.whole ? PageKind::kWhole : PageKind::kWindow),
      index_(
          paging.page_size, [this](PageKind kind, int32_t page) { OnForgotten(kind, page); },
          events == nullptr ? "" : RandomSecret()) {
  TREADLE_CHECK(paging.page_size > 0);
  TREADLE_CHECK(files == nullptr || (paging.ring == 0 && files->page_size() == paging.page_size));
  for (const PageKind kind : kPageKinds) {
    TREADLE_CHECK(total_pages[kind] >= 0 && total_pages[kind] <= INT32_MAX);
    pools_[kind].references.resize(static_cast<size_t>(total_pages[kind]));
    pools_[kind].free.reserve(pools_[kind].references.size());
  }
  Reset();
}

KvCapacity KvSlotManager::Capacity() const {
  KvCapacity capacity{.paging = paging_, .total_pages = {}, .free_pages = {}};
  for (const PageKind kind : kPageKinds) {
    capacity.total_pages[kind] = std::ssize(pools_[kind].references);
    capacity.free_pages[kind] = std::ssize(pools_[kind].free) + pools_[kind].idle;
  }
  return capacity;
}

std::optional<std::vector<SequencePages>> KvSlotManager::Admit(int64_t prompt, int64_t tokens,
                                                               int64_t candidates,
                                                               const Prefix& prefix) {
  PageCounts needed = paging_.Needed(prompt, tokens, candidates);
  needed -= Find(prefix).held;
  if (!needed.FitsIn(Capacity().free_pages)) return std::nullopt;
  std::vector<SequencePages> all(static_cast<size_t>(candidates));
  for (const PageKind kind : kPageKinds) {
    const auto [total, held, shared] = paging_.ShareOf(kind, prompt, tokens);
    std::vector<int32_t> common;
    if (kind == PageKind::kWhole && paging_.ring == 0) {
      for (const PrefixIndex::Node node : Usable(prefix)) {
        common.push_back(index_.PageOf(node, kind));
      }
      TREADLE_CHECK(std::ssize(common) <= shared);
      Share(common, kind);  // before anything takes them
    }
    const std::vector<int32_t> rest = *Reserve(shared - std::ssize(common), kind);
    common.insert(common.end(), rest.begin(), rest.end());
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
  Release(pages[PageKind::kWhole]);
  const std::span<const int32_t> window = pages[PageKind::kWindow];
  const auto held = std::min(window.size(), static_cast<size_t>(paging_.ring));
  Release(window.last(held), PageKind::kWindow);
}

void KvSlotManager::AddCopies(const SequencePages& first, const SequencePages& candidate,
                              int64_t prompt, IterationPlan& plan) const {
  const int64_t last = (prompt - 1) / paging_.page_size;  // which the candidate writes first
  for (const PageKind kind : kPageKinds) {
    const std::vector<int32_t>&from = first[kind], &to = candidate[kind];
    if (from.empty()) continue;
    const bool whole = kind == PageKind::kWhole;
    const int64_t held = whole ? last + 1 : paging_.ring;
    const int64_t seen = whole ? 0 : paging_.FirstSeen(prompt - 1);
    for (int64_t i = std::max<int64_t>(0, last + 1 - held); i <= last; ++i) {
      // The last page holds its own positions, and after them those of a page that lay there.
      const bool needed =
          i < last ? i >= seen
                   : (prompt - 1) % paging_.page_size != 0 || (last >= held && last - held >= seen);
      if (needed && from[i] != to[i]) plan.page_copies[kind].push_back({from[i], to[i]});
    }
  }
}

// The first nodes of what is kept of a prefix: as many as a sequence can go on after, which needs
// their whole pages, and the window pages of the positions that its next row sees.
std::vector<PrefixIndex::Node> KvSlotManager::Usable(const Prefix& prefix) const {
  std::vector<PrefixIndex::Node> path = index_.Find(prefix.salt, prefix.ids);
  const int64_t page_size = paging_.page_size;
  size_t usable = 0;
  int64_t windows = 0;  // without a gap, up to here
  for (size_t i = 0; i < path.size(); ++i) {
    if (paging_.whole && index_.PageOf(path[i], PageKind::kWhole) < 0) break;
    windows = index_.PageOf(path[i], PageKind::kWindow) < 0 ? 0 : windows + 1;
    const auto pages = static_cast<int64_t>(i) + 1;
    const int64_t seen = paging_.ring == 0 ? 0 : pages - paging_.FirstSeen(pages * page_size);
    if (windows >= seen) usable = i + 1;
  }
  path.resize(usable);
  return path;
}

KvSlotManager::Found KvSlotManager::Find(const Prefix& prefix) const {
  const std::vector<PrefixIndex::Node> nodes = Usable(prefix);
  Found found{.tokens = static_cast<int32_t>(std::ssize(nodes) * paging_.page_size), .held = {}};
  if (paging_.ring > 0) return found;
  // Behind an idle page a held one may be forgotten with it.
  for (const PrefixIndex::Node node : nodes) {
    if (references(index_.PageOf(node, PageKind::kWhole)) == 0) break;
    ++found.held[PageKind::kWhole];
  }
  return found;
}

int32_t KvSlotManager::ShareKept(const Prefix& prefix, std::span<SequencePages* const> candidates) {
  const std::vector<PrefixIndex::Node> nodes = Usable(prefix);
  for (size_t i = 0; paging_.whole && i < nodes.size(); ++i) {
    const int32_t kept = index_.PageOf(nodes[i], PageKind::kWhole);
    for (SequencePages* const pages : candidates) {
      int32_t& page = (*pages)[PageKind::kWhole][i];
      if (page == kept) continue;
      Share(std::span(&kept, 1));
      Release(std::span(&page, 1));
      page = kept;
    }
  }
  return static_cast<int32_t>(std::ssize(nodes) * paging_.page_size);
}

void KvSlotManager::AddPrefixCopies(const Prefix& prefix, const SequencePages& first,
                                    IterationPlan& plan) const {
  if (paging_.ring == 0) return;
  const std::vector<PrefixIndex::Node> nodes = index_.Find(prefix.salt, prefix.ids);
  const int64_t seen = paging_.FirstSeen(std::ssize(nodes) * paging_.page_size);
  for (int64_t i = seen; i < std::ssize(nodes); ++i) {
    const int32_t kept = index_.PageOf(nodes[i], PageKind::kWindow);
    const int32_t own = first[PageKind::kWindow][i];
    if (kept != own) plan.page_copies[PageKind::kWindow].push_back({kept, own});
  }
}

void KvSlotManager::NoteWrites(const SequencePages& pages, int64_t first, int64_t end) {
  const std::vector<int32_t>& table = pages[PageKind::kWindow];
  if (table.empty()) return;
  for (int64_t i = first / paging_.page_size; i * paging_.page_size < end; ++i) {
    const PrefixIndex::Node node = pools_[PageKind::kWindow].nodes[table[i]];
    if (node != PrefixIndex::kNone && index_.IndexOf(node) != i) {
      index_.Forget(node, PageKind::kWindow);
    }
  }
}

// Has the nodes of a prefix from page `begin` on, before which all is kept, name the sequence's
// pages where they name none. Returns these nodes.
std::vector<PrefixIndex::Node> KvSlotManager::Attach(const Prefix& prefix,
                                                     const SequencePages& pages, const Rows& rows,
                                                     int64_t begin) {
  if (most_idle_ == PageCounts()) return {};
  // Without whole pages there are more nodes than pages.
  const int64_t most_nodes = 4 * (std::ssize(pools_[PageKind::kWhole].references) +
                                  std::ssize(pools_[PageKind::kWindow].references));
  while (index_.nodes() > most_nodes && pools_[PageKind::kWindow].idle > 0) {
    TakeOldest(PageKind::kWindow);
  }
  if (index_.nodes() > most_nodes) return {};
  const PrefixIndex::Node before =
      begin == 0 ? PrefixIndex::kNone
                 : pools_[PageKind::kWhole].nodes[pages[PageKind::kWhole][begin - 1]];
  const std::vector<PrefixIndex::Node> nodes = index_.Add(
      prefix.salt, prefix.ids.subspan(static_cast<size_t>(begin * paging_.page_size)), before);
  for (const PageKind kind : kPageKinds) {
    if (pages[kind].empty()) continue;
    int64_t first = begin;
    if (kind == PageKind::kWindow) {  // of a ring, page i lies where page i + ring is written
      const int64_t end = (rows.end - 1) / paging_.page_size + 1;
      first = std::max({first, paging_.FirstSeen(rows.begin), end - paging_.ring});
    }
    for (int64_t i = first; i < begin + std::ssize(nodes); ++i) {
      const int32_t page = pages[kind][i];
      const PrefixIndex::Node node = nodes[static_cast<size_t>(i - begin)];
      const bool named = pools_[kind].nodes[page] != PrefixIndex::kNone;
      if (index_.PageOf(node, kind) < 0 && !named) Name(node, kind, page);
    }
  }
  return nodes;
}

void KvSlotManager::Name(PrefixIndex::Node node, PageKind kind, int32_t page) {
  index_.SetPage(node, kind, page);
  pools_[kind].nodes[page] = node;
  if (events_ != nullptr && kind == told_) events_->Change(EventOf(node));
}

void KvSlotManager::Keep(const Prefix& prefix, const SequencePages& pages, const Rows& rows) {
  // Pages that an earlier plan has kept need no second look.
  const std::vector<int32_t>& whole = pages[PageKind::kWhole];
  int64_t begin = whole.empty() ? 0 : std::ssize(prefix.ids) / paging_.page_size;
  while (begin > 0 && pools_[PageKind::kWhole].nodes[whole[begin - 1]] == PrefixIndex::kNone) {
    --begin;
  }
  Attach(prefix, pages, rows, begin);
}

void KvSlotManager::KeepAndRelease(const Prefix& prefix, const SequencePages& pages,
                                   const Rows& rows) {
  const std::vector<PrefixIndex::Node> nodes = Attach(prefix, pages, rows, 0);
  if (files_ != nullptr) NoteStores(prefix, nodes);
  Release(pages);
  // Kept pages that it computed once more, in pages of its own, have been used, too.
  for (size_t i = nodes.size(); i-- > 0;) {
    for (const PageKind kind : kPageKinds) {
      const int32_t page = index_.PageOf(nodes[i], kind);
      if (page < 0) continue;
      Share(std::span(&page, 1), kind);
      Release(std::span(&page, 1), kind);
    }
  }
}

// The beginning of a sequence is used after its end.
void KvSlotManager::NoteStores(const Prefix& prefix, std::span<const PrefixIndex::Node> nodes) {
  const auto page_size = static_cast<size_t>(paging_.page_size);
  std::vector<PageName> names =
      files_->NamesOf(prefix.salt, prefix.ids.first(nodes.size() * page_size));
  std::vector<uint64_t> tags;
  uint64_t tag = prefix.adapter;
  for (const PageName& name : names) {
    for (const int32_t id : name.ids) tag = NextTag(tag, id);
    tags.push_back(tag);
  }
  for (size_t i = nodes.size(); i-- > 0;) {
    const int32_t page = index_.PageOf(nodes[i], PageKind::kWhole);
    if (files_->Use(names[i].key) || page < 0) continue;
    to_store_[page] = {tags[i], std::move(names[i])};
  }
}

// Nothing waits for a queue that is full.
std::vector<PageName> KvSlotManager::AddStores(IterationPlan& plan) {
  std::vector<PageName> names;
  if (to_store_.empty()) return names;
  if (!files_->HasRoom()) {
    files_->NoteDropped(std::ssize(to_store_));
    to_store_.clear();
  }
  const int64_t most = std::max<int64_t>(1, kMaxStoredBytes / files_->page_bytes());
  while (!to_store_.empty() && std::ssize(names) < most) {
    auto& [page, store] = *to_store_.begin();
    plan.page_stores.push_back({page, store.tag});
    names.push_back(std::move(store.name));
    to_store_.erase(to_store_.begin());
  }
  return names;
}

void KvSlotManager::Forget(const SequencePages& pages, int64_t position) {
  const int64_t first = position / paging_.page_size;
  for (const PageKind kind : kPageKinds) {
    for (int64_t i = first; i < std::ssize(pages[kind]); ++i) {
      const PrefixIndex::Node node = pools_[kind].nodes[pages[kind][i]];
      if (node != PrefixIndex::kNone && index_.IndexOf(node) >= first) index_.Forget(node, kind);
    }
  }
}

KvBlockEvent KvSlotManager::EventOf(PrefixIndex::Node node) const {
  const std::span<const int32_t> ids = index_.IdsOf(node);
  return {.hash = index_.HashOf(node),
          .parent = index_.HashOf(index_.ParentOf(node)),
          .ids = {ids.begin(), ids.end()}};
}

void KvSlotManager::TellWhatIsKept() const {
  if (events_ == nullptr || !events_->wanted()) return;
  KvEventLog::Events kept;
  for (const PrefixIndex::Node node : index_.All()) {
    if (index_.PageOf(node, told_) < 0) continue;
    kept.push_back(std::make_shared<const KvBlockEvent>(EventOf(node)));
  }
  events_->Snapshot(std::move(kept));
}

void KvSlotManager::PushIdle(Pool& pool, int32_t page) {
  pool.older[page] = std::exchange(pool.newest, page);
  pool.newer[page] = -1;
  (pool.older[page] >= 0 ? pool.newer[pool.older[page]] : pool.oldest) = page;
  ++pool.idle;
}

void KvSlotManager::RemoveIdle(Pool& pool, int32_t page) {
  const int32_t older = pool.older[page], newer = pool.newer[page];
  (older >= 0 ? pool.newer[older] : pool.oldest) = newer;
  (newer >= 0 ? pool.older[newer] : pool.newest) = older;
  --pool.idle;
}

void KvSlotManager::TakeOldest(PageKind kind) {
  index_.Forget(pools_[kind].nodes[pools_[kind].oldest], kind);
}

// No node names the page any more.
void KvSlotManager::OnForgotten(PageKind kind, int32_t page) {
  Pool& pool = pools_[kind];
  if (kind == PageKind::kWhole) to_store_.erase(page);
  if (events_ != nullptr && kind == told_) {
    events_->Change({.hash = index_.HashOf(pool.nodes[page]), .ids = {}});
  }
  pool.nodes[page] = PrefixIndex::kNone;
  if (pool.references[page] > 0) return;
  RemoveIdle(pool, page);
  pool.free.push_back(page);
}

std::optional<std::vector<int32_t>> KvSlotManager::Reserve(int64_t count, PageKind kind) {
  Pool& pool = pools_[kind];
  TREADLE_CHECK(count >= 0);
  if (count > std::ssize(pool.free) + pool.idle) return std::nullopt;
  while (count > std::ssize(pool.free)) TakeOldest(kind);
  std::vector<int32_t> pages(pool.free.rbegin(), pool.free.rbegin() + count);
  pool.free.resize(pool.free.size() - static_cast<size_t>(count));
  for (const int32_t page : pages) pool.references[page] = 1;
  return pages;
}

void KvSlotManager::Share(std::span<const int32_t> pages, PageKind kind) {
  Pool& pool = pools_[kind];
  for (const int32_t page : pages) {
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < pool.references.size());
    TREADLE_CHECK(pool.references[page] > 0 || pool.nodes[page] != PrefixIndex::kNone);
    if (pool.references[page]++ == 0) RemoveIdle(pool, page);
  }
}

void KvSlotManager::Release(std::span<const int32_t> pages, PageKind kind) {
  Pool& pool = pools_[kind];
  // Backwards, so that a later reservation of as many gets them in the same order, and the end of a
  // sequence is older than its beginning.
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    TREADLE_CHECK(page >= 0 && static_cast<size_t>(page) < pool.references.size());
    TREADLE_CHECK(pool.references[page] > 0);
    if (--pool.references[page] > 0) continue;
    if (pool.nodes[page] == PrefixIndex::kNone) {
      pool.free.push_back(page);
    } else {
      PushIdle(pool, page);
    }
  }
  while (pool.idle > most_idle_[kind]) TakeOldest(kind);
}

void KvSlotManager::Reset() {
  index_.Clear();
  for (const PageKind kind : kPageKinds) {
    Pool& pool = pools_[kind];
    const size_t pages = pool.references.size();
    pool.references.assign(pages, 0);
    pool.free.resize(pages);
    std::iota(pool.free.rbegin(), pool.free.rend(), 0);  // page 0 is on top
    pool.nodes.assign(pages, PrefixIndex::kNone);
    pool.older.assign(pages, -1);
    pool.newer.assign(pages, -1);
    pool.oldest = pool.newest = -1;
    pool.idle = 0;
  }
}

}  // namespace treadle
