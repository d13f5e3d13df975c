// Packing of apart formats: codes flat, constants elsewhere.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/matmul/packing.h"

namespace treadle {
namespace {

constexpr int64_t kScaleBytes = 4 * kGroupFeatures;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::vector<uint8_t> RowCodes(const MatrixSource& source, int64_t row) {
  std::vector<uint8_t> codes(static_cast<size_t>(source.k));
  UnpackCodes(*source.format, source.data, row * source.k, source.k, codes.data());
  return codes;
}

// LLM.int8().

bool PlanRowInt8(const MatrixSource& source, PackedView& view) {
  if (source.format->activations != ActivationPolicy::kRowInt8) return false;
  const MatrixConstants& constants = *source.constants;
  view.kind = PackKind::kRowInt8;
  view.group_bytes = RoundUp(source.k, kBlockValues) * kGroupFeatures + kScaleBytes;
  view.outlier_threshold = constants.outlier_threshold;
  view.outliers_of_call = constants.outlier_rule == OutlierRule::kPerCall;
  return true;
}

void PackRowInt8(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
                 uint8_t* group) {
  const std::byte* codes = source.data + from * source.k;
  for (int64_t i = 0; i < source.k; ++i) {
    group[i / 4 * 64 + lane * 4 + i % 4] = static_cast<uint8_t>(codes[i]) ^ 0x80;
  }
  PutFloat(source.constants->scales[from], lane, group + view.group_bytes - kScaleBytes);
}

void DecodeRowInt8(const PackedView& view, const uint8_t* group, int64_t lane, int64_t begin,
                   int64_t count, float* out) {
  const float scale = FloatAt(group + view.group_bytes - kScaleBytes, lane);
  for (int64_t i = begin; i < begin + count; ++i) {
    *out++ = scale * static_cast<float>(group[i / 4 * 64 + lane * 4 + i % 4] - 128);
  }
}

// Formats with a codebook, in units of k that share a scale.

// Bytes of `values` codes of 16 features.
int64_t CodeBytes(PackKind kind, int64_t values) {
  if (kind == PackKind::kWords) return values / kBlockValues * kPackedWordBytes;
  return values * kGroupFeatures / (kind == PackKind::kCodes4 ? 2 : 1);
}

int64_t HeaderBytes(const PackedView& view) { return kScaleBytes * (view.zeros ? 2 : 1); }

// Where code `i` of a unit lies behind the scales and zeros.
int64_t CodeAt(PackKind kind, int64_t i, int64_t lane) {
  return i / (kind == PackKind::kCodes4 ? 8 : 4) * 64 + lane * 4 + i % 4;
}

constexpr float kE4M3Scale = 256;  // fp16's exponents are biased by 8 more

int64_t UnitBytes(const PackedView& view) {
  return HeaderBytes(view) + CodeBytes(view.kind, view.unit);
}
int64_t UnitsBytes(const PackedView& view) { return view.k / view.unit * UnitBytes(view); }

// Integers of one feature.
void PutWords(const PackedView& view, const uint8_t* codes, int64_t lane, uint8_t* unit) {
  uint8_t* block = unit + HeaderBytes(view);
  for (int64_t i = 0; i < view.unit; ++i) {
    const int64_t line = i % kBlockValues / 4;
    const int64_t byte = WordByte(i % 4, lane);
    const int word = view.integers->codes[codes[i]] & 0x1fff;
    uint8_t* nibbles = block + kPackedNibblesAt + line / 2 * 64 + byte;
    uint8_t* signs = block + kPackedSignsAt + byte;
    block[line * 64 + byte] = static_cast<uint8_t>(word & 255);
    *nibbles = static_cast<uint8_t>(*nibbles | (word >> 8 & 15) << line % 2 * 4);
    *signs = static_cast<uint8_t>(*signs | word >> 12 << line);
    if ((i + 1) % kBlockValues == 0) block += kPackedWordBytes;
  }
}

// Behind the units of a matrix that rows are looked up in.
uint8_t* LookupCodes(const PackedView& view, uint8_t* group) {
  uint8_t* codes = group + UnitsBytes(view);
  return codes - group < view.group_bytes ? codes : nullptr;
}

void PackCodes(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
               uint8_t* group) {
  const std::vector<uint8_t> codes = RowCodes(source, from);
  if (uint8_t* lookup = LookupCodes(view, group); lookup != nullptr) {
    for (size_t i = 0; i < codes.size(); ++i) lookup[i * kGroupFeatures + lane] = codes[i];
  }
  const MatrixConstants& constants = *source.constants;
  const int64_t unit_bytes = UnitBytes(view);
  const float factor = view.kind == PackKind::kE4M3 ? kE4M3Scale : 1.0f;
  for (int64_t k = 0; k < source.k; k += view.unit, group += unit_bytes) {
    const int64_t block = (from * source.k + k) / constants.scale_block;
    PutFloat(factor * constants.scales[block], lane, group);
    if (view.zeros) PutFloat(constants.zeros[block], kGroupFeatures + lane, group);
    if (view.kind == PackKind::kWords) {
      PutWords(view, codes.data() + k, lane, group);
      continue;
    }
    uint8_t* to = group + HeaderBytes(view) + 4 * lane;
    for (const uint8_t* four = codes.data() + k; four < codes.data() + k + view.unit; four += 4) {
      uint32_t dword;
      std::memcpy(&dword, four, 4);
      if (view.kind == PackKind::kCodes4) {
        uint32_t next;
        std::memcpy(&next, four += 4, 4);
        dword |= next << 4;
      }
      std::memcpy(to, &dword, 4);
      to += 64;
    }
  }
}

void DecodeCodes(const PackedView& view, const uint8_t* group, int64_t lane, int64_t begin,
                 int64_t count, float* out) {
  const int64_t unit_bytes = UnitBytes(view);
  const uint8_t* const lookup = group + UnitsBytes(view);
  TREADLE_CHECK(view.kind != PackKind::kWords || lookup < group + view.group_bytes);
  const std::span<const float> e4m3 = view.format->codebook;
  for (int64_t k = begin; k < begin + count; ++k) {
    const uint8_t* unit = group + k / view.unit * unit_bytes;
    const int64_t i = k % view.unit;
    unsigned code = view.kind == PackKind::kWords
                        ? lookup[k * kGroupFeatures + lane]
                        : unit[HeaderBytes(view) + CodeAt(view.kind, i, lane)];
    if (view.kind == PackKind::kCodes4) code = i % 8 < 4 ? code & 15 : code >> 4;
    const float scale = FloatAt(unit, lane);
    if (view.kind == PackKind::kE4M3) {
      *out++ = scale / kE4M3Scale * e4m3[code];
    } else {
      const float zero = view.zeros ? FloatAt(unit, kGroupFeatures + lane) : 0.0f;
      const float value = view.codebook == nullptr ? static_cast<float>(code) : view.codebook[code];
      *out++ = scale * (value - zero);
    }
  }
}

// Whether the way over fp16 gives E4M3's values: no NaN among the codes, no scale too large.
bool FitsE4M3(const MatrixSource& source) {
  const auto is_nan = [](std::byte code) { return (code & std::byte{127}) == std::byte{127}; };
  const auto too_large = [](float scale) { return !std::isfinite(scale * kE4M3Scale); };
  const std::vector<float>& scales = source.constants->scales;
  return std::none_of(source.data, source.data + source.n * source.k, is_nan) &&
         std::none_of(scales.begin(), scales.end(), too_large);
}

// Whether a codebook can be scaled to integers.
bool IsCommon(std::span<const float> codebook) {
  float largest = 0;
  for (const float value : codebook) {
    if (!std::isfinite(value)) return false;
    largest = std::fmax(largest, std::fabs(value));
  }
  return largest >= 0x1p-100f;
}

// Whether values are their codes.
bool IsIdentity(std::span<const float> codebook) {
  for (size_t i = 0; i < codebook.size(); ++i) {
    if (codebook[i] != static_cast<float>(i)) return false;
  }
  return true;
}

bool PlanCodes(const MatrixSource& source, PackedView& view) {
  const WeightFormat& format = *source.format;
  if (!format.apart()) return false;
  const bool e4m3 = format.name == "fp8";
  if (e4m3 && (!source.constants->zeros.empty() || !FitsE4M3(source))) return false;
  // Every row changes its scale at multiples of this.
  const int64_t block = source.constants->scale_block;
  view.unit = block >= source.n * source.k ? source.k : std::gcd(block, source.k);
  if (view.unit % kBlockValues != 0) return false;
  if (!e4m3 && !IsCommon(CodebookOf(source))) return false;
  view.kind = PackKind::kCodes8;
  if (e4m3) {
    view.kind = PackKind::kE4M3;
  } else if (format.code_bits <= 4) {
    view.kind = PackKind::kCodes4;
  } else if (IsIdentity(CodebookOf(source))) {
    view.kind = PackKind::kIntegers8;
  }
  view.zeros = !source.constants->zeros.empty();
  view.group_bytes = UnitsBytes(view);
  return true;
}

}  // namespace

void PlanWords(const MatrixSource& source, PackedView& view) {
  view.kind = PackKind::kWords;
  view.group_bytes = UnitsBytes(view) + (source.products_only ? 0 : view.k * kGroupFeatures);
}

constinit const Packing kRowInt8Packing = {PlanRowInt8, PackRowInt8, DecodeRowInt8};
constinit const Packing kCodebookPacking = {PlanCodes, PackCodes, DecodeCodes};

}  // namespace treadle
