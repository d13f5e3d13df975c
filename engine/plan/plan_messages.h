// IterationPlan, masks and IterationResult as protobuf messages (plan.proto): on the control plane
// and in recordings. Everything survives the trip exactly.
//
// Decoding is InvalidArgument, naming the field, for a message that is no value. A plan's meaning
// is checked later, by SequenceTable::Check. Thread safety: stateless.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

namespace proto {
class Masks;
class PageCounts;
class Plan;
class Result;
}  // namespace proto

// `message` is empty, here and below.
void EncodePlan(const IterationPlan& plan, proto::Plan& message);
absl::StatusOr<IterationPlan> DecodePlan(const proto::Plan& message);

void EncodeMasks(uint64_t epoch, uint64_t iteration, const std::vector<OutputMask>& masks,
                 proto::Masks& message);
// How many words a mask has, MaskBoard checks.
absl::StatusOr<std::vector<OutputMask>> DecodeMasks(const proto::Masks& message);

void EncodeResult(const IterationResult& result, proto::Result& message);
absl::StatusOr<IterationResult> DecodeResult(const proto::Result& message);

void EncodePages(const PageCounts& pages, proto::PageCounts& message);
PageCounts DecodePages(const proto::PageCounts& message);

}  // namespace treadle
