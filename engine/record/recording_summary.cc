// Summarize and DumpRequest of replay.h.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "base/quoted.h"
#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"
#include "engine/record/replay.h"

namespace treadle {
namespace {

constexpr int64_t kMaxStages = 1 << 12, kMaxBatchTokens = 1 << 20;
constexpr size_t kMaxShownEpochs = 16;  // in an error

absl::StatusOr<RecordedSetup> SetupOf(const record::Header& header) {
  RecordedSetup setup;
  setup.version = header.version();
  setup.fingerprint = header.fingerprint();
  setup.backend = header.backend();
  setup.configuration = header.configuration();
  setup.end_layers.assign(header.end_layer().begin(), header.end_layer().end());
  setup.max_batch_tokens = header.max_batch_tokens();
  setup.max_context = header.max_context();
  setup.kv_pages = DecodePages(header.pages());
  const bool ascend = std::ranges::adjacent_find(setup.end_layers, std::greater_equal<>()) ==
                      setup.end_layers.end();
  if (setup.end_layers.empty() || std::ssize(setup.end_layers) > kMaxStages || !ascend ||
      setup.end_layers[0] < 1) {
    return InvalidArgument("the recording's stages are none, expected ascending layers");
  }
  if (setup.max_batch_tokens < 1 || setup.max_batch_tokens > kMaxBatchTokens) {
    return InvalidArgument("the recording's iterations have ", setup.max_batch_tokens,
                           " tokens at most, expected 1 to ", kMaxBatchTokens);
  }
  return setup;
}

void NotePages(const IterationPlan& plan, PageCounts& used) {
  for (const PageKind kind : kPageKinds) {
    const auto note = [&](int32_t page) {
      used[kind] = std::max<int64_t>(used[kind], page + int64_t{1});
    };
    for (const SequenceStart& start : plan.starts) {
      for (const int32_t page : start.pages[kind]) note(page);
    }
    for (const PageCopy& copy : plan.page_copies[kind]) {
      note(copy.from);
      note(copy.to);
    }
  }
}

// The plan that an entry tells of, if it does.
absl::StatusOr<std::optional<IterationPlan>> PlanIn(const record::Entry& entry) {
  if (!entry.has_plan() && !entry.has_restored()) return std::nullopt;
  TREADLE_ASSIGN_OR_RETURN(IterationPlan plan,
                           DecodePlan(entry.has_plan() ? entry.plan() : entry.restored()));
  return plan;
}

// Calls `handle` for each entry; gives the bytes that are cut off.
template <typename Handle>
absl::StatusOr<size_t> ForEachEntry(std::string_view recording, const Handle& handle) {
  TREADLE_ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(recording));
  record::Entry entry;
  while (true) {
    TREADLE_ASSIGN_OR_RETURN(const bool there, reader.Next(entry));
    if (!there) return reader.cut_off();
    TREADLE_RETURN_IF_ERROR(handle(entry));
  }
}

class Dump {
 public:
  Dump(const RecordedRequests& requests, uint64_t wanted,
       std::function<std::string(int32_t)> text_of)
      : requests_(requests), wanted_(wanted), text_of_(std::move(text_of)) {}

  void Plan(IterationPlan plan, double time) {
    for (const SequenceStart& start : plan.starts) {
      if (requests_.RequestOf(plan.epoch, start.sequence) == wanted_) Start(plan, start, time);
    }
    plans_[{plan.epoch, plan.iteration}] = std::move(plan);
  }

  void Result(const IterationResult& result, double time) {
    const auto plan = plans_.extract({result.epoch, result.iteration});
    if (plan.empty()) return;
    const std::vector<Step>& steps = plan.mapped().steps;
    for (size_t i = 0; i < std::min(steps.size(), result.steps.size()); ++i) {
      if (requests_.RequestOf(result.epoch, steps[i].sequence) != wanted_) continue;
      Begin(result.epoch, result.iteration, steps[i].sequence, time);
      text_ += Str(" positions ", steps[i].first_position, "-",
                   steps[i].first_position + steps[i].num_tokens - 1, ", tokens");
      for (const int32_t token : steps[i].tokens) text_ += Shown(token);
      if (steps[i].tokens.empty()) text_ += " as sampled";
      const std::vector<RowOutput>& asked = steps[i].outputs;
      const std::vector<RowResult>& given = result.steps[i].outputs;
      for (size_t k = 0; k < std::min(asked.size(), given.size()); ++k) {
        if (!asked[k].sample) continue;
        text_ += " ->" + Shown(given[k].token);
        if (asked[k].top_logprobs >= 0) text_ += Str(" log probability ", given[k].detail.logprob);
      }
      text_ += "\n";
    }
  }

  void Ledger(const std::string& line) { text_ += RecordedRequests::TextOf(line, wanted_); }

  void EpochEnd(const record::EpochEnd& end) {
    text_ += Str("epoch ", end.epoch(), " ended: ", end.reason(), "\n");
  }

  std::string TakeText() { return std::move(text_); }

 private:
  std::string Shown(int32_t token) const {
    return text_of_ ? Str(" ", token, " ", Quoted(text_of_(token))) : Str(" ", token);
  }

  void Begin(uint64_t epoch, uint64_t iteration, SequenceId sequence, double time) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3f", time);
    text_ += Str(seconds, " s epoch ", epoch, " iteration ", iteration, " sequence ", sequence);
  }

  void Start(const IterationPlan& plan, const SequenceStart& start, double time) {
    Begin(plan.epoch, plan.iteration, start.sequence, time);
    text_ += Str(" starts: candidate ", start.candidate, ", prompt of ", start.prompt_length,
                 " tokens, seed ", start.sampling.seed);
    for (const SamplingField& field : kSamplingFields) {
      std::visit([&](auto member) { text_ += Str(", ", field.name, " ", start.sampling.*member); },
                 field.member);
    }
    text_ += "\n";
  }

  const RecordedRequests& requests_;
  const uint64_t wanted_;
  const std::function<std::string(int32_t)> text_of_;
  std::map<std::pair<uint64_t, uint64_t>, IterationPlan> plans_;
  std::string text_;
};

}  // namespace

absl::StatusOr<RecordingSummary> Summarize(std::string_view recording) {
  RecordingSummary summary;
  bool begun = false;
  const auto handle = [&](const record::Entry& entry) -> absl::Status {
    if (entry.has_header() == begun) {
      return InvalidArgument("the recording does not begin with its header");
    }
    TREADLE_ASSIGN_OR_RETURN(const std::optional<IterationPlan> plan, PlanIn(entry));
    if (plan) {
      summary.requests.Follow(*plan);
      NotePages(*plan, summary.pages_used);
    }
    if (entry.has_header()) {
      TREADLE_ASSIGN_OR_RETURN(summary.setup, SetupOf(entry.header()));
      begun = true;
    } else if (entry.has_plan()) {
      ++summary.unanswered;
    } else if (entry.has_result()) {
      const RecordedPlace place{entry.result().epoch(), entry.result().iteration()};
      summary.last = place;
      RecordedRange& range =
          summary.epochs.try_emplace(place.epoch, RecordedRange{place.iteration, place.iteration})
              .first->second;
      range.first = std::min(range.first, place.iteration);
      range.last = std::max(range.last, place.iteration);
      ++summary.iterations;
      --summary.unanswered;
    } else if (entry.has_epoch_end()) {
      summary.epoch_ends.push_back(
          Str("epoch ", entry.epoch_end().epoch(), ": ", entry.epoch_end().reason()));
    } else if (entry.has_adapter()) {
      const record::Adapter& adapter = entry.adapter();
      summary.adapters[adapter.id()] = {adapter.id(), adapter.path(), adapter.hash()};
    } else if (entry.has_ledger()) {
      summary.requests.Follow(entry.ledger());
    } else if (entry.has_end()) {
      summary.end = entry.end();
    }
    return absl::OkStatus();
  };
  TREADLE_ASSIGN_OR_RETURN(summary.cut_off, ForEachEntry(recording, handle));
  if (!begun) return InvalidArgument("the recording ends before its header");
  const PageCounts& exist = summary.setup.kv_pages;
  if (!summary.pages_used.FitsIn(exist)) {
    return InvalidArgument("the recording's plans name pages beyond ", exist,
                           ", which is how many there were");
  }
  return summary;
}

absl::Status RecordingSummary::CheckPlace(const RecordedPlace& place) const {
  if (epochs.empty()) {
    return absl::NotFoundError("the recording has no iteration with a result");
  }
  const auto epoch = epochs.find(place.epoch);
  if (epoch != epochs.end() && place.iteration >= epoch->second.first &&
      place.iteration <= epoch->second.last) {
    return absl::OkStatus();
  }
  std::string known;
  size_t shown = 0;
  for (const auto& [number, range] : epochs) {
    // The first epochs and the last one, if there are many.
    if (++shown == kMaxShownEpochs && epochs.size() > kMaxShownEpochs) known += ", ...";
    if (shown >= kMaxShownEpochs && shown < epochs.size()) continue;
    known +=
        Str(known.empty() ? "" : ", ", number, " (iteration",
            range.first == range.last ? "" : Str("s ", range.first, " to"), " ", range.last, ")");
  }
  return NotFound("iteration ", place.iteration, " of epoch ", place.epoch,
                  " is not in the recording, expected one of epoch ", known);
}

absl::StatusOr<std::string> DumpRequest(std::string_view recording, const std::string& request,
                                        std::function<std::string(int32_t token)> text_of) {
  TREADLE_ASSIGN_OR_RETURN(const RecordingSummary summary, Summarize(recording));
  TREADLE_ASSIGN_OR_RETURN(const uint64_t wanted, summary.requests.Find(request));
  Dump dump(summary.requests, wanted, std::move(text_of));
  const auto handle = [&](const record::Entry& entry) -> absl::Status {
    const double time = static_cast<double>(entry.nanoseconds()) / 1e9;
    TREADLE_ASSIGN_OR_RETURN(std::optional<IterationPlan> plan, PlanIn(entry));
    if (plan) {
      dump.Plan(*std::move(plan), time);
    } else if (entry.has_result()) {
      TREADLE_ASSIGN_OR_RETURN(const IterationResult result, DecodeResult(entry.result()));
      dump.Result(result, time);
    } else if (entry.has_ledger()) {
      dump.Ledger(entry.ledger());
    } else if (entry.has_epoch_end()) {
      dump.EpochEnd(entry.epoch_end());
    }
    return absl::OkStatus();
  };
  TREADLE_RETURN_IF_ERROR(ForEachEntry(recording, handle).status());
  return dump.TakeText();
}

}  // namespace treadle
