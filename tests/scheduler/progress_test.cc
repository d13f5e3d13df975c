#include "scheduler/request/progress.h"

#include <gtest/gtest.h>

namespace treadle {
namespace {

Request RequestOf(int32_t prompt, int32_t max_new_tokens, uint32_t candidates) {
  Request request;
  request.spec.prompt.assign(static_cast<size_t>(prompt), 7);
  request.spec.max_new_tokens = max_new_tokens;
  for (uint32_t i = 0; i < candidates; ++i) request.sequences.emplace_back().candidate = i;
  request.state = RequestState::kRunning;
  BeginProgress(request);
  return request;
}

// As the planner and the loop do it: a plan with so many inputs of a sequence, and its result.
void RunInputs(Request& request, uint32_t candidate, int32_t inputs) {
  Sequence& sequence = request.sequences[candidate];
  sequence.started = true;
  sequence.next_position += inputs;
  const bool samples = sequence.next_position == LastInput(request, sequence) + 1;
  if (samples) ++sequence.in_flight;
  NoteRun(request, sequence, sequence.next_position, samples ? 1 : 0, 0);
  NotePlansDone(request);
  if (!samples) return;
  ++sequence.produced;
  sequence.output.push_back(9);
}

TEST(Progress, APromptThenATokenForEachSequence) {
  Request request = RequestOf(10, 3, 2);
  EXPECT_EQ(InputsLeft(request), 10);
  EXPECT_FALSE(IsCatchingUp(request));
  RunInputs(request, 0, 4);
  EXPECT_EQ(InputsLeft(request), 6);
  RunInputs(request, 0, 6);
  EXPECT_EQ(InputsLeft(request), 0);
  EXPECT_EQ(request.sequences[1].next_position, 9) << "it shares the prompt but for its last row";
  EXPECT_TRUE(HasTokenLeft(request, request.sequences[0]));
  RunInputs(request, 1, 1);
  RunInputs(request, 1, 1);
  ++request.sequences[1].in_flight;
  EXPECT_FALSE(HasTokenLeft(request, request.sequences[1])) << "the third one is in flight";
  request.sequences[1].finished = true;
  EXPECT_EQ(BatchSequences(request), 1);
}

// Wherever an engine is lost, all that was known is run again, in any pieces and before anything
// new, on the stages that lack it.
TEST(Progress, WhatWasKnownIsRunAgainBeforeAnythingNew) {
  for (int32_t known = 1; known < 14; ++known) {
    for (const int32_t piece : {1, 3, 100}) {
      Request request = RequestOf(10, 8, 1);
      Sequence& sequence = request.sequences[0];
      while (sequence.known < known) RunInputs(request, 0, 1);
      ++sequence.in_flight;
      ++sequence.next_position;  // in a plan whose result never comes
      EXPECT_FALSE(NoteLoss(request, true));
      Rewind(request);
      NoteMissing(request, {1, 2}, 0);
      EXPECT_EQ(sequence.in_flight, 0);
      int32_t again = 0;
      while (IsCatchingUp(request)) {
        EXPECT_EQ(StagesOf(request), StageRange(0, 2)) << "no log has the pages";
        const int32_t inputs = std::min(piece, InputsLeft(request));
        ASSERT_GT(inputs, 0);
        sequence.next_position += inputs;
        again += inputs;
        NoteRun(request, sequence, sequence.next_position, 0, 0);
        NotePlansDone(request);
        EXPECT_EQ(request.losses, 4) << "nothing new has come";
      }
      EXPECT_EQ(again, known);
      EXPECT_EQ(request.missing, kNoStages);
      EXPECT_EQ(StagesOf(request), StageRange());
      RunInputs(request, 0, 1);
      EXPECT_EQ(request.losses, 0);
    }
  }
}

TEST(Progress, StagesBeforeTheLostOneRunWhatTheirLogsLack) {
  Request request = RequestOf(10, 3, 1);
  request.sequences[0].pages[PageKind::kWhole] = {4, 2};
  RunInputs(request, 0, 10);
  Rewind(request);
  NoteMissing(request, {2, 3}, 5);
  EXPECT_EQ(request.missing, StageRange(2, 3));
  NoteMissing(request, {1, 2}, 4);
  EXPECT_EQ(request.missing, StageRange(0, 3)) << "page 4 is in no log";
  request.spec.pooling = Pooling::kMean;
  NoteMissing(request, {2, 3}, 5);
  EXPECT_EQ(request.missing, StageRange()) << "the sums are gone, too";
}

TEST(Progress, ARequestThatMayBeTheCauseLosesFewerEpochs) {
  for (const bool fresh : {true, false}) {
    Request request = RequestOf(10, 3, 1);
    RunInputs(request, 0, 4);
    int epochs = 0;
    bool enough = false;
    for (; !enough && epochs < 100; ++epochs) {
      Rewind(request);
      EXPECT_FALSE(NoteLoss(request, /*stood=*/false));
      request.sequences[0].started = true;
      request.sequences[0].next_position = fresh ? 5 : 4;
      enough = NoteLoss(request, /*stood=*/true);
    }
    EXPECT_EQ(epochs, fresh ? kMaxEpochs + 1 : 4 * kMaxEpochs + 1);
  }
}

TEST(Progress, ADroppedSampleIsRunAgain) {
  Request request = RequestOf(10, 5, 1);
  RunInputs(request, 0, 10);
  Sequence& sequence = request.sequences[0];
  sequence.next_position = 12;  // two steps in flight
  sequence.in_flight = 2;
  sequence.sits_out = true;
  EXPECT_FALSE(HasTokenLeft(request, sequence));
  for (const int32_t end : {11, 12}) {
    NoteRun(request, sequence, end, 1, 0);
    DropSample(request, sequence);
  }
  EXPECT_EQ(sequence.known, 10) << "its token is not known";
  EXPECT_EQ(sequence.next_position, 10);
}

}  // namespace
}  // namespace treadle
