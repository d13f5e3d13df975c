#include "scheduler/policy.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "scheduler/fair_share.h"
#include "scheduler/faster_transformer.h"
#include "scheduler/fcfs.h"
#include "scheduler/priority.h"
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
// Inputs that stages only take note of: as many as a message holds.
constexpr int64_t kMaxInputsNotRun = 1 << 16;

constexpr Row kPolicies[] = {
    {"fcfs", Make<Fcfs>},
    {"request-level", Make<RequestLevel>},
    {"faster-transformer", Make<FasterTransformer>},
    {"faster-transformer-padded", Make<PaddedFasterTransformer>},
    {"priority", Make<Priority>},
    {"fair-share", Make<FairShare>},
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

bool Admits(const PolicyView& view, KvCapacity& left, const Request& request) {
  if (request.fetch != nullptr) return false;
  PageCounts pages = PagesNeeded(request.spec, left.paging);
  if (view.cached) pages -= view.cached(request).held;
  if (!pages.FitsIn(left.free_pages)) return false;
  left.free_pages -= pages;
  return true;
}

std::vector<Request*> LiveRequests(const PolicyView& view) {
  std::vector<Request*> live;
  live.reserve(view.pool.size());
  for (const auto& request : view.pool) {
    if (request->state != RequestState::kFinished) live.push_back(request.get());
  }
  return live;
}

int64_t BatchCap(const PolicyView& view, std::span<Request* const> order) {
  const BatchLimits& limits = view.limits;
  if (limits.stages == 1) return limits.max_batch_size;
  int64_t sequences = 0;
  KvCapacity left = view.kv;
  for (const Request* const request : order) {
    if (request->state == RequestState::kWaiting && !Admits(view, left, *request)) break;
    sequences += BatchSequences(*request);
  }
  return std::min(limits.max_batch_size, (sequences + limits.stages - 1) / limits.stages);
}

Selection TakeMembers(const PolicyView& view, std::span<Request* const> order) {
  const int64_t cap = BatchCap(view, order);
  Selection selection;
  int64_t sequences = 0;
  KvCapacity left = view.kv;
  for (Request* const request : order) {
    const bool waiting = request->state == RequestState::kWaiting;
    if (!waiting && !IsReady(*request, view.limits)) continue;
    const int64_t size = BatchSequences(*request);
    if (sequences > 0 && sequences + size > cap) break;
    if (waiting && !Admits(view, left, *request)) break;
    sequences += size;
    selection.push_back({request, 0});
  }
  return selection;
}

bool IsReady(const Request& request, const BatchLimits& limits) {
  if (request.state != RequestState::kRunning) return false;
  if (request.plans_in_flight >= (limits.stages == 1 ? limits.depth : 1)) return false;
  return std::any_of(request.sequences.begin(), request.sequences.end(),
                     [&](const Sequence& sequence) { return HasTokenLeft(request, sequence); });
}

void AssignTokens(const PolicyView& view, Selection& selection) {
  const auto to_begin = [&](const Request& request) {
    return view.cached != nullptr && IsToBegin(request);
  };
  const auto stages_of = [&](const Selected& member) {
    const Request& request = *member.request;
    const bool known = request.sequences[0].known > 0;  // else it runs on all
    return known && to_begin(request) ? StagesAfter(request, view.cached(request).tokens)
                                      : StagesOf(request);
  };
  const auto some = std::ranges::find_if(
      selection, [&](const Selected& member) { return stages_of(member) != StageRange(); });
  StageRange stages;
  if (some != selection.end()) {
    stages = stages_of(*some);
    std::erase_if(selection, [&](const Selected& member) { return stages_of(member) != stages; });
  }
  int64_t budget = stages.empty() ? kMaxInputsNotRun : view.limits.max_batch_tokens;
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
    int64_t left = InputsLeft(request);
    if (left == 0 || budget == 0) continue;
    if (to_begin(request)) left = InputsLeftAfter(request, view.cached(request).tokens);
    member.num_tokens = static_cast<int32_t>(std::min(left, budget));
    budget -= member.num_tokens;
  }
}

}  // namespace treadle
