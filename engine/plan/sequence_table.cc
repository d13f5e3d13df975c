#include "engine/plan/sequence_table.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>
#include <variant>

#include "base/status.h"

namespace treadle {
namespace {

// How many pages a table of a ring names before it begins again; 0 if it is empty.
int64_t RingOf(const std::vector<int32_t>& table) {
  if (table.empty()) return 0;
  return std::find(table.begin() + 1, table.end(), table[0]) - table.begin();
}

}  // namespace

absl::Status SequenceTable::Check(const IterationPlan& plan) {
  ++check_;
  starting_.clear();
  for (const SequenceId sequence : plan.releases) TREADLE_RETURN_IF_ERROR(CheckRelease(sequence));
  for (const PageStore& store : plan.page_stores) {
    TREADLE_RETURN_IF_ERROR(CheckPage(store.page, PageKind::kWhole, "page store", store.tag));
  }
  for (const PageKind kind : kPageKinds) {
    for (const PageCopy& copy : plan.page_copies[kind]) {
      TREADLE_RETURN_IF_ERROR(CheckPage(copy.from, kind, "page copy from", copy.to));
      TREADLE_RETURN_IF_ERROR(CheckPage(copy.to, kind, "page copy to", copy.from));
    }
  }
  TREADLE_RETURN_IF_ERROR(CheckLive(plan));
  for (const SequenceStart& start : plan.starts) TREADLE_RETURN_IF_ERROR(CheckStart(start));
  for (const PageLoad& load : plan.page_loads) TREADLE_RETURN_IF_ERROR(CheckLoad(load));
  int64_t tokens = 0;
  for (const Step& step : plan.steps) {
    TREADLE_RETURN_IF_ERROR(CheckStep(step));
    tokens += step.num_tokens;
  }
  if (std::ranges::any_of(plan.replicas, [](int32_t replica) { return replica != 0; })) {
    return InvalidArgument("plan names replicas of stages, expected none: each has one");
  }
  if (tokens > limits_.max_batch_tokens && !plan.stages.empty()) {
    return InvalidArgument("plan has ", tokens, " tokens, expected at most ",
                           limits_.max_batch_tokens, " (max_batch_tokens)");
  }
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckRelease(SequenceId sequence) {
  const auto it = live_.find(sequence);
  if (it == live_.end()) return NotFound("release of unknown sequence ", sequence);
  if (it->second.released_in == check_) {
    return InvalidArgument("sequence ", sequence, " is released twice in one plan");
  }
  it->second.released_in = check_;
  return absl::OkStatus();
}

// Requires that the releases were checked.
absl::Status SequenceTable::CheckLive(const IterationPlan& plan) const {
  const PageCounts& exist = limits_.num_pages;
  const int64_t most =
      exist[PageKind::kWhole] > 0 ? exist[PageKind::kWhole] : exist[PageKind::kWindow];
  const int64_t live = std::ssize(live_) - std::ssize(plan.releases) + std::ssize(plan.starts);
  if (plan.starts.empty() || live <= most) return absl::OkStatus();
  return InvalidArgument("plan starts ", plan.starts.size(), " sequences, and has ", live,
                         " live then, expected at most ", most,
                         " (each has a page of the cache to itself)");
}

absl::Status SequenceTable::CheckStart(const SequenceStart& start) {
  const SequenceId id = start.sequence;
  const auto it = live_.find(id);
  if (it != live_.end() && it->second.released_in != check_) {
    return InvalidArgument("start of sequence ", id, ", which is live already");
  }
  if (!starting_.try_emplace(id, Starting{&start, false}).second) {
    return InvalidArgument("sequence ", id, " is started twice in one plan");
  }
  if (start.prompt_length < 1) {
    return InvalidArgument("start of sequence ", id, ": prompt length is ", start.prompt_length,
                           ", expected at least 1");
  }
  if (start.first_position < 0 || (start.mean_pooling && start.first_position > 0)) {
    return InvalidArgument("start of sequence ", id, ": first position is ", start.first_position,
                           ", expected 0", start.mean_pooling ? " (it is pooled)" : " or more");
  }
  TREADLE_RETURN_IF_ERROR(CheckPages(start));
  const size_t earlier = start.earlier_tokens.size();
  if (earlier != static_cast<size_t>(start.first_position)) {
    return InvalidArgument("start of sequence ", id, ": ", earlier,
                           " earlier tokens, expected one for each position before ",
                           start.first_position);
  }
  for (const int32_t token : start.earlier_tokens) {
    TREADLE_RETURN_IF_ERROR(CheckToken(token, "earlier token", id));
  }
  TREADLE_RETURN_IF_ERROR(CheckEntries(start.end_tokens.size(), "end tokens", id));
  for (const int32_t token : start.end_tokens) {
    TREADLE_RETURN_IF_ERROR(CheckToken(token, "end token", id));
  }
  return CheckSampling(start.sampling, id);
}

// Requires that the starts were checked.
absl::Status SequenceTable::CheckLoad(const PageLoad& load) const {
  const auto it = starting_.find(load.sequence);
  if (it == starting_.end()) {
    return NotFound("page load of sequence ", load.sequence, ", which the plan does not start");
  }
  const SequenceStart& start = *it->second.start;
  const int64_t before = std::min<int64_t>(start.first_position / limits_.page_size,
                                           std::ssize(start.pages[PageKind::kWhole]));
  if (load.index >= 0 && load.index < before) return absl::OkStatus();
  return InvalidArgument("page load ", load.index, " of sequence ", load.sequence,
                         ", expected one of the ", before, " whole pages before its first step");
}

absl::Status SequenceTable::CheckPages(const SequenceStart& start) const {
  const SequenceId id = start.sequence;
  const auto& whole = start.pages[PageKind::kWhole];
  const auto& window = start.pages[PageKind::kWindow];
  const PageCounts& exist = limits_.num_pages;
  const int64_t longest =
      exist[PageKind::kWindow] == 0 ? 0 : limits_.context / limits_.page_size + 1;
  const auto tables = [&](const auto&... expected) {
    return InvalidArgument("start of sequence ", id, ": ", whole.size(), " pages and ",
                           window.size(), " of a window, expected ", expected...);
  };
  if (std::ssize(whole) > exist[PageKind::kWhole] || std::ssize(window) > longest) {
    return tables("at most ", exist[PageKind::kWhole], " and ", longest);
  }
  if (exist[PageKind::kWhole] > 0 && exist[PageKind::kWindow] > 0 &&
      whole.size() != window.size()) {
    return tables("as many");
  }
  for (const PageKind kind : kPageKinds) {
    for (const int32_t page : start.pages[kind]) {
      TREADLE_RETURN_IF_ERROR(CheckPage(page, kind, "page", id));
    }
  }
  const int64_t ring = RingOf(window);
  for (int64_t i = ring; i < std::ssize(window); ++i) {
    if (window[i] == window[i - ring]) continue;
    return InvalidArgument("start of sequence ", id, ": page ", window[i], " of a window at ", i,
                           ", expected a ring of ", ring, " pages, which has ", window[i - ring]);
  }
  if (const int64_t capacity = CapacityOf(start.pages); capacity <= start.first_position) {
    return InvalidArgument("start of sequence ", id, ": its pages and the model's context hold ",
                           capacity, " positions, expected room for position ",
                           start.first_position);
  }
  return absl::OkStatus();
}

int64_t SequenceTable::CapacityOf(const SequencePages& pages) const {
  const int64_t table =
      std::max(std::ssize(pages[PageKind::kWhole]), std::ssize(pages[PageKind::kWindow]));
  return std::min(table * limits_.page_size, limits_.context);
}

// Checks what the backends rely on (SamplingParameters).
absl::Status SequenceTable::CheckSampling(const SamplingParameters& sampling, SequenceId id) const {
  TREADLE_RETURN_IF_ERROR(CheckEntries(sampling.logit_bias.size(), "logit biases", id));
  for (const LogitBias& bias : sampling.logit_bias) {
    TREADLE_RETURN_IF_ERROR(CheckToken(bias.token, "logit bias for token", id));
    if (!std::isfinite(bias.bias)) {
      return InvalidArgument("start of sequence ", id, ": logit bias for token ", bias.token,
                             " is ", bias.bias, ", expected a finite number");
    }
  }
  const SamplingParameters defaults;
  for (const SamplingField& field : kSamplingFields) {
    const auto value_in = [&](const SamplingParameters& parameters) {
      return std::visit([&](auto member) { return static_cast<double>(parameters.*member); },
                        field.member);
    };
    const double value = value_in(sampling);
    if (field.Allows(value) || value == value_in(defaults)) continue;
    return InvalidArgument("start of sequence ", id, ": ", field.name, " is ", value, ", expected ",
                           field.expected);
  }
  return absl::OkStatus();
}

absl::StatusOr<SequenceTable::Target> SequenceTable::FindTarget(SequenceId sequence) {
  if (const auto it = starting_.find(sequence); it != starting_.end()) {
    const bool stepped = std::exchange(it->second.stepped, true);
    const int32_t first = it->second.start->first_position;
    return Target{it->second.start, first, first, -1, stepped};
  }
  const auto it = live_.find(sequence);
  if (it == live_.end()) return NotFound("step of unknown sequence ", sequence);
  Entry& entry = it->second;
  if (entry.released_in == check_) {
    return InvalidArgument("step of sequence ", sequence, ", which the same plan releases");
  }
  const bool stepped = std::exchange(entry.stepped_in, check_) == check_;
  return Target{&entry.sequence.start(), entry.sequence.next_position(), entry.sequence.written(),
                entry.sequence.previous_sample(), stepped};
}

absl::Status SequenceTable::CheckStep(const Step& step) {
  const SequenceId id = step.sequence;
  TREADLE_ASSIGN_OR_RETURN(const Target target, FindTarget(id));
  if (target.stepped) return InvalidArgument("sequence ", id, " has two steps in one plan");
  if (step.num_tokens < 1) {
    return InvalidArgument("step of sequence ", id, ": ", step.num_tokens,
                           " tokens, expected at least 1");
  }
  if (step.first_position < target.start->first_position ||
      step.first_position > target.next_position) {
    return InvalidArgument("step of sequence ", id, ": first position is ", step.first_position,
                           ", expected ", target.start->first_position, " to ",
                           target.next_position);
  }
  const int64_t end = int64_t{step.first_position} + step.num_tokens;
  if (const int64_t capacity = CapacityOf(target.start->pages); end > capacity) {
    return InvalidArgument("step of sequence ", id, ": positions up to ", end - 1,
                           ", but its pages and the model's context hold ", capacity);
  }
  TREADLE_RETURN_IF_ERROR(CheckRing(step, target));
  TREADLE_RETURN_IF_ERROR(CheckOutputs(step));
  if (target.start->mean_pooling) TREADLE_RETURN_IF_ERROR(CheckPooling(step, target));
  return CheckStepTokens(step, target);
}

absl::Status SequenceTable::CheckOutputs(const Step& step) const {
  int32_t before = -1;
  for (const RowOutput& output : step.outputs) {
    const auto wrong = [&](const auto&... what) {
      return InvalidArgument("step of sequence ", step.sequence, ": output of row ", output.row,
                             what...);
    };
    if (output.row <= std::exchange(before, output.row) || output.row >= step.num_tokens) {
      return wrong(", expected rows of ", step.num_tokens, " in ascending order");
    }
    if (!output.sample && !output.hidden && output.target == -1) return wrong(" asks for nothing");
    if (output.masked && !output.sample) return wrong(" is masked, but samples nothing");
    if (output.target != -1) {
      TREADLE_RETURN_IF_ERROR(CheckToken(output.target, "target", step.sequence));
    }
    const auto allowed = [](int32_t top, int32_t least) {
      return top >= least && top <= kMaxTopLogprobs;
    };
    if (!allowed(output.top_logprobs, -1) || !allowed(output.target_logprobs, 0)) {
      return wrong(": ", output.top_logprobs, " and ", output.target_logprobs,
                   " log probabilities, expected at most ", kMaxTopLogprobs);
    }
  }
  return absl::OkStatus();
}

// Rows that the step's first row looks back at must be there until its last row is written.
absl::Status SequenceTable::CheckRing(const Step& step, const Target& target) const {
  const int64_t held = RingOf(target.start->pages[PageKind::kWindow]) * limits_.page_size;
  if (held == 0) return absl::OkStatus();
  const int64_t written = int64_t{step.first_position} + step.num_tokens;
  const int64_t end = limits_.in_order ? target.written : std::max(target.written, written);
  const int64_t seen = std::max<int64_t>(0, step.first_position - limits_.window + 1);
  if (end - seen <= held) return absl::OkStatus();
  return InvalidArgument("step of sequence ", step.sequence, ": position ", step.first_position,
                         " looks back to ", seen, ", but its ring of ", held,
                         " positions holds nothing before ", end - held);
}

absl::Status SequenceTable::CheckPooling(const Step& step, const Target& target) const {
  const bool follows = step.first_position == target.next_position && !step.tokens.empty();
  const bool alone = std::ranges::all_of(step.outputs, [&](const RowOutput& output) {
    return output.row == step.num_tokens - 1 && output.target == -1 && !output.sample;
  });
  if (follows && alone) return absl::OkStatus();
  return InvalidArgument("step of sequence ", step.sequence,
                         " is pooled, expected the tokens that follow, and no output but the mean ",
                         "at its last row");
}

absl::Status SequenceTable::CheckStepTokens(const Step& step, const Target& target) const {
  if (!step.tokens.empty()) {
    if (step.tokens.size() != static_cast<size_t>(step.num_tokens)) {
      return InvalidArgument("step of sequence ", step.sequence, ": ", step.tokens.size(),
                             " token ids, expected ", step.num_tokens);
    }
    for (const int32_t token : step.tokens) {
      TREADLE_RETURN_IF_ERROR(CheckToken(token, "token", step.sequence));
    }
    return absl::OkStatus();
  }
  if (step.num_tokens != 1) {
    return InvalidArgument("step of sequence ", step.sequence, ": no token ids for ",
                           step.num_tokens,
                           " tokens; only one token can be the sequence's previous sample");
  }
  if (target.previous_sample == -1 || step.first_position != target.next_position) {
    return InvalidArgument("step of sequence ", step.sequence, " runs its previous sample at ",
                           step.first_position, ", but there is none for that position");
  }
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckPage(int32_t page, PageKind kind, const char* what,
                                      uint64_t id) const {
  if (page >= 0 && page < limits_.num_pages[kind]) return absl::OkStatus();
  return InvalidArgument(what, " ", page, " (of ", id, ") is not a page, expected 0 to ",
                         limits_.num_pages[kind] - 1);
}

absl::Status SequenceTable::CheckToken(int32_t token, const char* what, uint64_t id) const {
  if (token >= 0 && token < limits_.vocab) return absl::OkStatus();
  return InvalidArgument(what, " ", token, " of sequence ", id,
                         " is outside the vocabulary, expected 0 to ", limits_.vocab - 1);
}

absl::Status SequenceTable::CheckEntries(size_t entries, const char* what, SequenceId id) const {
  if (entries <= static_cast<size_t>(limits_.vocab)) return absl::OkStatus();
  return InvalidArgument("start of sequence ", id, ": ", entries, " ", what,
                         ", expected at most one for each of ", limits_.vocab, " tokens");
}

void SequenceTable::Release(SequenceId sequence) { TREADLE_CHECK(live_.erase(sequence) == 1); }

absl::Status SequenceTable::Start(std::span<const SequenceStart> starts) {
  size_t started = 0;
  try {
    for (; started < starts.size(); ++started) {
      const SequenceStart& start = starts[started];
      Entry entry{LiveSequence(start, CapacityOf(start.pages))};
      TREADLE_CHECK(live_.try_emplace(start.sequence, std::move(entry)).second);
    }
    return absl::OkStatus();
  } catch (const std::bad_alloc&) {
    for (const SequenceStart& start : starts.first(started)) Release(start.sequence);
    return ResourceExhausted("no memory for sequence ", starts[started].sequence, " of at most ",
                             CapacityOf(starts[started].pages), " positions");
  }
}

LiveSequence* SequenceTable::Find(SequenceId sequence) {
  const auto it = live_.find(sequence);
  return it == live_.end() ? nullptr : &it->second.sequence;
}

LiveSequence& SequenceTable::At(SequenceId sequence) {
  LiveSequence* const live = Find(sequence);
  TREADLE_CHECK(live != nullptr);
  return *live;
}

}  // namespace treadle
