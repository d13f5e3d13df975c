// AdamW (Loshchilov and Hutter 2019, algorithm 2), with a warm-up, a cosine and a bound of the
// gradient's norm. The two moments of each number are 32-bit and lie in a mapped file, which the
// system writes out when memory is short (QLoRA, Dettmers et al. 2023, section 3, pages the
// optimizer alike).
//
// Thread safety: confined to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

struct AdamWOptions {
  double learning_rate = 2e-4;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double max_gradient_norm = 0.3;  // 0: unbounded
  int64_t warmup = 10;             // steps
  int64_t steps = 0;               // of the whole run
};

// The rate of step `step`, counted from 0: it rises linearly from 0 over `warmup` steps, then falls
// along half a cosine to 0 at `steps`.
double LearningRateAt(const AdamWOptions& options, int64_t step);

// A writable file of floats that has no name: it goes with the object, or the process.
class MappedFloats {
 public:
  // Zeros. Errors: the folder cannot be written to, or its disk is full.
  static absl::StatusOr<std::unique_ptr<MappedFloats>> Create(const std::string& folder,
                                                              size_t count);
  ~MappedFloats();
  MappedFloats(const MappedFloats&) = delete;
  MappedFloats& operator=(const MappedFloats&) = delete;
  std::span<float> values() const { return values_; }

 private:
  explicit MappedFloats(std::span<float> values) : values_(values) {}
  const std::span<float> values_;
};

class AdamW {
 public:
  // For `count` numbers; the moments' file is in `folder`. pool outlives it.
  static absl::StatusOr<std::unique_ptr<AdamW>> Create(const AdamWOptions& options, size_t count,
                                                       const std::string& folder, ThreadPool& pool);

  // Changes values by the gradients, as step `step` (from 0). Gives the norm of the gradients
  // before it was bounded. Both: [count].
  double Step(int64_t step, std::span<float> values, std::span<const float> gradients);

  // [2 * count]: first moments, then second ones.
  std::span<float> moments() { return moments_->values(); }

 private:
  AdamW(const AdamWOptions& options, std::unique_ptr<MappedFloats> moments, ThreadPool& pool)
      : options_(options), moments_(std::move(moments)), pool_(pool) {}

  const AdamWOptions options_;
  const std::unique_ptr<MappedFloats> moments_;
  ThreadPool& pool_;
};

}  // namespace treadle
