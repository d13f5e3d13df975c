// Packing of apart formats, and of inline formats that are packed as if they were.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/matmul/packing.h"
#include "kernels/formats/coded_rows.h"

namespace treadle {
namespace {

constexpr int64_t kScaleBytes = 4 * kGroupFeatures;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// LLM.int8().

bool PlanRowInt8(const MatrixSource& source, const PackTarget&, PackedView& view) {
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

// Integers.

bool PlanIntegers(const MatrixSource& source, const PackTarget& target, PackedView& view) {
  if (!target.integers || !source.format->apart() || !HasIntegers(source)) return false;
  const bool long_run = ConstantRun(source) % 128 == 0;
  if (source.format->code_bits == 4) {
    view.kind = long_run ? PackKind::kRun128Int4 : PackKind::kRun32Int4;
  } else {
    view.kind = long_run ? PackKind::kRun128Int8 : PackKind::kRun32Int8;
  }
  const IntegerRun run = IntegerRunOf(view.kind);
  view.group_bytes = source.k / run.values * run.bytes();
  return true;
}

// Where a code of a run begins.
struct CodePlace {
  int64_t byte;
  int shift;
};
CodePlace PlaceOf(const IntegerRun& run, int64_t k, int64_t lane) {
  const int64_t at = k % kBlockValues, in_block = k / kBlockValues * run.block_bytes();
  const int64_t dword = at / 4 % (run.bits == 8 ? 8 : 4);
  return {in_block + dword * 64 + lane * 4 + at % 4, run.bits == 4 && at >= 16 ? 4 : 0};
}

void PackIntegers(const MatrixSource& source, const PackedView& view, int64_t from, int64_t lane,
                  uint8_t* group) {
  const IntegerRun run = IntegerRunOf(view.kind);
  std::vector<uint8_t> codes(static_cast<size_t>(source.k));
  UnpackCodes(*source.format, source.data, from * source.k, source.k, codes.data());
  for (int64_t k = 0; k < source.k; k += run.values, group += run.bytes()) {
    for (int64_t i = 0; i < run.values; ++i) {
      const CodePlace place = PlaceOf(run, i, lane);
      group[place.byte] = static_cast<uint8_t>(group[place.byte] | codes[k + i] << place.shift);
    }
    const auto block = static_cast<size_t>((from * source.k + k) / source.constants->scale_block);
    uint8_t* const constants = group + run.code_bytes();
    PutFloat(source.constants->scales[block], lane, constants);
    constants[kScaleBytes + lane] = static_cast<uint8_t>(ZeroCode(source, block));
  }
}

void DecodeIntegers(const PackedView& view, const uint8_t* group, int64_t lane, int64_t begin,
                    int64_t count, float* out) {
  const IntegerRun run = IntegerRunOf(view.kind);
  const int mask = (1 << run.bits) - 1;
  for (int64_t k = begin; k < begin + count; ++k) {
    const uint8_t* const codes = group + k / run.values * run.bytes();
    const uint8_t* const constants = codes + run.code_bytes();
    const CodePlace place = PlaceOf(run, k % run.values, lane);
    const int code = codes[place.byte] >> place.shift & mask;
    *out++ = FloatAt(constants, lane) * static_cast<float>(code - constants[kScaleBytes + lane]);
  }
}

// Formats with a codebook, in units of k that share a scale.

// Bytes of `values` codes of 16 features.
int64_t CodeBytes(PackKind kind, int64_t values) {
  if (kind == PackKind::kWords) return values / kBlockValues * kPackedWordBytes;
  return values * kGroupFeatures / (kind == PackKind::kCodes4 ? 2 : 1);
}

int64_t HeaderBytes(const PackedView& view) { return kScaleBytes * (view.zeros ? 2 : 1); }

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
  const CodedRows rows(source);
  std::vector<uint8_t> codes(static_cast<size_t>(source.k));
  std::vector<float> scales(static_cast<size_t>(source.k / view.unit)), zeros(scales);
  rows.Read(from, codes.data(), scales.data(), zeros.data());
  if (uint8_t* lookup = LookupCodes(view, group); lookup != nullptr) {
    for (size_t i = 0; i < codes.size(); ++i) lookup[i * kGroupFeatures + lane] = codes[i];
  }
  const int64_t unit_bytes = UnitBytes(view);
  const float factor = view.kind == PackKind::kE4M3 ? kE4M3Scale : 1.0f;
  for (size_t unit = 0; unit < scales.size(); ++unit, group += unit_bytes) {
    const uint8_t* from_codes = codes.data() + static_cast<int64_t>(unit) * view.unit;
    PutFloat(factor * scales[unit], lane, group);
    if (view.zeros) PutFloat(zeros[unit], kGroupFeatures + lane, group);
    if (view.kind == PackKind::kWords) {
      PutWords(view, from_codes, lane, group);
      continue;
    }
    uint8_t* to = group + HeaderBytes(view) + 4 * lane;
    for (const uint8_t* four = from_codes; four < from_codes + view.unit; four += 4) {
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

// The codes of matrices that are packed as kWords.
void DecodeCodes(const PackedView& view, const uint8_t* group, int64_t lane, int64_t begin,
                 int64_t count, float* out) {
  const uint8_t* const lookup = group + UnitsBytes(view);
  TREADLE_CHECK(lookup < group + view.group_bytes);
  for (int64_t k = begin; k < begin + count; ++k) {
    const uint8_t* unit = group + k / view.unit * UnitBytes(view);
    const float zero = view.zeros ? FloatAt(unit, kGroupFeatures + lane) : 0.0f;
    *out++ = FloatAt(unit, lane) * (view.codebook[lookup[k * kGroupFeatures + lane]] - zero);
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

// Inline formats are the special case of few values, which are integers.
bool PlanCodes(const MatrixSource& source, const PackTarget& target, PackedView& view) {
  const WeightFormat& format = *source.format;
  if (format.codebook.empty() && !format.apart()) return false;
  if (!format.apart() && (format.offsets || !target.inline_codes)) return false;
  const CodedRows rows(source);
  view.unit = rows.run();
  if (view.unit % kBlockValues != 0) return false;
  const bool e4m3 = format.name == "fp8";
  view.zeros = format.apart() && !source.constants->zeros.empty();
  if (e4m3 ? view.zeros || !FitsE4M3(source) : !IsCommon(rows.values())) return false;
  view.kind = PackKind::kCodes8;
  if (e4m3) {
    view.kind = PackKind::kE4M3;
  } else if (rows.bits() <= 4) {
    view.kind = PackKind::kCodes4;
  } else if (!target.integers && IsIdentity(rows.values())) {
    view.kind = PackKind::kIntegers8;
  } else if (rows.bits() > target.table_bits) {
    view.kind = PackKind::kWords;
  }
  view.group_bytes = UnitsBytes(view);
  if (view.kind == PackKind::kWords && !source.of_layer) {
    view.group_bytes += view.k * kGroupFeatures;
  }
  return true;
}

}  // namespace

constinit const Packing kRowInt8Packing = {PlanRowInt8, PackRowInt8, DecodeRowInt8};
constinit const Packing kIntegerPacking = {PlanIntegers, PackIntegers, DecodeIntegers};
constinit const Packing kCodebookPacking = {PlanCodes, PackCodes, DecodeCodes};

}  // namespace treadle
