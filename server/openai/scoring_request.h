// The body of a request for scores or a ranking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/openai/openai_request.h"

namespace treadle {

// The rest of a body, beside its texts, which are the prompts: the first side's, then the second's.
struct ScoringQuestion {
  bool rank = false;
  size_t first = 1;   // texts of the first side: one, or as many as of the second
  int32_t top_n = 0;  // of a ranking, how many are told; 0: all
};
// The body of /v1/score or, if `question.rank` says so, of /v1/rerank. Errors: as
// ReadOpenAiRequest.
absl::StatusOr<OpenAiRequest> ReadScoring(std::string_view body, const ServedModel& model,
                                          ScoringQuestion& question);

}  // namespace treadle
