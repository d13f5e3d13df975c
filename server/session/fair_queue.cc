#include "server/session/fair_queue.h"

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

// Owners with nothing to do who have had more than others.
constexpr size_t kMaxIdleOwners = 1024;

}  // namespace

void FairQueue::Push(Entry entry) {
  Owner& owner = owners_.try_emplace(entry.owner).first->second;
  if (owner.entries.empty() && owner.running == 0) owner.had = std::max(owner.had, level_);
  owner.entries.push_back(std::move(entry));
}

std::optional<FairQueue::Entry> FairQueue::Pop(size_t most_bytes) {
  const auto fits = [&](const Entry& entry) { return entry.bytes <= most_bytes; };
  Owner* next = nullptr;
  for (auto& [name, owner] : owners_) {
    if (std::ranges::none_of(owner.entries, fits)) continue;
    const auto rank = [](const Owner& of) { return std::pair(of.had, of.served); };
    if (next == nullptr || rank(owner) < rank(*next)) next = &owner;
  }
  if (next == nullptr) return std::nullopt;
  const auto at = std::ranges::find_if(next->entries, fits);
  Entry entry = std::move(*at);
  next->entries.erase(at);
  next->served = ++pops_;
  ++next->running;
  level_ = std::max(level_, next->had);
  return entry;
}

void FairQueue::Charge(const std::string& owner, double seconds) {
  Owner& charged = owners_.at(owner);
  charged.had += seconds;
  --charged.running;
  Forget();
}

void FairQueue::Forget() {
  size_t idle = 0;
  std::erase_if(owners_, [&](const auto& each) {
    const Owner& owner = each.second;
    if (!owner.entries.empty() || owner.running > 0) return false;
    return owner.had <= level_ || ++idle > kMaxIdleOwners;
  });
}

}  // namespace treadle
