#include "bench/simulate/recorded_plans.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/simulate/virtual_engine.h"
#include "engine/kv/kv_slot_manager.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"
#include "engine/record/recorded_requests.h"
#include "scheduler/loop_core.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNever = std::numeric_limits<double>::infinity();

struct RecordedRequest {
  double arrival = -1;  // seconds since the ledger began; -1: not known
  RequestSpec spec;
  int32_t output_tokens = 0;
  bool by_length = false;  // why it ended
};

struct RecordedIteration {
  std::string plan;  // its message's bytes
  bool has_steps = false;
  std::optional<IterationResult> result;
  double done = -1;  // when the loop had its result
};

// All that the recording says, as far as it is needed here.
class Contents {
 public:
  absl::Status Read(std::string_view recording, const KvPaging& paging) {
    TREADLE_ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(recording));
    record::Entry entry;
    while (true) {
      TREADLE_ASSIGN_OR_RETURN(const bool more, reader.Next(entry));
      if (!more) break;
      TREADLE_RETURN_IF_ERROR(Take(entry));
    }
    for (const IterationPlan& plan : plans_) TREADLE_RETURN_IF_ERROR(TakeRequests(plan, paging));
    // Times are in 9 digits: what differs by less was one turn of the loop, which took requests in
    // the order of their numbers, and perhaps a result.
    double before = -1;
    for (auto& [id, request] : requests_) {
      double& arrival = request.arrival;
      if (arrival < 0) {
        return InvalidArgument("request ", id,
                               " did not end by itself while it was recorded; "
                               "expected a recording of requests that all did");
      }
      const auto same = [&](double time) {
        return std::abs(time - arrival) < 2e-7 + 1e-8 * arrival;
      };
      for (const RecordedIteration& iteration : iterations_) {
        if (same(iteration.done)) arrival = iteration.done;
      }
      if (same(before)) arrival = before;
      before = arrival;
    }
    return absl::OkStatus();
  }

  std::map<uint64_t, RecordedRequest>& requests() { return requests_; }
  std::vector<RecordedIteration>& iterations() { return iterations_; }

 private:
  absl::Status Take(const record::Entry& entry) {
    if (entry.has_restored() || entry.has_epoch_end()) {
      return InvalidArgument(
          "the recording does not begin with the first plan, or has several "
          "epochs; expected one epoch from its beginning");
    }
    if (entry.has_masks()) {
      return InvalidArgument("the recording has constrained answers, expected none");
    }
    if (entry.has_plan()) {
      TREADLE_ASSIGN_OR_RETURN(IterationPlan plan, DecodePlan(entry.plan()));
      if (plan.iteration != iterations_.size()) {
        return InvalidArgument("the recording has plan ", plan.iteration, ", expected ",
                               iterations_.size(), ", one epoch from its beginning");
      }
      iterations_.push_back({.plan = entry.plan().SerializeAsString(),
                             .has_steps = !plan.steps.empty(),
                             .result = {}});
      names_.Follow(plan);
      plans_.push_back(std::move(plan));
    } else if (entry.has_result()) {
      TREADLE_ASSIGN_OR_RETURN(IterationResult result, DecodeResult(entry.result()));
      if (result.iteration < iterations_.size()) {
        iterations_[result.iteration].result = std::move(result);
      }
    } else if (!entry.ledger().empty()) {
      names_.Follow(entry.ledger());
      return TakeLine(entry.ledger());
    }
    return absl::OkStatus();
  }

  absl::Status TakeLine(const std::string& text) {
    const Json line = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    try {
      const auto iteration = line.at("iteration").get<uint64_t>();
      const auto time = line.at("time").get<double>();
      if (iteration < iterations_.size()) iterations_[iteration].done = time;
      for (const Json& arrival : line.at("arrivals")) {
        requests_[arrival.at("request").get<uint64_t>()];
      }
      for (const Json& end : line.at("ends")) {
        const auto reason = end.at("reason").get<std::string>();
        if (reason != "length" && reason != "stop") continue;
        RecordedRequest& request = requests_[end.at("request").get<uint64_t>()];
        request.arrival = time - end.at("total").get<double>();
        request.output_tokens = end.at("output_tokens").get<int32_t>();
        request.by_length = reason == "length";
      }
    } catch (const Json::exception& error) {
      return InvalidArgument("the recording has a line of the ledger that cannot be read: ",
                             error.what());
    }
    return absl::OkStatus();
  }

  absl::Status TakeRequests(const IterationPlan& plan, const KvPaging& paging) {
    for (const SequenceStart& start : plan.starts) {
      const auto id = names_.RequestOf(plan.epoch, start.sequence);
      if (!id) continue;
      RecordedRequest& request = requests_[*id];
      RequestSpec& spec = request.spec;
      owners_[start.sequence] = &request;
      spec.candidates = std::max(spec.candidates, static_cast<int32_t>(start.candidate) + 1);
      if (start.candidate > 0) continue;
      spec.prompt.resize(start.prompt_length);
      std::ranges::copy(start.earlier_tokens, spec.prompt.begin());
      spec.sampling = start.sampling;
      spec.min_new_tokens = start.min_new_tokens;
      spec.end_tokens = start.end_tokens;
      // As many as it ran, or as its pages have room for: those that it reserved.
      const int64_t pages =
          std::ssize(start.pages[paging.whole ? PageKind::kWhole : PageKind::kWindow]);
      const int64_t room = pages * paging.page_size - start.prompt_length;
      spec.max_new_tokens = request.by_length ? request.output_tokens : static_cast<int32_t>(room);
    }
    for (const Step& step : plan.steps) {
      const auto owner = owners_.find(step.sequence);
      if (owner == owners_.end()) continue;
      RequestSpec& spec = owner->second->spec;
      for (size_t i = 0; i < step.tokens.size(); ++i) {
        const size_t position = static_cast<size_t>(step.first_position) + i;
        if (position < spec.prompt.size()) spec.prompt[position] = step.tokens[i];
      }
      for (const RowOutput& output : step.outputs) {
        if (output.sample) spec.top_logprobs = output.top_logprobs;
      }
    }
    return absl::OkStatus();
  }

  std::map<uint64_t, RecordedRequest> requests_;  // by number, which is the order of arrival
  std::vector<RecordedIteration> iterations_;
  std::vector<IterationPlan> plans_;
  RecordedRequests names_;
  std::map<SequenceId, RecordedRequest*> owners_;
};

std::string StepsOf(const IterationPlan& plan) {
  std::string steps;
  for (const Step& step : plan.steps) {
    steps += Str(steps.empty() ? "" : ", ", "sequence ", step.sequence, " from ",
                 step.first_position, " by ", step.num_tokens);
  }
  return steps.empty() ? "no steps" : steps;
}

class Run {
 public:
  Run(Contents& contents, const RecordedScheduling& scheduling, std::unique_ptr<Policy> policy)
      : contents_(contents),
        policy_(std::move(policy)),
        engine_(clock_,
                {.stages = scheduling.limits.stages,
                 .depth = scheduling.limits.depth,
                 .seconds = {},
                 .answer = [this](const IterationPlan& plan,
                                  IterationResult& result) { return Answer(plan, result); }}),
        kv_(scheduling.pages, scheduling.paging,
            scheduling.prefix_cache ? scheduling.pages : PageCounts()),
        pool_(std::max<int64_t>(1, std::ssize(contents.requests()))),
        loop_(engine_, kv_, pool_, *policy_, ledger_, clock_,
              {.limits = scheduling.limits, .heartbeat = kHeartbeat}) {
    report_.recorded = std::ssize(contents.iterations());
    report_.requests = std::ssize(contents.requests());
  }

  absl::StatusOr<PlanComparison> All() {
    auto next = contents_.requests().begin();
    const auto end = contents_.requests().end();
    while (report_.difference.empty()) {
      const double arrival = next == end ? kNever : next->second.arrival;
      double time = std::min(arrival, engine_.NextDone().value_or(kNever));
      // A plan without steps is a heartbeat: it is due a time after the last plan.
      const auto& plans = contents_.iterations();
      const auto made = static_cast<size_t>(report_.plans);
      const bool beats = made < plans.size() && !plans[made].has_steps;
      if (beats && engine_.HasRoom()) time = std::min(time, std::max(submitted_ + 1, now_));
      if (time == kNever) break;
      clock_.Set(now_ = time);
      for (; next != end && next->second.arrival <= time; ++next) {
        TREADLE_RETURN_IF_ERROR(pool_.Submit(next->second.spec).status());
      }
      loop_.Turn();
    }
    if (report_.difference.empty() && report_.plans < report_.recorded) {
      report_.difference = Str("plan ", report_.plans, " is not made");
    }
    return report_;
  }

 private:
  static constexpr std::chrono::seconds kHeartbeat{1};

  // Compares a plan, and answers it as it was answered.
  double Answer(const IterationPlan& plan, IterationResult& result) {
    submitted_ = now_;
    const auto index = static_cast<size_t>(report_.plans);
    if (!report_.difference.empty() || index >= contents_.iterations().size()) return kNever;
    RecordedIteration& recorded = contents_.iterations()[index];
    proto::Plan message;
    EncodePlan(plan, message);
    if (message.SerializeAsString() != recorded.plan) {
      proto::Plan was;
      was.ParseFromString(recorded.plan);
      const auto decoded = DecodePlan(was);
      report_.difference = Str("plan ", index, " has ", StepsOf(plan), "; recorded ",
                               decoded.ok() ? StepsOf(*decoded) : "one that cannot be read");
      return kNever;
    }
    ++report_.plans;
    if (!recorded.result || recorded.done < 0) return kNever;  // the recording ends
    result = std::move(*recorded.result);
    return recorded.done;
  }

  Contents& contents_;
  PlanComparison report_;
  double now_ = 0, submitted_ = 0;
  VirtualClock clock_;
  const std::unique_ptr<Policy> policy_;
  VirtualEngine engine_;
  KvSlotManager kv_;
  RequestPool pool_;
  Ledger ledger_{1};
  LoopCore loop_;
};

}  // namespace

absl::StatusOr<PlanComparison> ComparePlans(std::string_view recording,
                                            const RecordedScheduling& scheduling) {
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Policy> policy, Policy::Create(scheduling.policy));
  Contents contents;
  TREADLE_RETURN_IF_ERROR(contents.Read(recording, scheduling.paging));
  return Run(contents, scheduling, std::move(policy)).All();
}

}  // namespace treadle
