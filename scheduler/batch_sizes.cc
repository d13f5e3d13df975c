#include "scheduler/batch_sizes.h"

#include <algorithm>

namespace treadle {
namespace {

// Not less than these, however slow it looks: the machine may be busy just now.
constexpr int64_t kLeastSize = 8;
constexpr int64_t kLeastTokens = 2 * kDefaultBatchSize;
constexpr int64_t kStep = 16;  // tokens; kernels work on so many rows at once

}  // namespace

double FullIteration(const IterationCost& cost, const BatchLimits& limits, int64_t context) {
  const auto sequences = static_cast<double>(limits.max_batch_size);
  const double prompt = static_cast<double>(limits.max_batch_tokens) - sequences;
  const auto positions = static_cast<double>(context);
  return cost.Of({sequences + prompt, (sequences + prompt / 2) * positions, sequences});
}

BatchLimits ChooseBatch(const IterationCost& cost, const BatchLimits& limits,
                        const AutoBatch& choice) {
  BatchLimits chosen = limits;
  if (choice.size) {
    const auto seconds = [&](int64_t sequences) {
      const auto rows = static_cast<double>(sequences);
      return cost.Of({rows, rows * static_cast<double>(choice.context), rows});
    };
    // As much again is left for prompts.
    const int64_t most =
        std::max<int64_t>(1, std::min(choice.most_size, limits.max_batch_tokens / 2));
    int64_t& size = chosen.max_batch_size;
    for (size = std::min(kLeastSize, most); size < most; ++size) {
      if (2 * seconds(size) < kWorthDoubling * seconds(2 * size)) break;
      if (seconds(size + 1) > choice.target_itl) break;
    }
  }
  if (choice.tokens) {
    const int64_t least = std::max(2 * chosen.max_batch_size, kLeastTokens);
    int64_t& tokens = chosen.max_batch_tokens;
    for (tokens = std::min(least, limits.max_batch_tokens); tokens < limits.max_batch_tokens;) {
      BatchLimits more = chosen;
      more.max_batch_tokens = std::min((tokens / kStep + 1) * kStep, limits.max_batch_tokens);
      if (FullIteration(cost, more, choice.context) > choice.target_itl) break;
      tokens = more.max_batch_tokens;
    }
  }
  return chosen;
}

}  // namespace treadle
