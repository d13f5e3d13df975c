#include "kernels/formats/quantize.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "base/status.h"
#include "kernels/dtype.h"
#include "kernels/formats/quantizers.h"

namespace treadle {
namespace {

// Weights that are handled at once where nothing else decides; a multiple of every block.
constexpr int64_t kPiece = 4096;
constexpr float kLargestHalf = 65504.0f;

// The state that all steps share.
struct Job {
  const QuantizeSpec& spec;
  std::span<const float> values;
  int64_t n;
  int64_t k;
  const ParallelFor& parallel_for;
  std::span<const float> importance;
};

// The largest magnitude; a NaN counts as larger than all numbers. On integers, because compilers
// may reorder those.
float LargestMagnitude(std::span<const float> values) {
  int32_t largest = 0;
  for (const float value : values) {
    largest = std::max(largest, std::bit_cast<int32_t>(value) & 0x7fffffff);
  }
  return std::bit_cast<float>(largest);
}

// One for each `block` consecutive values; the last may be shorter. Refuses values beyond `limit`.
absl::StatusOr<std::vector<float>> AbsMaxes(const Job& job, int64_t block, float limit) {
  const auto count = static_cast<int64_t>(job.values.size());
  std::vector<float> absmaxes(static_cast<size_t>((count + block - 1) / block));
  const auto piece = [&](int64_t b) {
    return job.values.subspan(b * block, std::min(block, count - b * block));
  };
  job.parallel_for(static_cast<int64_t>(absmaxes.size()), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) absmaxes[b] = LargestMagnitude(piece(b));
  });
  for (size_t b = 0; b < absmaxes.size(); ++b) {
    if (absmaxes[b] <= limit) continue;
    const auto values = piece(static_cast<int64_t>(b));
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [&](float value) { return !(std::fabs(value) <= limit); });
    const int64_t at = static_cast<int64_t>(b) * block + (bad - values.begin());
    return InvalidArgument("row ", at / job.k, ", column ", at % job.k, " of a matrix [", job.n,
                           ", ", job.k, "] is ", *bad, ": ", job.spec.name,
                           " needs finite numbers of at most ", limit);
  }
  return absmaxes;
}

absl::Status MakeInline(const Job& job, const formats::BlockEncoder& encoder,
                        QuantizedMatrix& matrix) {
  const WeightFormat& format = *job.spec.format;
  // A piece is a whole number of blocks, but for the last.
  TREADLE_RETURN_IF_ERROR(AbsMaxes(job, kPiece, encoder.largest).status());
  if (!job.importance.empty()) {
    job.parallel_for(job.n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        encoder.encode(job.values.data() + row * job.k, job.importance.data(), job.k / format.block,
                       matrix.data.data() + row * format.RowBytes(job.k));
      }
    });
    return absl::OkStatus();
  }
  const auto count = static_cast<int64_t>(job.values.size());
  job.parallel_for((count + kPiece - 1) / kPiece, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * kPiece, count);
    encoder.encode(job.values.data() + begin * kPiece, nullptr,
                   (last - begin * kPiece) / format.block,
                   matrix.data.data() + begin * kPiece / format.block * format.block_bytes);
  });
  return absl::OkStatus();
}

absl::Status MakeRows(const Job& job, QuantizedMatrix& matrix) {
  const auto encode = job.spec.format->activations == ActivationPolicy::kRowInt8
                          ? formats::EncodeRowInt8
                          : formats::EncodeRowE4M3;
  TREADLE_ASSIGN_OR_RETURN(const std::vector<float> absmaxes, AbsMaxes(job, job.k, FLT_MAX));
  matrix.constants.scale_block = job.k;
  matrix.constants.scales.resize(static_cast<size_t>(job.n));
  job.parallel_for(job.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      matrix.constants.scales[row] = encode(job.values.data() + row * job.k, job.k, absmaxes[row],
                                            matrix.data.data() + row * job.k);
    }
  });
  return absl::OkStatus();
}

// Codes of values [begin, end), which have one divisor. Full blocks are multiplied by its
// reciprocal and a last, shorter one is divided, as bitsandbytes does.
void EncodeRange(const Job& job, const formats::CodebookEncoder& encoder, int64_t begin,
                 int64_t end, float divisor, bool full, QuantizedMatrix& matrix) {
  const WeightFormat& format = *job.spec.format;
  const float reciprocal = 1.0f / divisor;
  float scaled[kPiece + 1];
  uint8_t codes[kPiece + 1];
  for (int64_t at = begin; at < end; at += kPiece) {
    int64_t count = std::min(kPiece, end - at);
    const float* values = job.values.data() + at;
    for (int64_t i = 0; i < count; ++i) {
      scaled[i] = full ? values[i] * reciprocal : values[i] / divisor;
    }
    // The half byte at the end of a matrix of odd size: bitsandbytes leaves the code of 0 there.
    if (format.high_first && count % 2 == 1) scaled[count++] = 0;
    encoder.Encode(scaled, count, codes);
    formats::PackCodes(format, codes, count, matrix.data.data() + at * format.code_bits / 8);
  }
}

void EncodeBlocks(const Job& job, std::span<const float> codebook, int64_t block,
                  std::span<const float> divisors, QuantizedMatrix& matrix) {
  const formats::CodebookEncoder encoder(codebook);
  const auto count = static_cast<int64_t>(job.values.size());
  // Pieces of one block, or of a part of a large one; bytes are not shared between them.
  const int64_t piece = std::min(block, kPiece);
  job.parallel_for((count + piece - 1) / piece, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t last = std::min((p + 1) * piece, count);
      const int64_t b = p * piece / block;
      EncodeRange(job, encoder, p * piece, last, divisors[b], (b + 1) * block <= count, matrix);
    }
  });
}

// bitsandbytes' 4-bit types. Divisors of less than 1e-38 would have no reciprocal. bitsandbytes
// also stores the divisor as the scale of a last, shorter block.
absl::Status MakeFourBits(const Job& job, QuantizedMatrix& matrix) {
  const int64_t block = job.spec.block;
  TREADLE_ASSIGN_OR_RETURN(std::vector<float> scales, AbsMaxes(job, block, FLT_MAX));
  std::vector<float> divisors(scales.size());
  for (size_t i = 0; i < scales.size(); ++i) divisors[i] = std::max(scales[i], 1e-38f);
  if (job.values.size() % static_cast<size_t>(block) != 0) scales.back() = divisors.back();
  EncodeBlocks(job, job.spec.format->codebook, block, divisors, matrix);
  matrix.constants.scale_block = block;
  if (job.spec.double_quantized) {
    matrix.nested = formats::NestScales(scales, formats::MeanOf(scales));
    scales = DecodeScales(*matrix.nested);
  }
  matrix.constants.scales = std::move(scales);
  return absl::OkStatus();
}

std::vector<float> CodebookFor(const Job& job, std::span<const float> scales, int64_t block) {
  const int bits = job.spec.format->code_bits;
  switch (job.spec.codebook) {
    case QuantizeSpec::Codebook::kInt:
      return formats::IntCodebook(bits);
    case QuantizeSpec::Codebook::kFloat:
      return formats::FloatCodebook(bits, job.spec.exponent_bits);
    case QuantizeSpec::Codebook::kDynamic:
      return formats::DynamicCodebook(bits);
    case QuantizeSpec::Codebook::kQuantile:
      return formats::QuantileCodebook(bits, job.values, scales, block);
    case QuantizeSpec::Codebook::kE2M1:
      return formats::E2M1Codebook();
    case QuantizeSpec::Codebook::kFormat:
      break;
  }
  TREADLE_CHECK(false);
}

// k-bit types: scales are the 16-bit roundings of the blocks' largest magnitudes.
absl::Status MakeKBit(const Job& job, QuantizedMatrix& matrix) {
  const bool tensor = job.spec.block == 0;
  TREADLE_ASSIGN_OR_RETURN(std::vector<float> scales,
                           AbsMaxes(job, tensor ? kPiece : job.spec.block, kLargestHalf));
  if (tensor) scales.assign(1, float{*std::max_element(scales.begin(), scales.end())});
  const int64_t block = tensor ? static_cast<int64_t>(job.values.size()) : job.spec.block;
  for (float& scale : scales) scale = ToFloat(ToHalf(scale));
  matrix.constants.codebook = CodebookFor(job, scales, block);
  std::vector<float> divisors = scales;
  // A block that rounds to zero: whatever the codes, so is the result.
  std::replace(divisors.begin(), divisors.end(), 0.0f, 1.0f);
  EncodeBlocks(job, matrix.constants.codebook, block, divisors, matrix);
  matrix.constants.scale_block = block;
  matrix.constants.scales = std::move(scales);
  return absl::OkStatus();
}

}  // namespace

double QuantizedMatrix::BitsPerWeight() const {
  if (!format->apart()) return format->bits_per_weight;
  // k-bit types, GPTQ and AWQ keep 16-bit scales; zero points are as wide as codes.
  const bool half = format->codebook.empty() || format->name.starts_with("gptq");
  double bits = (half ? 16.0 : 32.0) * static_cast<double>(constants.scales.size()) +
                format->code_bits * static_cast<double>(constants.zeros.size());
  if (nested) {
    bits = 8.0 * static_cast<double>(nested->codes.size()) +
           32.0 * static_cast<double>(nested->absmax.size() + 1);
  }
  return format->bits_per_weight + bits / static_cast<double>(n * k);
}

absl::StatusOr<QuantizedMatrix> Quantize(const QuantizeSpec& spec, std::span<const float> values,
                                         int64_t n, int64_t k, const ParallelFor& parallel_for,
                                         std::span<const float> importance) {
  const WeightFormat& format = *spec.format;
  if (n < 1 || k < 1 || k % format.block != 0) {
    return InvalidArgument("matrix [", n, ", ", k, "] for ", spec.name,
                           ": expected positive sizes and columns in multiples of ", format.block);
  }
  TREADLE_CHECK(static_cast<int64_t>(values.size()) == n * k);
  TREADLE_CHECK(importance.empty() || static_cast<int64_t>(importance.size()) == k);
  const Job job = {spec, values, n, k, parallel_for, importance};
  QuantizedMatrix matrix;
  matrix.format = &format;
  matrix.n = n;
  matrix.k = k;
  matrix.data.resize(static_cast<size_t>(format.MatrixBytes(n, k)));
  absl::Status status;
  if (const auto* encoder = formats::FindBlockEncoder(format.name)) {
    status = MakeInline(job, *encoder, matrix);
  } else if (spec.codebook != QuantizeSpec::Codebook::kFormat) {
    status = MakeKBit(job, matrix);
  } else if (format.code_bits == 4) {
    status = MakeFourBits(job, matrix);
  } else {
    status = MakeRows(job, matrix);
  }
  if (!status.ok()) return status;
  return matrix;
}

}  // namespace treadle
