// An index of pages by the tokens they hold: a tree with a node for each whole page of token ids,
// below the node of the page before it. Two sequences that begin with the same ids under the same
// salt have their first nodes in common, so what the rows of a node's page depend on
// (docs/design.md, N1, N2) is the path to it. Ids are compared, whatever their hashes: other ids
// are another node.
//
// A node names at most one page of each kind. It may name none, as long as nodes below it do: a
// model's window pages are of use without those before them.
//
// It knows nothing of who holds pages (KvSlotManager does). Automatic reuse of prefixes by a tree
// over token ids is SGLang's (Zheng et al. 2024, RadixAttention), here with pages for edges.
//
// Thread safety: thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "engine/plan/kv_paging.h"

namespace treadle {

class PrefixIndex {
 public:
  using Node = int32_t;
  static constexpr Node kNone = -1;
  // Told of each page that a node named and names no more.
  using Forgotten = std::function<void(PageKind, int32_t page)>;

  // `secret`: mixed into the hashes of nodes, so that whoever sees them learns no salt; empty:
  // there are no hashes.
  PrefixIndex(int64_t page_size, Forgotten forgotten, std::string secret = "");

  // The nodes of the whole pages of `ids` from the first on, as far as there are.
  std::vector<Node> Find(std::string_view salt, std::span<const int32_t> ids) const;
  // The same, of all whole pages: those that are missing are made, and name no pages. `before`: the
  // node of the ids before these; kNone: there are none.
  std::vector<Node> Add(std::string_view salt, std::span<const int32_t> ids, Node before = kNone);

  // A hash of the ids up to the node's page, and of the salt. Never 0; of the first page's parent,
  // which is none, 0.
  uint64_t HashOf(Node node) const { return at(node).index < 0 ? 0 : at(node).hash; }
  Node ParentOf(Node node) const { return at(node).parent; }
  std::span<const int32_t> IdsOf(Node node) const { return at(node).ids; }
  // All nodes of ids, each after its parent.
  std::vector<Node> All() const;
  // How many pages lie before the node's in its sequence.
  int64_t IndexOf(Node node) const { return at(node).index; }
  // -1: none
  int32_t PageOf(Node node, PageKind kind) const { return at(node).pages[kind]; }
  void SetPage(Node node, PageKind kind, int32_t page) { at(node).pages[kind] = page; }
  // Forgets the page, and the nodes that are of no use any more: without a whole page, this one and
  // all below it; else those, from this one up, that name no page and have none below them.
  void Forget(Node node, PageKind kind);
  void Clear();

  // The number of nodes that have an id.
  int64_t nodes() const { return std::ssize(named_); }

 private:
  struct Entry {
    Node parent = kNone;
    Node child = kNone;                   // the first one
    Node next = kNone, previous = kNone;  // of the same parent
    int64_t index = -1;                   // -1: of a salt, and has no ids
    uint64_t hash = 0;
    ByKind<int32_t> pages = ByKind<int32_t>({-1, -1});
    std::vector<int32_t> ids;
    std::string salt = {};
  };
  struct Key {
    Node parent;
    std::span<const int32_t> ids;
  };
  // Hash and equality of nodes by parent and ids; both take keys, too.
  struct Hash {
    using is_transparent = void;
    const std::vector<Entry>* entries;
    size_t operator()(const Key& key) const;
    size_t operator()(Node node) const { return (*this)(KeyOf(*entries, node)); }
  };
  struct Equal {
    using is_transparent = void;
    const std::vector<Entry>* entries;
    bool operator()(const Key& a, const Key& b) const;
    bool operator()(Node a, Node b) const { return a == b; }
    bool operator()(Node a, const Key& b) const { return (*this)(KeyOf(*entries, a), b); }
    bool operator()(const Key& a, Node b) const { return (*this)(a, KeyOf(*entries, b)); }
  };

  static Key KeyOf(const std::vector<Entry>& entries, Node node) {
    const Entry& entry = entries[static_cast<size_t>(node)];
    return {entry.parent, entry.ids};
  }
  Entry& at(Node node) { return entries_[static_cast<size_t>(node)]; }
  const Entry& at(Node node) const { return entries_[static_cast<size_t>(node)]; }
  std::vector<Node> FindBelow(Node node, std::span<const int32_t> ids) const;
  uint64_t HashOfSalt(std::string_view salt) const;
  Node Make(Node parent);
  void Erase(Node node);
  void EraseBelow(Node node);
  bool IsHollow(Node node) const;

  const int64_t page_size_;
  const Forgotten forgotten_;
  const std::string secret_;
  std::vector<Entry> entries_;
  std::vector<Node> unused_;
  std::map<std::string, Node, std::less<>> salts_;
  std::unordered_set<Node, Hash, Equal> named_;
};

}  // namespace treadle
