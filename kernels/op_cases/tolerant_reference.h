// The reference backend, which also says of each op how far another backend's results may be from
// its own: for the op cases (tests/kernels/op_checks.h) and for replay's search
// (engine/record/op_check.h).
//
// A tolerance comes from the number formats and from the magnitudes of the op's operands: the
// roundings that may separate the two, in units of 2^-24 of what is summed. It costs about as much
// as the reference's op. An op without one is an error of the linker.
//
// Weights keep a copy of their source. Thread safety: as Backend.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/forwarding_backend.h"

namespace treadle {

// How the other backend computes, as far as tolerances depend on it.
struct Arithmetic {
  // NOLINTNEXTLINE(google-explicit-constructor): most backends differ in the mode alone
  constexpr Arithmetic(ComputeMode mode = ComputeMode::kExact) : compute(mode) {}
  // Backends on matrix units: activations, float weights and decoded low-bit weights enter
  // products rounded once to `type` (kF32: as they are), queries and softmax weights rounded to the
  // cache's type, if that has 16 bits. LLM.int8() is as ever.
  static constexpr Arithmetic MatrixUnits(DType type) {
    Arithmetic arithmetic;
    arithmetic.products = type;
    arithmetic.attention_in_cache_type = true;
    return arithmetic;
  }

  ComputeMode compute;
  DType products = DType::kF32;
  bool attention_in_cache_type = false;
};

// Absolute tolerances of all that an op wrote; 0: bits must agree.
struct OpTolerances {
  struct Output {
    Tensor tensor;             // as the call named it
    std::string part;          // which, of an op that writes several: "q", "projection 2"
    std::vector<float> error;  // [tensor.rows, tensor.cols]
  };
  std::vector<Output> outputs;
  // RotateAndStoreKv, CopyPages: of the cache, [num_pages, Parts * PartElements], K by
  // KeyOrder::kByFeature. Convolve, GatedDelta: [num_pages, floats of a page].
  std::vector<float> cache;
  // Sample, SampleShard: of FieldsOf each row's result, one row after the other.
  std::vector<float> fields;
};

class TolerantReference final : public ForwardingBackend {
 public:
  explicit TolerantReference(const Arithmetic& arithmetic);

  // The tolerances of the last op.
  const OpTolerances& tolerances() const { return tolerances_; }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override;
  // Tensors are f32.
  TREADLE_BACKEND_OPS(TREADLE_OVERRIDE_OP)

 private:
  // Forgets the last op.
  void Begin() { tolerances_ = {}; }
  // The errors of one more tensor that the op writes, all 0. [tensor.rows, tensor.cols]
  float* Writes(Tensor tensor, std::string part = {});
  // Writes `out`, of whose elements each may be off by `units`(gate, up) of float's rounding.
  template <typename Units>
  void WritesElements(Tensor gate, Tensor up, Tensor out, Units units);

  const Arithmetic arithmetic_;
  OpTolerances tolerances_;
};

// Sample's and SampleShard's result for a row, as floats: four and five numbers, then the top
// tokens and the candidates.
std::vector<float> FieldsOf(const SampleResult& result);
std::vector<float> FieldsOf(const ShardSample& shard);

// Where OpTolerances::cache has a page's element of K.
inline int64_t KeyByFeature(const KvLayout& layout, int64_t head, int64_t slot, int64_t i) {
  KvLayout order = layout;
  order.key_order = KeyOrder::kByFeature;
  return order.KeyElement(head, slot, i);
}

// Tolerances count in units of float's rounding, 2^-24 of a magnitude.
inline constexpr double kFloatUnit = 0x1p-24;

// The change by rounding a number of this magnitude once to `type`: half the distance of its
// neighbours; f16 has subnormals that matter.
inline double RoundingError(double magnitude, DType type) {
  switch (type) {
    case DType::kF16:
      return std::max(0x1p-11 * magnitude, 0x1p-25);
    case DType::kBF16:
      return 0x1p-8 * magnitude;
    default:
      return 0;
  }
}
// Errors of either sign that are independent and at most e_i add up to more than this times the
// root of the sum of e_i^2 with a probability below 10^-10 (Hoeffding's inequality).
inline constexpr double kSurely = 7;

}  // namespace treadle
