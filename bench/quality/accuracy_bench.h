// The quality that a compute mode or a weight format costs: the same text, teacher-forced through
// two variants of a model, next-token distributions compared row by row. The reference is always
// the checkpoint's weights as stored, `exact`, with a 32-bit K/V cache.
//
// Thread safety: one thread per AccuracyReference.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/quality/teacher_forcing.h"

namespace treadle {

struct AccuracyOptions {
  int64_t window = 512;  // tokens per chunk, each from position 0
  int64_t max_tokens = 3072;
  int threads = 0;
};

struct AccuracyReport {
  int64_t positions = 0;
  // Kullback-Leibler divergence of the variant from the reference, nats.
  double mean_kl = 0;
  double kl_error = 0;  // standard error of the mean, with positions taken as independent
  double p99_kl = 0;
  double max_kl = 0;
  double argmax_equal = 0;  // fraction of positions
  double perplexity_reference = 0;
  double perplexity = 0;
};

class AccuracyReference {
 public:
  using ProgressCallback = std::function<void(double fraction)>;

  // Reads the text once. tokens: of a real text; cut into windows, a shorter rest is dropped.
  // Errors: no whole window, or one that the model does not allow.
  static absl::StatusOr<std::unique_ptr<AccuracyReference>> Create(
      const Checkpoint& checkpoint, std::span<const int32_t> tokens, const AccuracyOptions& options,
      const ProgressCallback& progress);

  // `variant` has the checkpoint's vocabulary, and room for a window.
  AccuracyReport Compare(TeacherForcedModel& variant, const ProgressCallback& progress);

 private:
  AccuracyReference() = default;
  int64_t windows() const { return static_cast<int64_t>(tokens_.size()) / window_; }
  // The hidden states of window w, into this object's memory.
  Tensor Hidden(int64_t w);

  int64_t window_ = 0;
  std::vector<int32_t> tokens_;  // whole windows
  std::unique_ptr<TeacherForcedModel> model_;
  std::vector<float> hidden_;  // [tokens, hidden]: the reference's last layer
};

// The bits of a model's weights, constants included, as a file keeps them.
struct WeightBits {
  int64_t converted = 0;      // weights that the plan converts
  double converted_bits = 0;  // of all of them
  int64_t kept = 0;           // the others: as stored
  double kept_bits = 0;

  // Bits per converted weight, if there are any.
  double PerConverted() const {
    return converted > 0 ? converted_bits / static_cast<double>(converted) : 0;
  }
  double PerParameter() const {
    return (converted_bits + kept_bits) / static_cast<double>(converted + kept);
  }
};

// Quantizes one matrix of each shape, not all: bits do not depend on values. Thread safety: pure.
absl::StatusOr<WeightBits> CountWeightBits(const Checkpoint& checkpoint, const WeightPlan& plan);

// Name and value of each field.
nlohmann::ordered_json ToJson(const AccuracyReport& report);
std::string ToTable(const AccuracyReport& report);

}  // namespace treadle
