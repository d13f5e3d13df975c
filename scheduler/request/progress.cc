#include "scheduler/request/progress.h"

#include <algorithm>

namespace treadle {
namespace {

constexpr int kLossOfNew = 4, kLossOfKnown = 1;

// Further candidates share the prompt but for its last position.
int32_t FirstPosition(const Request& request, const Sequence& sequence) {
  return sequence.candidate > 0 ? request.prompt_length() - 1 : 0;
}

bool InPrompt(const Request& request) {
  const Sequence& first = request.sequences[0];
  return first.next_position < request.prompt_length() && !first.sits_out;
}

}  // namespace

int32_t InputsLeft(const Request& request) {
  if (InPrompt(request)) return InputsLeftAfter(request, request.sequences[0].next_position);
  int32_t left = 0;
  for (const Sequence& sequence : request.sequences) {
    if (!sequence.finished) left += std::max(0, sequence.known - sequence.next_position);
  }
  return left;
}

bool IsToBegin(const Request& request) {
  return !request.sequences[0].started && InPrompt(request);
}

std::span<const int32_t> ReusableInputs(const Request& request) {
  const RequestSpec& spec = request.spec;
  if (spec.prompt_logprobs >= 0 || spec.pooling == Pooling::kMean) return {};
  return std::span(spec.prompt).first(spec.prompt.size() - 1);
}

int32_t InputsLeftAfter(const Request& request, int32_t reused) {
  const int32_t prompt = request.prompt_length(), known = request.sequences[0].known;
  return (reused < known ? std::min(known, prompt) : prompt) - reused;
}

bool IsCatchingUp(const Request& request) {
  const Sequence& first = request.sequences[0];
  return InPrompt(request) ? first.next_position < first.known : InInitiation(request);
}

bool HasTokenLeft(const Request& request, const Sequence& sequence) {
  return !sequence.finished && !sequence.sits_out && !IsVerifying(sequence) &&
         sequence.produced + sequence.in_flight < request.spec.max_new_tokens;
}

int64_t BatchSequences(const Request& request) {
  return std::ranges::count(request.sequences, false, &Sequence::finished);
}

StageRange StagesOf(const Request& request) {
  return IsCatchingUp(request) ? request.missing : StageRange();
}

StageRange StagesAfter(const Request& request, int32_t reused) {
  return reused < request.sequences[0].known ? request.missing : StageRange();
}

int32_t LastInput(const Request& request, const Sequence& sequence) {
  return request.prompt_length() + sequence.produced - 1;
}

void BeginProgress(Request& request) {
  for (Sequence& sequence : request.sequences) {
    sequence.next_position = sequence.known = FirstPosition(request, sequence);
    if (sequence.produced > 0) sequence.known = LastInput(request, sequence);
  }
  request.missing = {};
}

void NoteRun(Request& request, Sequence& sequence, int32_t end, int32_t samples, int32_t wrong) {
  sequence.in_flight -= samples;
  end -= wrong;
  if (wrong > 0) sequence.next_position = end;
  // The row whose sample is dropped, because the sequence sits out, does not count as known.
  if (sequence.sits_out) end = std::min(end, LastInput(request, sequence));
  if (end <= sequence.known) return;
  sequence.known = end;
  request.losses = 0;
}

void NotePlansDone(Request& request) {
  if (!IsCatchingUp(request)) request.missing = kNoStages;
}

void DropSample(const Request& request, Sequence& sequence) {
  if (sequence.in_flight == 0) sequence.next_position = LastInput(request, sequence);
}

void NoteReused(Request& request, int32_t reused) { request.sequences[0].next_position = reused; }

int32_t HeldInputs(const Request& request, const Sequence& sequence) {
  if (!request.missing.empty()) return 0;  // some stage may lack what is known
  // Tokens known before a restart may not be wanted again; and a sample that was dropped may have
  // been run.
  return std::min(
      {sequence.known, sequence.next_position, request.prompt_length() + sequence.produced});
}

bool NoteLoss(Request& request, bool stood) {
  const bool some_new = std::ranges::any_of(request.sequences, [](const Sequence& sequence) {
    return sequence.started && sequence.next_position > sequence.known;
  });
  if (stood) request.losses += some_new ? kLossOfNew : kLossOfKnown;
  return request.losses > kLossOfNew * kMaxEpochs;
}

void Rewind(Request& request) {
  for (Sequence& sequence : request.sequences) {
    sequence.next_position = FirstPosition(request, sequence);
    sequence.in_flight = 0;
    sequence.started = false;
    sequence.branch = 0;
    sequence.masked.reset();  // what it was given may be ahead
    sequence.draft.clear();
    sequence.unordered.clear();
    sequence.sits_out = false;
  }
}

void NoteMissing(Request& request, const StageRange& lost, int64_t replay_pages) {
  const bool logged = std::ranges::all_of(request.sequences, [&](const Sequence& sequence) {
    const std::vector<int32_t>& pages = sequence.pages[PageKind::kWhole];
    return !pages.empty() && std::ranges::max(pages) < replay_pages;
  });
  request.missing = request.missing.Around(lost);
  if (!logged && !request.missing.empty()) request.missing.begin = 0;
  // The states pooled so far went with the last stage's sequences.
  if (request.spec.pooling != Pooling::kNone) request.missing = {};
}

}  // namespace treadle
