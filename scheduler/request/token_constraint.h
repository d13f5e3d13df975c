// A constraint on a request's answer, as the scheduler knows it: which tokens may come next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace treadle {

// One candidate's way through the constraint. Thread safety: confined to one thread.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  // The candidate has this token now. InvalidArgument if the constraint does not allow it.
  virtual absl::Status Accept(int32_t token) = 0;

  // Takes back the last `count` tokens that it accepted.
  virtual void Rollback(int32_t count) = 0;

  // Tokens that may follow because there is hardly a choice; a guess. Few, or none.
  virtual std::vector<int32_t> Foresee() { return {}; }

  // allowed: [MaskWords(vocab)] bits, as SampleRow::mask. End tokens are allowed exactly where the
  // answer may end. InvalidArgument if no token is allowed.
  virtual absl::Status FillMask(std::span<uint32_t> allowed) = 0;
};

// Thread safety: any thread.
class ConstraintGrammar {
 public:
  virtual ~ConstraintGrammar() = default;
  virtual std::unique_ptr<TokenConstraint> Begin() const = 0;
  virtual int32_t vocab() const = 0;
};

}  // namespace treadle
