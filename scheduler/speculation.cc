#include "scheduler/speculation.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "scheduler/request/masked_candidate.h"

namespace treadle {
namespace {

bool Ends(const Request& request, const Guess& guess) {
  return std::ranges::count(request.spec.end_tokens, guess.token) > 0;
}

}  // namespace

void Speculation::NoteToken(const Request& request, Sequence& sequence) const {
  if (request.spec.speculate == Speculate::kOff) return;
  if (sequence.drafter) return sequence.drafter->Append(sequence.output.back());
  const bool by_model = request.spec.speculate == Speculate::kDraft && model_ != nullptr;
  sequence.drafter = by_model ? model_->Make(request, sequence) : make_(request, sequence);
}

size_t Speculation::TakeDraft(Request& request, Sequence& sequence,
                              std::span<const RowResult> samples) {
  const std::vector<int32_t> draft = std::exchange(sequence.draft, {});
  const size_t sure = sequence.masked ? sequence.masked->sure_rows() : samples.size();
  size_t right = 0;
  while (right < draft.size() && right + 1 < sure && samples[right].token == draft[right]) ++right;
  request.draft_tokens += static_cast<int32_t>(draft.size());
  request.accepted_draft_tokens += static_cast<int32_t>(right);
  return draft.size() - right;
}

// The probability above which one more row is worth its time, in an iteration of so many rows that
// brings so many tokens.
double Speculation::Worth(double tokens, double rows) const {
  return cost_.per_token() * tokens / cost_.Of({rows, 0, rows});
}

// The last token that the request may have is nobody's input.
int32_t Speculation::MostGuesses(const Request& request, const Sequence& sequence) {
  return std::min(kMaxDraft, request.spec.max_new_tokens - sequence.produced - 1);
}

// How far the draft model runs ahead of each sequence, beside an iteration of so many rows that
// brings so many tokens. Empty: it is not worth its time.
std::vector<DraftModel::Wanted> Speculation::WorthDrafting(std::span<const Promising> sequences,
                                                           double tokens, double rows) const {
  std::vector<DraftModel::Wanted> wanted;
  std::vector<double> reached;  // the probability that all guesses so far are right
  for (const Promising& one : sequences) {
    wanted.push_back({one.drafter, 0});
    reached.push_back(1);
  }
  double seconds = cost_.Of({rows, 0, rows}),
         room = static_cast<double>(limits_.max_batch_tokens) - rows;
  const double per_row = cost_.per_token() + model_->cost().per_token();
  for (int32_t ahead = 0; ahead < kMaxDraft; ++ahead) {
    std::vector<size_t> worth;
    double gain = 0;
    for (size_t i = 0; i < sequences.size() && std::ssize(worth) + 1 <= room; ++i) {
      const double right = reached[i] * sequences[i].promise;
      if (wanted[i].count < ahead || ahead >= sequences[i].most) continue;
      if (right * seconds <= per_row * tokens) continue;
      worth.push_back(i);
      gain += right;
    }
    const auto more = static_cast<double>(worth.size());
    const double step = model_->cost().Of({more, 0, more}) + cost_.per_token() * more;
    if (gain * seconds <= step * tokens) break;
    for (const size_t i : worth) {
      ++wanted[i].count;
      reached[i] *= sequences[i].promise;
    }
    tokens += gain;
    seconds += step;
    room -= more;
  }
  std::erase_if(wanted, [](const DraftModel::Wanted& one) { return one.count == 0; });
  return wanted;
}

bool Speculation::WaitsForModel(std::span<const std::unique_ptr<Request>> live, double rows) const {
  if (model_ == nullptr) return false;
  std::vector<Promising> promising;
  for (const auto& request : live) {
    for (const Sequence& sequence : request->sequences) {
      if (!sequence.drafter || sequence.finished || sequence.in_flight != 1) continue;
      const double promise = sequence.drafter->Promise();
      const int32_t most = MostGuesses(*request, sequence) - 1;  // the one in flight comes first
      if (promise > 0 && most > 0) promising.push_back({sequence.drafter.get(), promise, most});
    }
  }
  return !WorthDrafting(promising, rows, rows).empty();
}

bool Speculation::Waits(std::span<const std::unique_ptr<Request>> live) const {
  // Else those whose guesses are being verified and the others would take turns.
  const bool verifying = std::ranges::any_of(live, [](const auto& request) {
    return std::ranges::any_of(request->sequences, IsVerifying);
  });
  if (verifying) return true;
  int64_t rows = 0;
  for (const auto& request : live) {
    if (request->state == RequestState::kFinished) continue;
    // A prompt fills the plan, and waits for nobody.
    if (request->state == RequestState::kWaiting || InInitiation(*request)) return false;
    rows += BatchSequences(*request);
  }
  if (WaitsForModel(live, static_cast<double>(rows))) return true;
  const double worth = Worth(static_cast<double>(rows), static_cast<double>(rows));
  return std::ranges::any_of(live, [&](const auto& request) {
    return std::ranges::any_of(request->sequences, [&](const Sequence& sequence) {
      if (!sequence.drafter || sequence.finished || sequence.in_flight != 1) return false;
      if (MostGuesses(*request, sequence) < 2) return false;
      if (sequence.masked) return true;  // its constraint is not asked before there is a token
      const std::vector<Guess> guesses = sequence.drafter->Next(2);  // the one in flight first
      return guesses.size() == 2 && guesses[1].probability > worth && !Ends(*request, guesses[0]) &&
             !Ends(*request, guesses[1]);
    });
  });
}

void Speculation::Choose(const Selection& selection, bool model_may_run) const {
  struct Candidate {
    Sequence* sequence;
    Guess guess;
  };
  struct Guessing {
    const Request* request;
    Sequence* sequence;
    std::vector<Guess> guesses;
  };
  std::vector<Candidate> candidates;
  std::vector<Guessing> guessing;
  std::vector<Promising> promising;
  int64_t planned = 0;
  for (const Selected& member : selection) {
    planned += member.num_tokens;
    for (Sequence& sequence : member.request->sequences) {
      if (sequence.in_flight > 0) continue;
      sequence.draft.clear();
      if (!sequence.drafter || InInitiation(*member.request) ||
          !HasTokenLeft(*member.request, sequence)) {
        continue;
      }
      guessing.push_back({member.request, &sequence, {}});
    }
  }
  // A constraint's guesses, which leaves hardly a choice where it has any, else the drafter's.
  for (auto& [request, sequence, guesses] : guessing) {
    const int32_t most = MostGuesses(*request, *sequence);
    if (sequence->masked) guesses = sequence->masked->Guesses(sequence->produced, most);
    if (!guesses.empty() || model_ == nullptr || !model_may_run || most <= 0) continue;
    const double promise = sequence->drafter->Promise();
    if (promise > 0) promising.push_back({sequence->drafter.get(), promise, most});
  }
  if (!promising.empty()) {
    const auto rows = static_cast<double>(planned);
    model_->Draft(WorthDrafting(promising, rows, rows));
  }
  for (auto& [request, sequence, guesses] : guessing) {
    if (guesses.empty()) guesses = sequence->drafter->Next(MostGuesses(*request, *sequence));
    for (const Guess& guess : guesses) {
      if (Ends(*request, guess)) break;
      candidates.push_back({sequence, guess});
    }
  }
  // A sequence's guesses stay in their order, for they are of falling probability.
  std::ranges::stable_sort(candidates, std::ranges::greater(),
                           [](const Candidate& row) { return row.guess.probability; });
  auto tokens = static_cast<double>(planned), rows = tokens;
  for (const auto& [sequence, guess] : candidates) {
    if (rows >= static_cast<double>(limits_.max_batch_tokens)) break;
    if (guess.probability <= Worth(tokens, rows)) break;
    sequence->draft.push_back(guess.token);
    tokens += guess.probability;
    ++rows;
  }
}

}  // namespace treadle
