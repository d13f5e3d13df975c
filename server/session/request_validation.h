// The door: a GenerateRequest becomes a RequestSpec, or an error that names the field, the value
// and what was expected ("sampling.top_p is 1.5, expected (0, 1]").
//
// Pure functions without state; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/defaults.h"
#include "scheduler/request.h"
#include "server/session/generate_request.h"
#include "server/session/served_model.h"

namespace treadle {

inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopStringBytes = 512;
inline constexpr int kMaxStopTokens = 256;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxRequestIdBytes = 256;

struct RequestLimits {
  int64_t max_batch_size = kDefaultBatchSize;  // bounds num_candidates
  int32_t default_max_new_tokens = 512;        // clipped to the context and to the cache
};

struct ValidatedRequest {
  RequestSpec spec;  // all but its deadline
  std::vector<std::string> stop_strings;
};

// `random_seed` is used when the request has no seed. Errors: InvalidArgument.
absl::StatusOr<ValidatedRequest> ValidateRequest(GenerateRequest request, const ServedModel& model,
                                                 const RequestLimits& limits, uint64_t random_seed);

// Ids in [0, vocab), or InvalidArgument with the first offender's index.
absl::Status ValidateTokenIds(const std::string& field, std::span<const int32_t> ids,
                              int32_t vocab);

}  // namespace treadle
