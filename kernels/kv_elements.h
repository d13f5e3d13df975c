// Single elements of a K/V page in the host's memory, in the plainest form: for the reference and
// for tests. KvLayout says how they lie and how they are rounded.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/formats/normal_bf16.h"
#include "kernels/kv_view.h"

namespace treadle {

enum class KvPart : uint8_t { kKey, kValue };

// The scale of a row of kI8 whose largest magnitude is `largest`; NaN if that is not finite.
inline BFloat16 KvScale(float largest) {
  if (!std::isfinite(largest)) return {0x7fc0};
  return {static_cast<uint16_t>((std::bit_cast<uint32_t>(largest / 127.0f) + 0xffffu) >> 16)};
}

// The value that ComputeMode::kBf16 stores in a cache of floats: the bf16 number that AMX reads;
// of f16 one that it holds.
inline float KvBf16(DType cache, float x) {
  const float rounded = ToFloat(ToNormalBFloat16(x));
  constexpr float kMax = 65280;  // the largest bf16 below 65504
  if (cache != DType::kF16 || !std::isfinite(x) || std::fabs(rounded) <= kMax) return rounded;
  return std::copysign(kMax, x);
}

// One head's K or V of one slot of a page.
class KvRow {
 public:
  KvRow(const KvLayout& layout, std::byte* page, KvPart part, int64_t head, int64_t slot)
      : layout_(layout), page_(page), part_(part), head_(head), slot_(slot) {}

  float Load(int64_t i) const {
    if (layout_.dtype != DType::kI8) return LoadElement(layout_.dtype, page_, Element(i));
    BFloat16 scale;
    std::memcpy(&scale, Scale(), sizeof(scale));
    return ToFloat(scale) * static_cast<float>(static_cast<int8_t>(page_[Element(i)]));
  }

  // values: [head_dim]. Where V is a part of K, K alone is stored.
  void Store(const float* values) const {
    const bool codes = layout_.dtype == DType::kI8;
    float largest = 0;
    for (int64_t i = 0; codes && i < layout_.head_dim; ++i) {
      const float size = std::fabs(values[i]);
      if (!(size <= largest)) largest = size;
      if (std::isnan(largest)) break;
    }
    const BFloat16 scale = KvScale(largest);
    if (codes) std::memcpy(Scale(), &scale, sizeof(scale));
    const float step = ToFloat(scale);
    for (int64_t i = 0; i < layout_.head_dim; ++i) {
      if (codes) {
        const float code = step > 0 ? std::nearbyint(values[i] / step) : 0;
        page_[Element(i)] = static_cast<std::byte>(static_cast<int8_t>(code));
      } else {
        StoreElement(layout_.dtype, values[i], page_, Element(i));
      }
    }
  }

 private:
  int64_t Element(int64_t i) const {
    return part_ == KvPart::kKey ? layout_.KeyElement(head_, slot_, i)
                                 : layout_.ValueElement(head_, slot_, i);
  }
  std::byte* Scale() const {
    const bool second = part_ == KvPart::kValue && layout_.latent_dim == 0;
    const int64_t at = (second ? layout_.PartScales() : 0) + head_ * layout_.page_size + slot_;
    return page_ + layout_.Parts() * layout_.PartBytes() +
           at * static_cast<int64_t>(sizeof(BFloat16));
  }

  const KvLayout& layout_;
  std::byte* const page_;
  const KvPart part_;
  const int64_t head_;
  const int64_t slot_;
};

}  // namespace treadle
