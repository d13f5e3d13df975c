#include "scheduler/policy.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "scheduler/fcfs.h"
#include "scheduler/request_level.h"

namespace treadle {
namespace {

template <typename T>
std::unique_ptr<Policy> Make() {
  return std::make_unique<T>();
}

struct Row {
  std::string_view name;
  std::unique_ptr<Policy> (*make)();
};
// A message's worth of what stages only take note of.
constexpr int64_t kMostInputsNotRun = 1 << 16;

constexpr Row kPolicies[] = {
    {"fcfs", Make<Fcfs>},
    {"request-level", Make<RequestLevel>},
};

}  // namespace

absl::StatusOr<std::unique_ptr<Policy>> Policy::Create(std::string_view name) {
  std::string names;
  for (const Row& row : kPolicies) {
    if (row.name == name) return row.make();
    names += Str(names.empty() ? "" : ", ", row.name);
  }
  return InvalidArgument("scheduling policy '", name, "' is unknown, expected one of: ", names);
}

std::vector<std::string_view> Policy::Names() {
  std::vector<std::string_view> names;
  for (const Row& row : kPolicies) names.push_back(row.name);
  return names;
}

PageCounts PagesNeeded(const RequestSpec& request, const KvPaging& paging) {
  const int64_t prompt = std::ssize(request.prompt);
  return paging.Needed(prompt, prompt + request.max_new_tokens, request.candidates);
}

bool Admits(KvCapacity& left, const Request& request) {
  const PageCounts pages = PagesNeeded(request.spec, left.paging);
  if (!pages.FitsIn(left.free_pages)) return false;
  left.free_pages -= pages;
  return true;
}

bool HasTokenLeft(const Request& request, const Sequence& sequence) {
  return !sequence.finished && sequence.produced + sequence.in_flight < request.spec.max_new_tokens;
}

bool IsReady(const Request& request, const BatchLimits& limits) {
  if (request.state != RequestState::kRunning) return false;
  if (request.plans_in_flight >= (limits.stages == 1 ? limits.depth : 1)) return false;
  return std::any_of(request.sequences.begin(), request.sequences.end(),
                     [&](const Sequence& sequence) { return HasTokenLeft(request, sequence); });
}

int32_t InputsLeft(const Request& request) {
  const Sequence& first = request.sequences[0];
  const int32_t prompt = request.prompt_length();
  if (first.next_position < prompt) {
    const bool again = first.next_position < first.known;
    return (again ? std::min(first.known, prompt) : prompt) - first.next_position;
  }
  int32_t left = 0;
  for (const Sequence& sequence : request.sequences) {
    if (!sequence.finished) left += std::max(0, sequence.known - sequence.next_position);
  }
  return left;
}

int64_t BatchSequences(const Request& request) {
  return std::count_if(request.sequences.begin(), request.sequences.end(),
                       [](const Sequence& sequence) { return !sequence.finished; });
}

void AssignTokens(Selection& selection, const BatchLimits& limits) {
  const auto some = std::ranges::find_if(
      selection, [](const Selected& member) { return StagesOf(*member.request) != StageRange(); });
  StageRange stages;
  if (some != selection.end()) {
    stages = StagesOf(*some->request);
    std::erase_if(selection,
                  [&](const Selected& member) { return StagesOf(*member.request) != stages; });
  }
  int64_t budget = stages.empty() ? kMostInputsNotRun : limits.max_batch_tokens;
  for (Selected& member : selection) {
    const Request& request = *member.request;
    if (InInitiation(request)) continue;
    member.num_tokens = static_cast<int32_t>(
        std::count_if(request.sequences.begin(), request.sequences.end(),
                      [&](const Sequence& sequence) { return HasTokenLeft(request, sequence); }));
    budget -= member.num_tokens;
  }
  for (Selected& member : selection) {
    const Request& request = *member.request;
    const int64_t left = InputsLeft(request);
    if (left == 0) continue;
    member.num_tokens = static_cast<int32_t>(std::min(left, budget));
    budget -= member.num_tokens;
  }
}

}  // namespace treadle
