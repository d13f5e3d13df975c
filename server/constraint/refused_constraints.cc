#include "server/constraint/refused_constraints.h"

#include <span>

#include "base/sha256.h"

namespace treadle {
namespace {

std::string DigestOf(const PreparedConstraint& constraint) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(&constraint.form, 1)));
  sum.Add(std::as_bytes(std::span(constraint.text)));
  return sum.Finish();
}

}  // namespace

void RefusedConstraints::Add(const PreparedConstraint& constraint, absl::Status why,
                             TimePoint now) {
  std::string digest = DigestOf(constraint);
  MutexLock lock(mutex_);
  if (!by_digest_.insert_or_assign(digest, Refusal{std::move(why), now + kFor}).second) return;
  order_.push_back(std::move(digest));
  if (order_.size() <= kMaxKept) return;
  by_digest_.erase(order_.front());
  order_.pop_front();
}

absl::Status RefusedConstraints::Find(const PreparedConstraint& constraint, TimePoint now) const {
  const std::string digest = DigestOf(constraint);
  MutexLock lock(mutex_);
  const auto found = by_digest_.find(digest);
  if (found == by_digest_.end() || now >= found->second.until) return absl::OkStatus();
  return found->second.why;
}

}  // namespace treadle
