// Constraints as the serving loop knows them: masks over the model's tokens, by XGrammar.
//
// The cost of a constraint is bounded twice, for the library cannot be interrupted. Before it is
// compiled: bytes (constraint.h), schemas and keywords (json_schema.h), what repetitions multiply
// to (pattern.h). Then by a trial in a child process, which has 4 seconds of a processor and 512
// MiB to compile it and to work out masks along two ways through it. If it passes, it is compiled
// here and kept for the next request, least recently used first out; what does not is refused for
// some minutes without another trial (refused_constraints.h).
//
// Thread safety: any thread; compiles of several threads run beside each other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "models/text/tokenizer.h"
#include "scheduler/request/token_constraint.h"
#include "server/constraint/constraint.h"

namespace treadle {

class ConstraintCompiler {
 public:
  static constexpr size_t kCacheBytes = size_t{128} << 20;

  virtual ~ConstraintCompiler() = default;

  // end_ids: what ends an answer; those outside [0, vocab) are left out. The vocabulary is read
  // with the first constraint, or ahead. `tokenizer` must outlive this and what it makes.
  static std::unique_ptr<ConstraintCompiler> Create(const Tokenizer& tokenizer, int32_t vocab,
                                                    const std::vector<int32_t>& end_ids);

  // Begins to read the vocabulary, on a thread of low priority; a Compile that comes meanwhile
  // waits for it. `done` is called there at the end, and must not block; destruction waits for it.
  // At most once.
  virtual void ReadAhead(std::function<void()> done) = 0;

  // False: no constraint can be compiled here.
  virtual bool Works() const = 0;
  // Whether Compile would answer at once, by what it has made or refused before.
  virtual bool Keeps(const Constraint& constraint) = 0;
  // InvalidArgument says what is wrong with the constraint, or that it cannot be enforced.
  virtual absl::StatusOr<std::shared_ptr<const ConstraintGrammar>> Compile(
      const Constraint& constraint) = 0;
};

}  // namespace treadle
