#include "engine/mask_board.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {

absl::Status MaskBoard::Put(uint64_t iteration, std::vector<OutputMask> masks) {
  MutexLock lock(mutex_);
  if (!broken_.ok()) return absl::OkStatus();
  const size_t words = MaskWords(options_.vocab);
  const size_t bytes = masks.size() * words * sizeof(uint32_t);
  if (bytes > kMaxBytes - bytes_) {
    return ResourceExhausted("masks of iteration ", iteration, " have ", bytes, " bytes, and ",
                             bytes_, " wait already; expected at most ", kMaxBytes, " together");
  }
  const auto at = waiting_.try_emplace(iteration).first;  // at an error the epoch ends
  if (iteration < next_ || at->second.taken > 0) {
    return InvalidArgument("masks of iteration ", iteration, " came after it was sampled");
  }
  for (OutputMask& mask : masks) {
    if (mask.allowed.size() != words) {
      return InvalidArgument("mask of step ", mask.step, " of iteration ", iteration, " has ",
                             mask.allowed.size(), " words, expected ", words);
    }
    const std::pair key(mask.step, mask.output);
    if (!at->second.masks->try_emplace(key, std::move(mask.allowed)).second) {
      return InvalidArgument("mask of step ", mask.step, " of iteration ", iteration,
                             " came twice");
    }
    bytes_ += words * sizeof(uint32_t);
  }
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::StatusOr<MaskBoard::Masks> MaskBoard::Take(const IterationPlan& plan) {
  size_t needed = 0;
  for (const Step& step : plan.steps) {
    needed += static_cast<size_t>(std::ranges::count_if(step.outputs, &RowOutput::masked));
  }
  const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
  MutexLock lock(mutex_);
  const auto at =
      waiting_.try_emplace(plan.iteration).first;  // this rank erases it at the earliest
  const auto lacking = [&] { return broken_.ok() && at->second.masks->size() < needed; };
  while (lacking()) {
    if (changed_.WaitUntil(mutex_, deadline) || !lacking()) continue;
    return absl::DeadlineExceededError(Str("only ", at->second.masks->size(), " of ", needed,
                                           " masks came within ", options_.timeout.count(), " ms"));
  }
  TREADLE_RETURN_IF_ERROR(broken_);
  const Masks masks = at->second.masks;
  for (const auto& [place, allowed] : *masks) {
    const auto [step, output] = place;
    const bool there = step >= 0 && step < std::ssize(plan.steps) && output >= 0 &&
                       output < std::ssize(plan.steps[step].outputs);
    if (there && plan.steps[step].outputs[output].masked) continue;
    return InvalidArgument("there is a mask of output ", output, " of step ", step,
                           ", which is not a masked one");
  }
  if (++at->second.taken < options_.ranks) return masks;
  bytes_ -= BytesOf(at->second);
  waiting_.erase(at);
  next_ = plan.iteration + 1;
  return masks;
}

void MaskBoard::Abort(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (broken_.ok()) broken_ = why;
  changed_.NotifyAll();
}

}  // namespace treadle
