// AdamW (Loshchilov and Hutter 2019, algorithm 2), with a warm-up, a cosine and a bound of the
// gradient's norm. The two moments of each number lie in a mapped file, which the system writes out
// when memory is short (QLoRA, Dettmers et al. 2023, section 3, pages the optimizer alike).
//
// They are 32-bit or 8-bit (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization",
// section 2): in each block of a tensor's numbers a moment is the block's largest magnitude times
// the nearest value of the dynamic map, the second moment's without signs. A step computes in 32
// bits, and rounds what it leaves. Blocks are of 256 numbers, and tensors of fewer than 4096 keep
// 32 bits, as bitsandbytes has it (the paper: 2048, and embeddings instead).
//
// Thread safety: confined to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

struct AdamWOptions {
  bool eight_bit = false;  // moments are 8-bit
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

// A writable file that has no name: it goes with the object, or the process.
class MappedMoments {
 public:
  // Zeros. Errors: the folder cannot be written to, or its disk is full.
  static absl::StatusOr<std::unique_ptr<MappedMoments>> Create(const std::string& folder,
                                                               size_t bytes);
  ~MappedMoments();
  MappedMoments(const MappedMoments&) = delete;
  MappedMoments& operator=(const MappedMoments&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedMoments(std::span<std::byte> bytes) : bytes_(bytes) {}
  const std::span<std::byte> bytes_;
};

class AdamW {
 public:
  // For the numbers of tensors of these sizes, one behind the other; the moments' file is in
  // `folder`. pool outlives it.
  static absl::StatusOr<std::unique_ptr<AdamW>> Create(const AdamWOptions& options,
                                                       std::span<const size_t> tensors,
                                                       const std::string& folder, ThreadPool& pool);

  // Changes values by the gradients, as step `step` (from 0). Gives the norm of the gradients
  // before it was bounded. Both: of all tensors.
  double Step(int64_t step, std::span<float> values, std::span<const float> gradients);

  // All that steps leave for the next. Each part's, in turn: the first moments [count] f32, then
  // the second ones; 8-bit: the blocks' largest first moments [blocks] f32, largest second ones,
  // then both moments' codes [count] u8.
  std::span<std::byte> moments() { return moments_->bytes(); }

 private:
  // Numbers whose moments are kept alike.
  struct Part {
    size_t begin, count;  // of all numbers
    size_t at;            // in the file
    bool eight_bit;
  };
  struct Rates;  // of one step
  AdamW(const AdamWOptions& options, std::vector<Part> parts,
        std::unique_ptr<MappedMoments> moments, ThreadPool& pool)
      : options_(options), parts_(std::move(parts)), moments_(std::move(moments)), pool_(pool) {}
  Rates RatesOf(int64_t step, double clip) const;
  void StepPart(const Rates& rates, const Part& part, float* values, const float* gradients);
  // Block `block` of an 8-bit part.
  void StepBlock(const Rates& rates, const Part& part, size_t block, float* values,
                 const float* gradients);

  const AdamWOptions options_;
  const std::vector<Part> parts_;
  const std::unique_ptr<MappedMoments> moments_;
  ThreadPool& pool_;
};

}  // namespace treadle
