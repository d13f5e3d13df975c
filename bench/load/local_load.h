// A serving loop of this process as the target of a load: what a server would do, without gRPC.
//
// Thread safety: as LoadTarget. Answers are recorded on the serving loop's thread, which costs it
// well below a microsecond for each request of an iteration.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/load/load_replay.h"
#include "scheduler/request_pool.h"

namespace treadle {

// Requests go into `pool`, whose loop runs, and both outlive every answer. `end_tokens`: of
// requests that do not ignore the end of a text.
std::unique_ptr<LoadTarget> LoadInProcess(RequestPool& pool, const LoadTarget::Limits& limits,
                                          std::vector<int32_t> end_tokens);

}  // namespace treadle
