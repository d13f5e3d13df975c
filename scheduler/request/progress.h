// How far a request is: which of its inputs are known to have run, which a restarted engine must
// run again and on which stages, and what it has lost.
//
// A position is *known* once a result has come of its input, perhaps from an earlier epoch or
// process. After a restart `next_position` goes back and the request catches up: known inputs run
// again without outputs, on the stages in Request::missing only, and what comes after them is new.
// Cut in other pieces they give the same rows (docs/design.md, N2), so the answer is what it would
// have been.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <span>

#include "engine/plan/iteration_plan.h"
#include "scheduler/request/request.h"

namespace treadle {

// -- what is left to run --------------------------------------------------------------------------

// The number of inputs of the initiation phase that no plan has yet and that one plan may run: the
// rest of the prompt. After a restart, known inputs count first: those of the prompt, then those
// that all sequences together had produced.
int32_t InputsLeft(const Request& request);
// The prompt is the next to run, from its beginning: no plan of this epoch has any of it.
bool IsToBegin(const Request& request);
// The ids of the prompt whose rows a request that is to begin may have from the cache: all but the
// last, unless something is asked of each row.
std::span<const int32_t> ReusableInputs(const Request& request);
// The same number as above, and the stages that run these inputs, if it begins after so many.
int32_t InputsLeftAfter(const Request& request, int32_t reused);
StageRange StagesAfter(const Request& request, int32_t reused);
inline bool InInitiation(const Request& request) { return InputsLeft(request) > 0; }
// The next inputs are known ones, which a restarted engine runs again.
bool IsCatchingUp(const Request& request);
// A step of the sequence's is in flight whose result says where the next one begins.
inline bool IsVerifying(const Sequence& sequence) {
  return sequence.in_flight > 0 && !sequence.draft.empty();
}
// The sequence has a token to produce beyond those produced or in flight, and may run now.
bool HasTokenLeft(const Request& request, const Sequence& sequence);
// The request's share of max_batch_size: its sequences that have not ended, in both phases.
int64_t BatchSequences(const Request& request);
// The stages that run its next inputs.
StageRange StagesOf(const Request& request);
// The position of the sequence's last input, whose row gives the next token.
int32_t LastInput(const Request& request, const Sequence& sequence);

// -- what happens to it ---------------------------------------------------------------------------

// The request is admitted: its pages hold nothing. Tokens that it has from an earlier process are
// known.
void BeginProgress(Request& request);
// A result has come of a step whose inputs end before position `end`, with `samples` tokens. The
// last `wrong` inputs were wrong guesses: the next step begins at the first of them.
void NoteRun(Request& request, Sequence& sequence, int32_t end, int32_t samples, int32_t wrong);
// The last result of the plans in flight has come.
void NotePlansDone(Request& request);
// The sequence sits out, and what its steps sample is dropped: its last input runs again.
void DropSample(const Request& request, Sequence& sequence);

// An epoch was lost, in which the engine `stood`. True: the request has lost as many as it may,
// kMaxEpochs in which it ran new tokens, and so may be the cause, or four times as many others,
// without a new result between them.
inline constexpr int kMaxEpochs = 8;
bool NoteLoss(Request& request, bool stood);
// It is to begin, after so many of its reusable inputs.
void NoteReused(Request& request, int32_t reused);
// How many positions of a sequence of a request that ends every stage holds the rows of.
int32_t HeldInputs(const Request& request, const Sequence& sequence);
// A new epoch begins: nothing is in flight, and no sequence lives.
void Rewind(Request& request);
// It stands: `lost` are the stages that may lack what the request's pages held, and pages below
// `replay_pages` are in the stages' replay logs. Stages behind the lost ones need not run known
// inputs again; those before need not where the logs have all pages.
void NoteMissing(Request& request, const StageRange& lost, int64_t replay_pages);

}  // namespace treadle
