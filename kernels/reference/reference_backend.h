// The plain twin of every op: scalar loops that read like the definition, sums in double. The
// oracle of the op-case list; slow on purpose.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/host_backend.h"

namespace treadle {

// Its ops are defined in this folder's files, by topic.
class ReferenceBackend final : public HostBackend {
 public:
  explicit ReferenceBackend(ComputeMode compute) : compute_(compute) {}

  std::string_view name() const override { return "reference"; }
  std::string description() const override;
  absl::StatusOr<Buffer> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override;
  TREADLE_FEATURE_OPS(TREADLE_OVERRIDE_OP)
  TREADLE_SAMPLE_OPS(TREADLE_OVERRIDE_OP)

 private:
  const ComputeMode compute_;
};

// kInt8, kInt12, kInt16 and kBf16 round by the rules of ComputeMode and then sum in double; kAuto
// is kExact.
std::unique_ptr<Backend> CreateReferenceBackend(ComputeMode compute = ComputeMode::kExact);

// How many of a row's last `left` activations share a scale next, in kInt16 and kInt12.
constexpr int64_t ActivationSpan(int64_t left) { return left <= 320 ? left : 256; }

// A row of activations as a product sees it by the rule of ComputeMode::kInt8 (127 steps, blocks of
// 32), kInt12 (2032) or kInt16 (16256, both in spans), in float arithmetic: of each block or span,
// with absmax = max |x|, scale * code, where scale = absmax / steps and code = x * (steps / absmax)
// rounded half to even. One whose absmax is below 2^-100 is zeros. Blocks follow `order`
// (MatrixConstants::input_order), if there is one; the result does not.
std::vector<double> RoundedActivations(std::span<const float> x, ComputeMode compute,
                                       std::span<const int32_t> order = {});
inline bool QuantizesActivations(ComputeMode compute) {
  return compute == ComputeMode::kInt8 || compute == ComputeMode::kInt12 ||
         compute == ComputeMode::kInt16;
}

// Sampling of one row as kernels/sampling.h defines it. logits: [vocab].
SampleResult ReferenceSample(std::span<const float> logits, const SampleRow& row);
// The part of a row from token `first_token` on. logits: [tokens of the shard].
ShardSample ReferenceSampleShard(std::span<const float> logits, int32_t first_token,
                                 const SampleRow& row);

}  // namespace treadle
