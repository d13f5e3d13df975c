// From a checkpoint's codes to the layout of low_bit.h.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/dtype.h"
#include "kernels/formats/coded_rows.h"

namespace treadle::cuda {
namespace {

constexpr int kCodes = 256;
constexpr size_t kAlignment = 256;  // of the parts of a matrix

// Everything of a matrix on the host, in the order of the device.
struct Parts {
  LowBitView view;
  uint8_t padding = 0;          // a code whose value is finite
  std::vector<uint32_t> codes;  // or floats
  std::vector<float> scales;    // [bands][runs][8][2]
  std::vector<float> seconds;   // the same
  std::vector<float> values;    // [256]
  std::vector<uint32_t> pairs;  // [256]
};

int64_t Bands(const LowBitView& view) { return (view.n + kBandFeatures - 1) / kBandFeatures; }

// -- plan -----------------------------------------------------------------------------------------

void SetValues(const CodedRows& rows, Parts& parts) {
  parts.view.bits = rows.bits() <= 4 ? 4 : 8;
  parts.values.assign(kCodes, 0.0f);
  std::ranges::copy(rows.values(), parts.values.begin());
  const auto finite = std::ranges::find_if(rows.values(), [](float v) { return std::isfinite(v); });
  if (finite != rows.values().end()) {
    parts.padding = static_cast<uint8_t>(finite - rows.values().begin());
  }
}

// False if constants change too often, or columns are in another order.
bool SetRuns(const MatrixSource& source, const CodedRows& rows, LowBitView& view) {
  if (!InputOrderOf(source).empty()) return false;
  // The same in every row, which a run may end with; 0: the whole row.
  const int64_t columns = rows.run() == source.k ? 0 : rows.run();
  if (columns % 16 != 0) return false;
  view.granule = columns % 64 == 0 ? 64 : columns % 32 == 0 ? 32 : 16;
  const int64_t granules = columns / view.granule;
  if (columns == 0) {
    view.run_shift = kWholeRow;
  } else if (view.granule == 64 && std::has_single_bit(static_cast<uint64_t>(granules))) {
    view.run_shift = std::countr_zero(static_cast<uint64_t>(granules));
  }
  const int last = view.steps * (kStepColumns / view.granule) - 1;
  view.runs = (last >> view.run_shift) + 1;
  return true;
}

// Whether values keep their precision in f16, whose range is narrow.
bool FitsHalf(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) {
    if (std::isfinite(value)) largest = std::fmax(largest, std::fabs(value));
  }
  return largest >= 0x1p-4f && largest <= 65504.0f;
}

void SetPairs(DType dtype, Parts& parts) {
  parts.pairs.assign(kCodes, 0);
  if (dtype == DType::kF32) return;
  const auto bits = [&](int code) -> uint32_t {
    const float value = parts.values[code];
    return dtype == DType::kF16 ? ToHalf(value).bits : ToBFloat16(value).bits;
  };
  for (int code = 0; code < kCodes; ++code) {
    const bool nibbles = parts.view.bits == 4;
    const uint32_t low = bits(nibbles ? code & 15 : code);
    const uint32_t high = bits(nibbles ? code >> 4 : code);
    parts.pairs[code] = low | high << 16;
  }
}

// -- rows -----------------------------------------------------------------------------------------

// codes: [64 * steps], padded.
void PutCodes(int64_t row, std::span<const uint8_t> codes, Parts& parts) {
  const LowBitView& view = parts.view;
  CodePlace places[kStepColumns];
  for (int column = 0; column < kStepColumns; ++column) {
    places[column] =
        PlaceOfCode(view.bits, view.granule, static_cast<int>(row % kBandFeatures), column);
  }
  const int words = StepWords(view.bits);
  uint32_t* step = parts.codes.data() + row / kBandFeatures * view.steps * words;
  for (size_t first = 0; first < codes.size(); first += kStepColumns, step += words) {
    for (int column = 0; column < kStepColumns; ++column) {
      const CodePlace& place = places[column];
      step[place.word] |= uint32_t{codes[first + column]} << place.shift;
    }
  }
}

void PackRows(const MatrixSource& source, const CodedRows& rows, int threads, Parts& parts) {
  const LowBitView& view = parts.view;
  const int64_t bands = Bands(view);
  parts.codes.assign(static_cast<size_t>(bands * view.steps * StepWords(view.bits)), 0);
  parts.scales.assign(static_cast<size_t>(bands * view.runs * kBandFeatures), 0);
  parts.seconds = parts.scales;
  InParallel(threads, bands, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(view.steps) * kStepColumns);
    std::vector<float> scales(static_cast<size_t>(source.k / rows.run())), seconds(scales);
    for (int64_t row = begin * kBandFeatures; row < end * kBandFeatures; ++row) {
      std::ranges::fill(codes, parts.padding);
      if (row < source.n) {
        rows.Read(source.SourceRow(row), codes.data(), scales.data(), seconds.data());
        for (int64_t run = 0; run < view.runs; ++run) {
          const int64_t column = run * view.granule << view.run_shift;
          if (column >= source.k) break;
          const int64_t pair = (row / kBandFeatures * view.runs + run) * 8 + row % 8;
          const int64_t at = pair * 2 + row % kBandFeatures / 8;
          parts.scales[at] = scales[column / rows.run()];
          parts.seconds[at] = seconds[column / rows.run()];
        }
      }
      PutCodes(row, codes, parts);
    }
  });
}

void PackFloats(const MatrixSource& source, int threads, Parts& parts) {
  parts.view.bits = 32;
  parts.codes.resize(static_cast<size_t>(source.n * source.k));
  InParallel(threads, source.n, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(source.k));
    for (int64_t row = begin; row < end; ++row) {
      DecodeSourceRow(source, source.SourceRow(row), values.data());
      std::memcpy(parts.codes.data() + row * source.k, values.data(),
                  values.size() * sizeof(float));
    }
  });
}

// -- constants ------------------------------------------------------------------------------------

bool IsHalf(float value) { return ToFloat(ToHalf(value)) == value; }

// Interleaved, and as f16 if every one is exact so.
std::vector<std::byte> EncodeConstants(const MatrixSource& source, Parts& parts) {
  LowBitView& view = parts.view;
  const bool any = std::ranges::any_of(parts.seconds, [](float v) { return v != 0; });
  if (any) view.second = source.format->apart() ? Second::kZero : Second::kOffset;
  const bool half =
      std::ranges::all_of(parts.scales, IsHalf) && std::ranges::all_of(parts.seconds, IsHalf);
  view.half_constants = half ? 1 : 0;
  const size_t bytes = half ? sizeof(uint16_t) : sizeof(float);
  std::vector<std::byte> encoded(parts.scales.size() * bytes * (any ? 2 : 1));
  std::byte* at = encoded.data();
  const auto put = [&](float value) {
    const uint16_t bits = ToHalf(value).bits;
    std::memcpy(at, half ? static_cast<const void*>(&bits) : &value, bytes);
    at += bytes;
  };
  for (size_t i = 0; i < parts.scales.size(); ++i) {
    put(parts.scales[i]);
    if (any) put(parts.seconds[i]);
  }
  return encoded;
}

// Copies parts one behind the other, and says where they are.
class Upload {
 public:
  template <typename T>
  size_t Add(const std::vector<T>& part) {
    const size_t at = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(at + part.size() * sizeof(T));
    if (!part.empty()) std::memcpy(bytes_.data() + at, part.data(), part.size() * sizeof(T));
    return at;
  }
  absl::StatusOr<Buffer> Copy(Device& device) const {
    TREADLE_ASSIGN_OR_RETURN(Buffer buffer, device.Allocate(bytes_.size()));
    device.CopyToDevice(buffer.data(), bytes_.data(), bytes_.size());
    return buffer;
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LowBitMatrix>> PackLowBit(Device& device, MatMulFamily& family,
                                                         const MatrixSource& source, DType dtype,
                                                         int threads) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  constexpr int64_t kMaxFeatures = int64_t{1} << 30;  // indices of kernels are of 32 bits
  if (source.n > kMaxFeatures || source.k > kMaxFeatures) {
    return InvalidArgument("a matrix [", source.n, ", ", source.k, "] in ", source.format->name,
                           ": expected at most ", kMaxFeatures, " rows and columns");
  }
  Parts parts;
  LowBitView& view = parts.view;
  view.n = static_cast<int32_t>(source.n);
  view.k = static_cast<int32_t>(source.k);
  view.steps = (view.k + kStepColumns - 1) / kStepColumns;
  const CodedRows rows(source);
  SetValues(rows, parts);
  const bool fits = dtype != DType::kF16 || FitsHalf(parts.values);
  std::vector<std::byte> constants;
  if (fits && SetRuns(source, rows, view)) {
    PackRows(source, rows, threads, parts);
    constants = EncodeConstants(source, parts);
    SetPairs(dtype, parts);
  } else {
    PackFloats(source, threads, parts);
  }
  Upload upload;
  const size_t codes_at = upload.Add(parts.codes);
  const size_t constants_at = upload.Add(constants);
  const size_t pairs_at = upload.Add(parts.pairs);
  const size_t values_at = upload.Add(parts.values);
  TREADLE_ASSIGN_OR_RETURN(Buffer memory, upload.Copy(device));
  const std::byte* base = memory.data();
  view.codes = reinterpret_cast<const uint32_t*>(base + codes_at);
  view.constants = base + constants_at;
  view.pairs = reinterpret_cast<const uint32_t*>(base + pairs_at);
  view.values = reinterpret_cast<const float*>(base + values_at);
  return std::make_unique<LowBitMatrix>(family, *source.format, view, std::move(memory));
}

}  // namespace treadle::cuda
