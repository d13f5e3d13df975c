#include "scheduler/speculation.h"

#include <algorithm>
#include <vector>

#include "scheduler/masked_candidate.h"

namespace treadle {
namespace {

bool Ends(const Request& request, const Guess& guess) {
  return std::ranges::count(request.spec.end_tokens, guess.token) > 0;
}

}  // namespace

void Speculation::NoteToken(const Request& request, Sequence& sequence) const {
  if (request.spec.speculate == Speculate::kOff) return;
  if (sequence.drafter) return sequence.drafter->Append(sequence.output.back());
  sequence.drafter = make_(request, sequence);
}

// The probability above which one more row is worth its time, in an iteration of so many rows that
// brings so many tokens.
double Speculation::Worth(double tokens, double rows) const {
  return (cost_.per_row() + cost_.per_sample()) * tokens / cost_.Of({rows, 0, rows});
}

// The last token that the request may have is nobody's input.
int32_t Speculation::MostGuesses(const Request& request, const Sequence& sequence) {
  return std::min(kMaxDraft, request.spec.max_new_tokens - sequence.produced - 1);
}

// Guesses of its constraint, which leaves hardly a choice where it has any, or else its drafter's.
std::vector<Guess> Speculation::GuessesOf(const Sequence& sequence, int32_t count) {
  std::vector<Guess> guesses;
  if (sequence.masked) guesses = sequence.masked->Guesses(sequence.produced, count);
  return guesses.empty() ? sequence.drafter->Next(count) : guesses;
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
  const double worth = Worth(static_cast<double>(rows), static_cast<double>(rows));
  return std::ranges::any_of(live, [&](const auto& request) {
    return std::ranges::any_of(request->sequences, [&](const Sequence& sequence) {
      if (!sequence.drafter || sequence.finished || sequence.in_flight != 1) return false;
      if (MostGuesses(*request, sequence) < 2) return false;
      if (sequence.masked) return true;  // its constraint is not asked before there is a token
      const std::vector<Guess> guesses = GuessesOf(sequence, 2);  // the one in flight first
      return guesses.size() == 2 && guesses[1].probability > worth && !Ends(*request, guesses[0]) &&
             !Ends(*request, guesses[1]);
    });
  });
}

void Speculation::Choose(const Selection& selection) const {
  struct Candidate {
    Sequence* sequence;
    Guess guess;
  };
  std::vector<Candidate> candidates;
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
      for (const Guess& guess : GuessesOf(sequence, MostGuesses(*member.request, sequence))) {
        if (Ends(*member.request, guess)) break;
        candidates.push_back({&sequence, guess});
      }
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
