// How many K/V pages to make: the arithmetic behind --kv-memory, for serving and for inspecting.
//
// A pure function of numbers that the caller found out, so that it is the same everywhere and its
// errors can show the whole calculation. Thread safety: stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/defaults.h"
#include "kernels/dtype.h"
#include "models/model_config.h"

namespace treadle {

struct KvMemoryRequest {
  // Bytes for the cache (--kv-memory), or nothing for "auto": as much as max_batch_size requests of
  // max_context tokens can use, but at most `available_share` of `available_bytes`.
  std::optional<int64_t> kv_bytes;
  int64_t available_bytes = 0;  // memory that can be had now (MemAvailable); read by auto only
  double available_share = 0.5;
  int64_t max_batch_size = 0;            // sequences in one batch
  int64_t max_context = 0;               // tokens of one request, prompt and answer
  int64_t page_size = kDefaultPageSize;  // tokens
  DType kv_dtype = DType::kF16;
  // Ranks that share each layer. Beyond the model's K/V heads, several hold the same head each.
  int64_t tensor_parallel = 1;
};

struct KvMemoryPlan {
  int64_t bytes_per_token = 0;  // K and V in all layers, on all ranks
  int64_t bytes_per_page = 0;
  int64_t pages_per_request = 0;  // of max_context tokens
  int64_t pages = 0;
  int64_t bytes = 0;  // pages * bytes_per_page

  int64_t tokens = 0;            // pages * page_size
  std::string ToString() const;  // one line for the log
};

// What `pages` pages cost; only page_size, kv_dtype and tensor_parallel of the request count.
KvMemoryPlan KvMemoryOf(const ModelConfig& config, const KvMemoryRequest& request, int64_t pages);

// InvalidArgument for numbers out of range; ResourceExhausted, with the arithmetic, when not even
// one request of max_context tokens fits.
absl::StatusOr<KvMemoryPlan> PlanKvMemory(const ModelConfig& config,
                                          const KvMemoryRequest& request);

}  // namespace treadle
