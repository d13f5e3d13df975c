// How many K/V pages to make: the arithmetic behind --kv-memory, for serving and for inspecting.
//
// A pure function of numbers that the caller found out, so that it is the same everywhere and its
// errors can show the whole calculation. Thread safety: stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/plan/defaults.h"
#include "engine/plan/kv_paging.h"
#include "kernels/dtype.h"
#include "models/model.h"

namespace treadle {

struct KvMemoryRequest {
  // Bytes for the cache (--kv-memory), or nothing for "auto": as much as max_batch_size requests of
  // max_context tokens can use, but at most `available_share` of `available_bytes`.
  std::optional<int64_t> kv_bytes;
  int64_t available_bytes = 0;  // that can be had now; 0: not known, for a size that is given
  double available_share = 0.5;
  int64_t max_batch_size = 0;                      // sequences in one batch
  int64_t max_batch_tokens = kDefaultBatchTokens;  // in one iteration
  int64_t max_context = 0;                         // tokens of one request, prompt and answer
  int64_t page_size = kDefaultPageSize;            // tokens
  DType kv_dtype = DType::kF16;
  // Ranks that share each layer. Beyond the model's K/V heads, several hold the same head each.
  int64_t tensor_parallel = 1;
  LayerRange layers = {};  // of a stage; begin == end: all
};

struct KvMemoryPlan {
  KvPaging paging;
  PageCounts bytes_per_token;  // K and V in the layers of a kind, on all ranks
  PageCounts bytes_per_page;
  PageCounts pages_per_request;  // of max_context tokens
  PageCounts pages;
  int64_t bytes = 0;             // of all pages
  std::string ToString() const;  // one line for the log
};

// The bytes of `pages`; max_batch_tokens, page_size, kv_dtype, tensor_parallel and layers of the
// request count.
KvMemoryPlan KvMemoryOf(const ModelConfig& config, const KvMemoryRequest& request,
                        const PageCounts& pages);

// As many pages of each kind as share the memory in proportion to what one request of max_context
// tokens takes. InvalidArgument for numbers out of range; ResourceExhausted, with the arithmetic,
// when not even one such request fits, or kv_bytes are more than are available.
absl::StatusOr<KvMemoryPlan> PlanKvMemory(const ModelConfig& config,
                                          const KvMemoryRequest& request);

}  // namespace treadle
