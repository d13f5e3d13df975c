// What a compute mode costs in quality: the same text, teacher-forced through the same weights in
// two modes, next-token distributions compared row by row (Kullback-Leibler divergence from
// `exact`).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "models/checkpoint.h"

namespace treadle {

struct AccuracyOptions {
  ComputeMode compute = ComputeMode::kInt16;  // compared with kExact
  DType kv_dtype = DType::kF16;               // of the compared mode; exact runs with kF32
  int32_t window = 512;                       // tokens per chunk, each from position 0
  int64_t max_tokens = 3072;
  int threads = 0;
  std::function<void(int64_t done, int64_t total)> progress;  // may be empty
};

struct AccuracyReport {
  int64_t positions = 0;
  double mean_kl = 0;  // nats
  double p99_kl = 0;
  double max_kl = 0;
  double argmax_equal = 0;  // fraction of positions
  double perplexity_exact = 0;
  double perplexity = 0;
};

// `tokens`: of a real text; cut into windows of `window`, a shorter rest is dropped.
absl::StatusOr<AccuracyReport> CompareCompute(const Checkpoint& checkpoint,
                                              std::span<const int32_t> tokens,
                                              const AccuracyOptions& options);

std::string ToJson(const AccuracyReport& report);
std::string ToTable(const AccuracyReport& report);

}  // namespace treadle
