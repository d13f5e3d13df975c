// The plain twin of every op: scalar loops that read like the definition, sums in double. The
// oracle of the op-case list; slow on purpose.
#pragma once

#include <memory>
#include <span>

#include "kernels/backend.h"

namespace treadle {

// kInt8 quantizes activations by the rule of ComputeMode and then sums in double; kAuto is kExact.
std::unique_ptr<Backend> CreateReferenceBackend(ComputeMode compute = ComputeMode::kExact);

// ComputeMode::kInt8's rule, in float arithmetic, for one block of 32 activations: with absmax =
// max |x|, scale = absmax / 127, code = x * (127 / absmax) rounded half to even (so |code| <= 127).
// A block whose absmax is below 2^-100 has scale 0 and codes 0.
struct QuantizedActivations {
  int8_t codes[32];
  float scale;
};
QuantizedActivations QuantizeActivations(std::span<const float, 32> x);

// Sampling of one row as kernels/sampling.h defines it. logits: [vocab].
SampleResult ReferenceSample(std::span<const float> logits, const SampleRow& row);

}  // namespace treadle
