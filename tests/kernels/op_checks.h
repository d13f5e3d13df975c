// Whether what an op of the op-case list left behind is right.
//
//   for (const OpCase& c : OpCases()) if (!c.slow) EXPECT_TRUE(MatchesReference(c, cpu,
//   mode).ok());
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/tolerant_reference.h"

namespace treadle {

// Everything that the op may write, as floats on the host: output rows one after the other, then,
// if the op writes it, the whole cache by KeyOrder::kByFeature; of sampling the fields of
// SampleResult or ShardSample.
std::vector<float> Output(const OpRun& run);
// The tolerance of each element of Output of a run on `reference`, whose last op was the run's.
std::vector<float> Tolerance(const TolerantReference& reference);
// Guard values around outputs, and inputs that the op must not touch.
absl::Status CheckGuards(const OpRun& run);

// Runs the case on `backend` and on the reference in the same mode (kAuto: the mode that the
// backend uses for this format has to be named, so pass kExact, kInt8 or kInt16) and compares every
// element. The error names the case, the element, both values and the tolerance.
absl::Status MatchesReference(const OpCase& op_case, Backend& backend, const Arithmetic& arithmetic,
                              uint64_t seed = 1);

// N1 and N2: the whole batch, random cuts of it (chunks) and every row alone (token by token) give
// bit-identical output; also the same bits as `other`, if given (another thread count, instruction
// set or packing of the same compute mode). Batches of more than 64 rows try a sample of rows
// alone. Outliers are taken per row, whatever the case says: per call, neither property holds.
absl::Status BatchInvariance(const OpCase& op_case, Backend& backend, Backend* other = nullptr,
                             uint64_t seed = 1);

}  // namespace treadle
