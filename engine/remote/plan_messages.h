// IterationPlan and IterationResult on the wire.
//
// Both are sent as structs of arrays of variable-length integers, ids relative to the one before,
// so that a plain decoding step (one explicit token, sampled, nothing else asked) costs a byte for
// its sequence, and what its position and token take: 2 and 3 bytes below 16,384 and 2,097,152.
// Everything survives the trip exactly, but for timings, which are rounded to nanoseconds.
//
// Decoding trusts nothing: counts are compared with what is there before anything is read, and a
// message that does not add up is an InvalidArgument that names the field. What a plan means is
// checked later, by SequenceTable::Check. Thread safety: stateless.
#pragma once

#include "absl/status/statusor.h"
#include "engine/iteration_plan.h"

namespace treadle {

namespace control {
class MaskMessage;
class PlanMessage;
class ResultMessage;
}  // namespace control

// `message` is empty.
void EncodePlan(const IterationPlan& plan, control::PlanMessage& message);
absl::StatusOr<IterationPlan> DecodePlan(const control::PlanMessage& message);

void EncodeMasks(uint64_t epoch, uint64_t iteration, const std::vector<StepMask>& masks,
                 control::MaskMessage& message);
// How many words a mask has, MaskBoard knows.
absl::StatusOr<std::vector<StepMask>> DecodeMasks(const control::MaskMessage& message);

void EncodeResult(const IterationResult& result, control::ResultMessage& message);
absl::StatusOr<IterationResult> DecodeResult(const control::ResultMessage& message);

}  // namespace treadle
