// Branches: copies of window pages that the K/V slot manager keeps for prompts that part from each
// other.
#include <algorithm>

#include "base/status.h"
#include "engine/kv/kv_slot_manager.h"

namespace treadle {

// The nodes, of those at the end of a path that a sequence's next row sees through its window, that
// name no page which stays as it is: a sequence overwrites what it holds.
std::vector<PrefixIndex::Node> KvSlotManager::Uncopied(
    std::span<const PrefixIndex::Node> nodes) const {
  const int64_t seen = paging_.FirstSeen(std::ssize(nodes) * paging_.page_size);
  std::vector<PrefixIndex::Node> uncopied;
  for (const PrefixIndex::Node node : nodes.subspan(static_cast<size_t>(seen))) {
    const int32_t page = index_.PageOf(node, PageKind::kWindow);
    if (page < 0 || pools_[PageKind::kWindow].references[page] > 0) uncopied.push_back(node);
  }
  return uncopied;
}

int32_t KvSlotManager::BranchOf(const Prefix& prompt) const {
  if (paging_.ring == 0) return 0;
  std::vector<PrefixIndex::Node> path = index_.Find(prompt.salt, prompt.ids);
  if (paging_.whole) {
    const auto has_none = [&](PrefixIndex::Node node) {
      return index_.PageOf(node, PageKind::kWhole) < 0;
    };
    path.erase(std::ranges::find_if(path, has_none), path.end());
  }
  if (Uncopied(path).empty()) return 0;
  return static_cast<int32_t>(std::ssize(path) * paging_.page_size);
}

bool KvSlotManager::HasRoomForCopies(int64_t position) const {
  const int64_t copies = position / paging_.page_size - paging_.FirstSeen(position);
  const Pool& pool = pools_[PageKind::kWindow];
  return copies <= std::min(std::ssize(pool.free) + pool.idle, most_idle_[PageKind::kWindow]);
}

std::vector<int32_t> KvSlotManager::KeepCopies(const Prefix& prefix, const SequencePages& pages,
                                               IterationPlan& plan) {
  const std::vector<PrefixIndex::Node> nodes = index_.Find(prefix.salt, prefix.ids);
  if (nodes.empty() || std::ssize(nodes) * paging_.page_size < std::ssize(prefix.ids)) return {};
  // Without whole pages, a node that names none might go with the pages that are taken.
  if (!paging_.whole && index_.PageOf(nodes.back(), PageKind::kWindow) < 0) return {};
  const std::vector<PrefixIndex::Node> uncopied = Uncopied(nodes);
  std::vector<int32_t> named;  // nobody may take these
  for (int64_t i = paging_.FirstSeen(std::ssize(prefix.ids)); i < std::ssize(nodes); ++i) {
    const int32_t page = index_.PageOf(nodes[static_cast<size_t>(i)], PageKind::kWindow);
    if (page >= 0) named.push_back(page);
  }
  Share(named, PageKind::kWindow);
  const auto copies = Reserve(std::ssize(uncopied), PageKind::kWindow);
  for (size_t i = 0; copies && i < uncopied.size(); ++i) {
    const PrefixIndex::Node node = uncopied[i];
    const int32_t before = index_.PageOf(node, PageKind::kWindow);
    if (before >= 0) OnForgotten(PageKind::kWindow, before);
    Name(node, PageKind::kWindow, (*copies)[i]);
    const int32_t own = pages[PageKind::kWindow][static_cast<size_t>(index_.IndexOf(node))];
    plan.page_copies[PageKind::kWindow].push_back({own, (*copies)[i]});
  }
  Release(named, PageKind::kWindow);
  if (copies) Release(*copies, PageKind::kWindow);
  return copies.value_or(std::vector<int32_t>());
}

void KvSlotManager::ForgetCopies(std::span<const int32_t> pages) {
  for (const int32_t page : pages) {
    const PrefixIndex::Node node = pools_[PageKind::kWindow].nodes[page];
    if (node != PrefixIndex::kNone) index_.Forget(node, PageKind::kWindow);
  }
}

}  // namespace treadle
