#include "models/text/bpe_tokenizer.h"

#include <algorithm>

#include "base/status.h"
#include "models/text/unicode.h"

namespace treadle {
namespace {

// A symbol that was merged into its left neighbour.
constexpr int32_t kMergedAway = INT32_MIN;

size_t LeadingSpace(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    if (!IsWhiteSpace(front.character)) break;
    at += front.length;
  }
  return at;
}

size_t TrailingSpace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
    if (!IsWhiteSpace(ReadUtf8(text.substr(start, end - start)).character)) break;
    end = start;
  }
  return text.size() - end;
}

bool BeginsWithWord(std::string_view text) {
  return !text.empty() && IsWordCharacter(ReadUtf8(text).character);
}

bool EndsInWord(std::string_view text) {
  size_t start = text.size();
  while (start > 0 && (static_cast<uint8_t>(text[--start]) & 0xC0) == 0x80) {
  }
  return BeginsWithWord(text.substr(start));
}

}  // namespace

void AddedTokens::InsertAll(const std::function<std::string(std::string_view)>& spell) {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const TokenizerSpec::Token& token = tokens_[id];
    const bool special = token.kind == TokenKind::kControl || token.kind == TokenKind::kUnknown;
    if (token.normalized != normalized_ || (!special && token.kind != TokenKind::kUserDefined)) {
      continue;
    }
    Insert(spell(token.text), static_cast<int32_t>(id), special);
  }
}

void AddedTokens::Insert(std::string_view text, int32_t id, bool special) {
  if (text.empty()) return;
  uint32_t node = 0;
  for (char c : text) {
    const uint64_t key = uint64_t{node} * 256 + static_cast<uint8_t>(c);
    const auto [child, inserted] = children_.try_emplace(key, static_cast<uint32_t>(nodes_.size()));
    if (inserted) nodes_.emplace_back();
    node = child->second;
  }
  int32_t& slot = special ? nodes_[node].special : nodes_[node].user_defined;
  if (slot < 0) slot = id;
}

AddedTokens::Match AddedTokens::Longest(std::string_view text, bool parse_special) const {
  Match best;
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto child = children_.find(uint64_t{node} * 256 + static_cast<uint8_t>(text[i]));
    if (child == children_.end()) break;
    node = child->second;
    const Node& here = nodes_[node];
    if (parse_special && here.special >= 0) {
      best = {here.special, i + 1};
    } else if (here.user_defined >= 0) {
      best = {here.user_defined, i + 1};
    }
  }
  return best;
}

std::vector<AddedTokens::Fragment> AddedTokens::Split(std::string_view text,
                                                      bool parse_special) const {
  std::vector<Fragment> fragments;
  size_t pending = 0;  // start of the text that no fragment holds yet
  const auto flush = [&](size_t end) {
    if (end > pending) {
      fragments.push_back({-1, text.substr(pending, end - pending), pending == 0});
    }
  };
  size_t at = nodes_.size() > 1 ? 0 : text.size();  // without tokens there is nothing to find
  while (at < text.size()) {
    const Match match = Longest(text.substr(at), parse_special);
    if (match.id < 0) {
      ++at;
      continue;
    }
    const TokenizerSpec::Token& token = tokens_[static_cast<size_t>(match.id)];
    size_t end = at + match.length;
    size_t start = at;
    at = end;
    if (token.single_word &&
        (EndsInWord(text.substr(0, start)) || BeginsWithWord(text.substr(end)))) {
      continue;
    }
    if (token.trim_left && start > pending) {
      start -= TrailingSpace(text.substr(pending, start - pending));
    }
    if (token.trim_right) end += LeadingSpace(text.substr(end));
    flush(start);
    fragments.push_back({match.id, text.substr(start, end - start), start == 0});
    pending = std::max(pending, end);
  }
  flush(text.size());
  return fragments;
}

MergeQueue::Bucket& MergeQueue::At(int32_t priority) {
  Known& known = known_[static_cast<uint32_t>(priority) % known_.size()];
  if (known.bucket == nullptr || known.priority != priority) {
    known = {priority, &buckets_[priority]};
  }
  return *known.bucket;
}

void MergeQueue::Push(const Candidate& candidate) {
  if (!long_) return heap_.push(candidate);
  Bucket& bucket = At(candidate.priority);
  if (bucket.empty()) priorities_.push(candidate.priority);
  if (bucket.begun) {
    bucket.late.push(candidate.position);
  } else {
    bucket.listed.push_back(candidate.position);
  }
}

MergeQueue::Candidate MergeQueue::Pop() {
  if (!long_) {
    const Candidate first = heap_.top();
    heap_.pop();
    return first;
  }
  const int32_t priority = priorities_.top();
  Bucket& bucket = At(priority);
  if (!bucket.begun) {
    bucket.begun = true;
    if (!std::ranges::is_sorted(bucket.listed)) std::ranges::sort(bucket.listed);
  }
  const bool late = !bucket.late.empty() && (bucket.next == bucket.listed.size() ||
                                             bucket.listed[bucket.next] > bucket.late.top());
  const Candidate first{priority, late ? bucket.late.top() : bucket.listed[bucket.next]};
  if (late) {
    bucket.late.pop();
  } else {
    ++bucket.next;
  }
  if (bucket.empty()) {
    priorities_.pop();
    known_[static_cast<uint32_t>(priority) % known_.size()].bucket = nullptr;
    buckets_.erase(priority);
  }
  return first;
}

const MergeTable::Merge* Merger::Find(int32_t left, int32_t right) {
  const uint32_t hash = static_cast<uint32_t>(left) * 31 + static_cast<uint32_t>(right);
  Found& found = found_[hash % found_.size()];
  if (found.left != left || found.right != right) found = {left, right, table_.Find(left, right)};
  return found.merge;
}

void Merger::Consider(const std::vector<int32_t>& symbols, int32_t left, int32_t right) {
  const MergeTable::Merge* const merge =
      Find(symbols[static_cast<size_t>(left)], symbols[static_cast<size_t>(right)]);
  if (merge != nullptr) queue_.Push({merge->priority, left});
}

void Merger::Run(std::vector<int32_t>* symbols) {
  std::vector<int32_t>& ids = *symbols;
  const auto count = static_cast<int32_t>(ids.size());
  previous_.resize(ids.size());
  next_.resize(ids.size());
  queue_.Begin(ids.size());
  for (int32_t i = 0; i < count; ++i) {
    previous_[static_cast<size_t>(i)] = i - 1;
    next_[static_cast<size_t>(i)] = i + 1;
    if (i + 1 < count) Consider(ids, i, i + 1);
  }
  while (!queue_.empty()) {
    const MergeQueue::Candidate best = queue_.Pop();
    const auto left = static_cast<size_t>(best.position);
    const int32_t right = next_[left];
    if (right >= count) continue;
    const MergeTable::Merge* const merge = Find(ids[left], ids[static_cast<size_t>(right)]);
    if (merge == nullptr || merge->priority != best.priority) continue;
    ids[left] = merge->result;
    ids[static_cast<size_t>(right)] = kMergedAway;
    const int32_t after = next_[static_cast<size_t>(right)];
    next_[left] = after;
    if (after < count) {
      previous_[static_cast<size_t>(after)] = best.position;
      Consider(ids, best.position, after);
    }
    if (previous_[left] >= 0) Consider(ids, previous_[left], best.position);
  }
  std::erase(ids, kMergedAway);
}

BpeTokenizer::BpeTokenizer(TokenizerSpec spec)
    : Tokenizer(std::move(spec)),
      added_(spec_.tokens, /*normalized=*/false),
      normalized_added_(spec_.tokens, /*normalized=*/true) {
  byte_ids_.fill(-1);
  bytes_.reserve(spec_.tokens.size());
}

void BpeTokenizer::FindAddedTokens() {
  added_.InsertAll([](std::string_view text) { return std::string(text); });
  normalized_added_.InsertAll([this](std::string_view text) { return Normalized(text); });
}

absl::Status BpeTokenizer::AddListedMerges(
    const std::unordered_map<std::string_view, int32_t>& ids) {
  merges_.Reserve(spec_.merges.size());
  for (size_t rank = 0; rank < spec_.merges.size(); ++rank) {
    const auto& [left, right] = spec_.merges[rank];
    const std::string joined = left + right;
    int32_t found[3];
    const std::string* const texts[] = {&left, &right, &joined};
    for (size_t i = 0; i < 3; ++i) {
      const auto id = ids.find(*texts[i]);
      if (id == ids.end()) {
        return InvalidArgument("tokenizer: merge ", rank, " ('", left, "' and '", right,
                               "') needs the token '", *texts[i], "', which the vocabulary lacks");
      }
      found[i] = id->second;
    }
    merges_.Add(found[0], found[1], {static_cast<int32_t>(rank), found[2]});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> BpeTokenizer::Encode(std::string_view text,
                                                          const EncodeOptions& options) const {
  TREADLE_RETURN_IF_ERROR(CheckText(text));
  std::vector<int32_t> ids;
  if (options.add_special && spec_.add_bos) ids.push_back(spec_.bos);
  Merger merger(merges_);
  for (const AddedTokens::Fragment& fragment : added_.Split(text, options.parse_special)) {
    if (fragment.id >= 0) {
      ids.push_back(fragment.id);
      continue;
    }
    const std::string normalized = Normalized(fragment.text);
    for (const auto& part : normalized_added_.Split(normalized, options.parse_special)) {
      if (part.id >= 0) {
        ids.push_back(part.id);
        continue;
      }
      const bool at_start = fragment.at_start && part.at_start;
      TREADLE_RETURN_IF_ERROR(EncodeText(part.text, at_start, &merger, &ids));
    }
  }
  if (options.add_special && spec_.add_eos) ids.push_back(spec_.eos);
  return ids;
}

std::string BpeTokenizer::TokenBytes(int32_t id, bool special) const {
  if (!Emits(id, special)) return "";
  return bytes_[static_cast<size_t>(id)];
}

}  // namespace treadle
