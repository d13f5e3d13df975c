#include "engine/plan/result_check.h"

#include <algorithm>
#include <string>

#include "base/status.h"

namespace treadle {
namespace {

absl::Status CheckDetail(const TokenDetail& detail, int32_t most, int64_t vocab) {
  if (std::ssize(detail.top) > std::max(most, 0)) {
    return InvalidArgument(detail.top.size(), " alternatives to a token, expected at most ",
                           std::max(most, 0));
  }
  for (const TokenLogprob& top : detail.top) {
    if (top.token >= 0 && top.token < vocab) continue;
    return InvalidArgument("token ", top.token, " as an alternative, expected 0 to ", vocab - 1);
  }
  return absl::OkStatus();
}

absl::Status CheckRow(const RowResult& row, const RowOutput& asked, int64_t vocab, int64_t hidden) {
  const bool fits = asked.sample ? row.token >= 0 && row.token < vocab : row.token == -1;
  if (!fits) {
    return InvalidArgument("token ", row.token, ", expected ",
                           asked.sample ? "one of the vocabulary" : "none");
  }
  const int64_t elements = asked.hidden ? hidden : 0;
  if (std::ssize(row.hidden) != elements) {
    return InvalidArgument(row.hidden.size(), " elements of a hidden state, expected ", elements);
  }
  TREADLE_RETURN_IF_ERROR(CheckDetail(row.detail, asked.top_logprobs, vocab));
  return CheckDetail(row.target, asked.target >= 0 ? asked.target_logprobs : 0, vocab);
}

absl::Status CheckStep(const StepResult& result, const Step& step, int64_t vocab, int64_t hidden) {
  if (result.sequence != step.sequence) {
    return InvalidArgument("sequence ", result.sequence, ", expected ", step.sequence);
  }
  if (result.outputs.size() != step.outputs.size()) {
    return InvalidArgument(result.outputs.size(), " outputs, expected ", step.outputs.size());
  }
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(CheckRow(result.outputs[i], step.outputs[i], vocab, hidden));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckResult(const IterationResult& result, const std::vector<Step>& steps,
                         int64_t vocab, int64_t hidden) {
  if (result.steps.size() != steps.size()) {
    return InvalidArgument("it has ", result.steps.size(), " steps, expected ", steps.size());
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    const absl::Status fits = CheckStep(result.steps[i], steps[i], vocab, hidden);
    if (fits.ok()) continue;
    return InvalidArgument("step ", i, " of sequence ", steps[i].sequence, " has ",
                           std::string(fits.message()));
  }
  return absl::OkStatus();
}

}  // namespace treadle
