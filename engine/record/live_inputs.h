// The live sequences of an epoch, and the input at every position whose K/V are in the cache:
// from plans and their results, as an engine would know them. With it K/V can be rebuilt at any
// point, since a row depends on its own sequence's inputs alone (docs/design.md, N1 and N2).
//
// Plans are applied in order, each once its result is known. They are not checked here: what cannot
// be is skipped, and an engine refuses it. Thread safety: one thread.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/plan/iteration_plan.h"

namespace treadle {

class LiveInputs {
 public:
  struct Live {
    SequenceStart start = {};          // from its beginning on: first_position 0, no earlier tokens
    std::vector<int32_t> inputs = {};  // by position
    int32_t sample = -1;               // of the last step's last row; -1: none
  };

  void Apply(const IterationPlan& plan, const IterationResult& result);
  void Clear() { live_.clear(); }
  const std::map<SequenceId, Live>& live() const { return live_; }

  // The plan with the tokens that its steps take from samples of plans before.
  IterationPlan WithTokens(IterationPlan plan) const;

  // A plan that only starts what lives, each with a step of all its inputs, whose output's target
  // is the sample that the next step may take. No engine runs it as it is (see Chunks).
  IterationPlan Everything() const;
  // Begins anew with what such a plan says.
  void Restore(const IterationPlan& everything);
  // Plans of at most `most` tokens that together leave an engine without sequences as Everything
  // says. Epoch and iteration are the caller's.
  static std::vector<IterationPlan> Chunks(const IterationPlan& everything, int64_t most);

 private:
  void Start(const SequenceStart& start);

  std::map<SequenceId, Live> live_;
};

}  // namespace treadle
