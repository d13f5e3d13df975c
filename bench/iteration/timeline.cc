#include "bench/iteration/timeline.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "scheduler/loop_core.h"

namespace treadle {
namespace {

using Kind = TraceEvent::Kind;
using std::chrono::milliseconds;

constexpr std::chrono::minutes kPatience{10};
constexpr std::chrono::seconds kLateEvents{2};

// A scheduler around the engine, turned by hand.
class Driver {
 public:
  Driver(Engine& engine, const TimelineOptions& options, std::unique_ptr<Policy> policy)
      : options_(options),
        engine_(engine),
        kv_(options.total_pages, options.paging),
        pool_(std::make_shared<RequestPool>(options.requests)),
        policy_(std::move(policy)),
        loop_(engine, kv_, *pool_, *policy_, ledger_, TimeSource::Steady(),
              {.limits = {.max_batch_size = options.max_batch_size,
                          .max_batch_tokens = options.max_batch_tokens}}) {}

  absl::Status Start() {
    return engine_.Start([pool = pool_] { pool->Wake(); });
  }

  // All requests from prompt to last token.
  absl::Status Run() {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int32_t i = 0; i < options_.requests; ++i) {
      TREADLE_ASSIGN_OR_RETURN(RequestPool::Submitted submitted, pool_->Submit(Spec(i)));
      streams.push_back(std::move(submitted.stream));
    }
    while (!streams.empty()) {
      loop_.Wait();
      loop_.Turn();
      absl::Status failed;
      std::erase_if(streams, [&](const std::shared_ptr<TokenStream>& stream) {
        const StreamBatch batch = stream->Take();
        if (batch.ended) failed.Update(batch.status);
        return batch.ended;
      });
      TREADLE_RETURN_IF_ERROR(failed);
    }
    return absl::OkStatus();
  }

  // Until all stages told of the last iteration, or no more can be expected.
  std::vector<TraceEvent> CollectTrace() {
    std::vector<TraceEvent> all;
    const Clock::time_point patience = Clock::now() + kLateEvents;
    while (true) {
      std::vector<TraceEvent> events = engine_.TakeTrace();
      const bool news = !events.empty();
      all.insert(all.end(), events.begin(), events.end());
      if ((!news && Complete(all)) || Clock::now() > patience) return all;
      pool_->WaitForNews(Clock::now() + milliseconds(50));
    }
  }

 private:
  RequestSpec Spec(int32_t request) const {
    RequestSpec spec;
    for (int32_t i = 0; i < options_.prompt_tokens; ++i) {
      spec.prompt.push_back((request * 131 + i * 17) % options_.vocab);
    }
    spec.max_new_tokens = options_.new_tokens;
    spec.deadline = Clock::now() + kPatience;
    return spec;
  }

  bool Complete(const std::vector<TraceEvent>& events) const {
    uint64_t last = 0;
    for (const TraceEvent& event : events) last = std::max(last, event.iteration);
    std::set<int32_t> stages;
    for (const TraceEvent& event : events) {
      if (event.iteration == last) stages.insert(event.stage);
    }
    return static_cast<int>(stages.size()) == engine_.stages();
  }

  const TimelineOptions options_;
  Engine& engine_;
  KvSlotManager kv_;
  const std::shared_ptr<RequestPool> pool_;  // the engine's threads may wake it for longer
  Ledger ledger_;
  const std::unique_ptr<Policy> policy_;
  LoopCore loop_;
};

// Tracing begins and ends in the middle of iterations: those that not every rank told of go.
void DropPartial(std::vector<TraceEvent>& events) {
  using Rank = std::pair<int32_t, int32_t>;
  std::set<Rank> ranks;
  std::map<std::pair<uint64_t, uint64_t>, std::set<Rank>> told;
  for (const TraceEvent& event : events) {
    ranks.insert({event.stage, event.rank});
    told[{event.epoch, event.iteration}].insert({event.stage, event.rank});
  }
  std::erase_if(events, [&](const TraceEvent& event) {
    return told[{event.epoch, event.iteration}].size() < ranks.size();
  });
}

}  // namespace

absl::StatusOr<std::vector<TraceEvent>> RecordTimeline(Engine& engine,
                                                       const TimelineOptions& options) {
  const int64_t tokens = int64_t{options.prompt_tokens} + options.new_tokens;
  const PageCounts pages = options.paging.PagesFor(tokens);
  if (!pages.FitsIn(options.total_pages)) {
    return ResourceExhausted("timeline: a request of ", tokens, " tokens needs ", pages,
                             " K/V pages, ", options.total_pages, " exist");
  }
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Policy> policy, Policy::Create("fcfs"));
  Driver driver(engine, options, std::move(policy));
  TREADLE_RETURN_IF_ERROR(driver.Start());
  TREADLE_RETURN_IF_ERROR(driver.Run());
  engine.SetTracing(true);
  TREADLE_RETURN_IF_ERROR(driver.Run());
  std::vector<TraceEvent> events = driver.CollectTrace();
  engine.SetTracing(false);
  DropPartial(events);
  std::ranges::stable_sort(events, {}, [](const TraceEvent& event) {
    return std::make_tuple(event.stage, event.rank, event.begin);
  });
  return events;
}

std::string ToChromeTrace(const std::vector<TraceEvent>& events) {
  using Json = nlohmann::json;
  int64_t origin = 0;
  std::set<std::pair<int32_t, int32_t>> rows;
  for (const TraceEvent& event : events) {
    origin = rows.empty() ? event.begin : std::min(origin, event.begin);
    rows.insert({event.stage, event.rank});
  }
  const auto microseconds = [&](int64_t time) { return static_cast<double>(time - origin) / 1e3; };
  Json list = Json::array();
  const auto name = [&](const char* what, int32_t stage, int32_t rank, std::string text) {
    list.push_back({{"ph", "M"},
                    {"name", what},
                    {"pid", stage},
                    {"tid", rank},
                    {"args", {{"name", std::move(text)}}}});
  };
  for (const auto& [stage, rank] : rows) {
    if (rank == 0) name("process_name", stage, rank, Str("stage ", stage));
    name("thread_name", stage, rank, Str("rank ", rank));
  }
  for (const TraceEvent& event : events) {
    Json json = {{"name", event.name()},
                 {"cat", event.name()},
                 {"pid", event.stage},
                 {"tid", event.rank},
                 {"ts", microseconds(event.begin)},
                 {"args", {{"epoch", event.epoch}, {"iteration", event.iteration}}}};
    if (event.kind != Kind::kPlan) {
      json["ph"] = "X";
      json["dur"] = static_cast<double>(event.end - event.begin) / 1e3;
      list.push_back(std::move(json));
      continue;
    }
    json["ph"] = "b";
    json["id"] = Str(event.stage, ".", event.rank, ".", event.epoch, ".", event.iteration);
    list.push_back(json);
    json["ph"] = "e";
    json["ts"] = microseconds(event.end);
    list.push_back(std::move(json));
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(list)}}.dump() + "\n";
}

std::string ToTable(const std::vector<TraceEvent>& events) {
  struct Row {
    std::array<double, std::size(TraceEvent::kNames)> ms{};
    int64_t iterations = 0;
    int64_t begin = INT64_MAX;
    int64_t end = INT64_MIN;
  };
  std::map<std::pair<int32_t, int32_t>, Row> rows;
  for (const TraceEvent& event : events) {
    Row& row = rows[{event.stage, event.rank}];
    row.ms[static_cast<size_t>(event.kind)] += static_cast<double>(event.end - event.begin) / 1e6;
    if (event.kind == Kind::kPlan) continue;
    row.iterations += event.kind == Kind::kForward ? 1 : 0;
    row.begin = std::min(row.begin, event.begin);
    row.end = std::max(row.end, event.end);
  }
  std::string text =
      "stage rank iterations   receive   forward      send    sample (ms)  computes\n";
  for (const auto& [place, row] : rows) {
    const auto ms = [&](Kind kind) { return row.ms[static_cast<size_t>(kind)]; };
    const double total = static_cast<double>(row.end - row.begin) / 1e6;
    const double share = total > 0 ? (ms(Kind::kForward) + ms(Kind::kSample)) / total : 0;
    absl::StrAppendFormat(&text, "%5d %4d %10d %9.2f %9.2f %9.2f %9.2f %13.1f%%\n", place.first,
                          place.second, row.iterations, ms(Kind::kReceive), ms(Kind::kForward),
                          ms(Kind::kSend), ms(Kind::kSample), 100 * share);
  }
  return text;
}

}  // namespace treadle
