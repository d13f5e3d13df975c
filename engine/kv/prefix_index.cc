#include "engine/kv/prefix_index.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"
#include "base/sha256.h"
#include "engine/plan/sequence_table.h"

namespace treadle {

// Seeded anew in every process, so that nobody can choose ids whose hashes are alike.
size_t PrefixIndex::Hash::operator()(const Key& key) const {
  const absl::string_view bytes(reinterpret_cast<const char*>(key.ids.data()),
                                key.ids.size_bytes());
  return absl::HashOf(key.parent, bytes);
}

bool PrefixIndex::Equal::operator()(const Key& a, const Key& b) const {
  return a.parent == b.parent && std::ranges::equal(a.ids, b.ids);
}

PrefixIndex::PrefixIndex(int64_t page_size, Forgotten forgotten, std::string secret)
    : page_size_(page_size),
      forgotten_(std::move(forgotten)),
      secret_(std::move(secret)),
      named_(0, Hash{&entries_}, Equal{&entries_}) {}

std::vector<PrefixIndex::Node> PrefixIndex::Find(std::string_view salt,
                                                 std::span<const int32_t> ids) const {
  const auto root = salts_.find(salt);
  return root == salts_.end() ? std::vector<Node>() : FindBelow(root->second, ids);
}

std::vector<PrefixIndex::Node> PrefixIndex::FindBelow(Node node,
                                                      std::span<const int32_t> ids) const {
  std::vector<Node> path;
  const auto page = static_cast<size_t>(page_size_);
  for (; ids.size() >= page; ids = ids.subspan(page)) {
    const auto found = named_.find(Key{node, ids.first(page)});
    if (found == named_.end()) break;
    path.push_back(node = *found);
  }
  return path;
}

std::vector<PrefixIndex::Node> PrefixIndex::Add(std::string_view salt, std::span<const int32_t> ids,
                                                Node before) {
  const auto page = static_cast<size_t>(page_size_);
  if (ids.size() < page) return {};
  if (before == kNone) {
    const auto [root, is_new] = salts_.try_emplace(std::string(salt), kNone);
    if (is_new) {
      root->second = Make(kNone);
      at(root->second).salt = salt;
      at(root->second).hash = HashOfSalt(salt);
    }
    before = root->second;
  }
  std::vector<Node> path = FindBelow(before, ids);
  Node node = path.empty() ? before : path.back();
  for (size_t begin = path.size() * page; begin + page <= ids.size(); begin += page) {
    node = Make(node);
    const auto own = ids.subspan(begin, page);
    Entry& entry = at(node);
    entry.ids.assign(own.begin(), own.end());
    entry.hash = secret_.empty() ? 0 : at(entry.parent).hash;
    for (const int32_t id : secret_.empty() ? std::span<const int32_t>() : own) {
      entry.hash = NextTag(entry.hash, id);
    }
    named_.insert(node);
    path.push_back(node);
  }
  return path;
}

uint64_t PrefixIndex::HashOfSalt(std::string_view salt) const {
  if (secret_.empty()) return 0;
  Sha256 sum;
  for (const std::string_view part : {std::string_view(secret_), salt}) {
    sum.Add(std::as_bytes(std::span(part)));
  }
  return std::stoull(sum.Finish().substr(0, 16), nullptr, 16);
}

std::vector<PrefixIndex::Node> PrefixIndex::All() const {
  std::vector<Node> all, left;
  for (const auto& [salt, root] : salts_) left.push_back(root);
  while (!left.empty()) {
    const Node node = left.back();
    left.pop_back();
    if (at(node).index >= 0) all.push_back(node);
    for (Node child = at(node).child; child != kNone; child = at(child).next) left.push_back(child);
  }
  return all;
}

PrefixIndex::Node PrefixIndex::Make(Node parent) {
  Node node = static_cast<Node>(entries_.size());
  if (unused_.empty()) {
    entries_.emplace_back();
  } else {
    node = unused_.back();
    unused_.pop_back();
  }
  if (parent == kNone) return node;
  Entry& entry = at(node);
  entry.parent = parent;
  entry.index = at(parent).index + 1;
  entry.next = std::exchange(at(parent).child, node);
  if (entry.next != kNone) at(entry.next).previous = node;
  return node;
}

void PrefixIndex::Forget(Node node, PageKind kind) {
  const int32_t page = std::exchange(at(node).pages[kind], -1);
  if (page >= 0) forgotten_(kind, page);
  if (kind == PageKind::kWhole) {
    EraseBelow(node);
    const int32_t window = std::exchange(at(node).pages[PageKind::kWindow], -1);
    if (window >= 0) forgotten_(PageKind::kWindow, window);
  }
  while (node != kNone && IsHollow(node)) {
    const Node parent = at(node).parent;
    Erase(node);
    node = parent;
  }
}

bool PrefixIndex::IsHollow(Node node) const {
  const Entry& entry = at(node);
  return entry.child == kNone &&
         std::ranges::all_of(kPageKinds, [&](PageKind kind) { return entry.pages[kind] < 0; });
}

void PrefixIndex::EraseBelow(Node node) {
  // Depth first, without recursion: paths are as long as contexts.
  Node below = at(node).child;
  while (below != kNone && below != node) {
    if (at(below).child != kNone) {
      below = at(below).child;
      continue;
    }
    const Node parent = at(below).parent;
    for (const PageKind kind : kPageKinds) {
      const int32_t page = std::exchange(at(below).pages[kind], -1);
      if (page >= 0) forgotten_(kind, page);
    }
    Erase(below);
    below = at(parent).child != kNone ? at(parent).child : parent;
  }
}

// REQUIRES: the node has nothing below it.
void PrefixIndex::Erase(Node node) {
  Entry& entry = at(node);
  if (entry.parent == kNone) {
    salts_.erase(entry.salt);
  } else {
    named_.erase(node);
    if (entry.next != kNone) at(entry.next).previous = entry.previous;
    (entry.previous != kNone ? at(entry.previous).next : at(entry.parent).child) = entry.next;
  }
  entry = {};
  unused_.push_back(node);
}

void PrefixIndex::Clear() {
  for (const Entry& entry : entries_) {
    for (const PageKind kind : kPageKinds) {
      if (entry.pages[kind] >= 0) forgotten_(kind, entry.pages[kind]);
    }
  }
  named_.clear();
  salts_.clear();
  entries_.clear();
  unused_.clear();
}

}  // namespace treadle
