// Packing of 16-bit floats as they are, and of anything as the floats that it decodes to.
#include <vector>

#include "kernels/cpu/matmul/packing.h"

namespace treadle {
namespace {

bool PlanHalves(const MatrixSource& source, const PackTarget&, PackedView& view) {
  const bool half = source.format->name == "f16";
  if (!half && source.format->name != "bf16") return false;
  view.kind = half ? PackKind::kF16 : PackKind::kBF16;
  view.group_bytes = source.k * kGroupFeatures * 2;
  return true;
}

void PackHalves(const MatrixSource& source, const PackedView&, int64_t from, int64_t lane,
                uint8_t* group) {
  const int64_t step = source.transposed ? source.n * 2 : 2;
  const std::byte* value = source.data + from * (source.transposed ? 2 : 2 * source.k);
  for (int64_t i = 0; i < source.k; ++i, value += step) {
    std::memcpy(group + (i * kGroupFeatures + lane) * 2, value, 2);
  }
}

bool PlanFloats(const MatrixSource& source, const PackTarget&, PackedView& view) {
  view.kind = PackKind::kF32;
  view.group_bytes = source.k * kGroupFeatures * 4;
  return true;
}

void PackFloats(const MatrixSource& source, const PackedView&, int64_t from, int64_t lane,
                uint8_t* group) {
  std::vector<float> values(static_cast<size_t>(source.k));
  DecodeSourceRow(source, from, values.data());
  for (int64_t i = 0; i < source.k; ++i) PutFloat(values[i], i * kGroupFeatures + lane, group);
}

}  // namespace

constinit const Packing kHalfPacking = {PlanHalves, PackHalves, nullptr};
constinit const Packing kFloatPacking = {PlanFloats, PackFloats, nullptr};

}  // namespace treadle
