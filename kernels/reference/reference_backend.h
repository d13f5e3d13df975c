// The plain twin of every op: scalar loops that read like the definition, sums in double. The
// oracle of the op-case list; slow on purpose.
#pragma once

#include <memory>
#include <span>
#include <string>

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

// The rule of ComputeMode::kInt8 (127 steps), kInt12 (2032) or kInt16 (16256), in float arithmetic,
// for one block of 32 activations: with absmax = max |x|, scale = absmax / steps, code = x * (steps
// / absmax) rounded half to even (so |code| <= steps). A block whose absmax is below 2^-100 has
// scale 0 and codes 0.
struct QuantizedActivations {
  int16_t codes[32];
  float scale;
};
QuantizedActivations QuantizeActivations(std::span<const float, 32> x, ComputeMode compute);
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
