#include "kernels/formats/matrix_source.h"

#include <cmath>
#include <numeric>

#include "base/status.h"
#include "kernels/formats/coded_rows.h"

namespace treadle {
namespace {

absl::Status CheckFinite(std::string_view what, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return InvalidArgument(what, " ", i, " is ", values[i], ", expected a finite number");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckInputOrder(const MatrixSource& source) {
  const std::span<const int32_t> order = InputOrderOf(source);
  if (order.empty()) return absl::OkStatus();
  if (source.format->activations == ActivationPolicy::kRowInt8) {
    return InvalidArgument("an input order for a matrix in ", source.format->name,
                           ", expected features in order");
  }
  if (static_cast<int64_t>(order.size()) != source.k) {
    return InvalidArgument("input order of ", order.size(), " features for a matrix of ", source.k);
  }
  std::vector<bool> seen(order.size());
  for (const int32_t feature : order) {
    if (feature < 0 || feature >= source.k || seen[feature]) {
      return InvalidArgument("input order has feature ", feature, ", expected each of 0 to ",
                             source.k - 1, " once");
    }
    seen[feature] = true;
  }
  return absl::OkStatus();
}

absl::Status CheckConstants(const MatrixSource& source) {
  const WeightFormat& format = *source.format;
  if (!format.apart()) {
    if (source.constants == nullptr) return absl::OkStatus();
    return InvalidArgument("constants for a matrix in ", format.name, ", which has its own");
  }
  if (source.constants == nullptr) return InvalidArgument("no constants for ", format.name);
  const MatrixConstants& constants = *source.constants;
  const int64_t block = constants.scale_block;
  const int64_t blocks = block > 0 ? (source.n * source.k + block - 1) / block : 0;
  if (block < 1 || static_cast<int64_t>(constants.scales.size()) != blocks) {
    return InvalidArgument(constants.scales.size(), " scales for a matrix [", source.n, ", ",
                           source.k, "] in ", format.name, " with blocks of ", block, ": expected ",
                           blocks);
  }
  if (format.activations == ActivationPolicy::kRowInt8 && block != source.k) {
    return InvalidArgument(format.name, " with blocks of ", block, ": expected one scale per row");
  }
  const size_t values = size_t{1} << format.code_bits;
  if (CodebookOf(source).size() != values) {
    return InvalidArgument("a codebook of ", CodebookOf(source).size(), " values for ", format.name,
                           ": expected ", values);
  }
  const size_t zeros = format.activations == ActivationPolicy::kRowInt8 ? 0 : blocks;
  if (!constants.zeros.empty() && constants.zeros.size() != zeros) {
    return InvalidArgument(constants.zeros.size(), " zero points for ", blocks, " scales in ",
                           format.name, ": expected ", zeros);
  }
  TREADLE_RETURN_IF_ERROR(CheckInputOrder(source));
  TREADLE_RETURN_IF_ERROR(CheckFinite("scale", constants.scales));
  return CheckFinite("zero point", constants.zeros);
}

}  // namespace

absl::Status CheckMatrixSource(const MatrixSource& source) {
  const WeightFormat& format = *source.format;
  if (source.n < 1 || source.k < 1 || source.k % format.block != 0) {
    return InvalidArgument("matrix [", source.n, ", ", source.k, "] in ", format.name,
                           ": expected positive sizes and k in multiples of ", format.block);
  }
  if (source.transposed && (format.apart() || format.block != 1)) {
    return InvalidArgument("a transposed matrix in ", format.name, ": expected a dense format");
  }
  if (!source.row_order.empty() && static_cast<int64_t>(source.row_order.size()) != source.n) {
    return InvalidArgument("row order of ", source.row_order.size(), " rows for a matrix of ",
                           source.n);
  }
  for (const int32_t row : source.row_order) {
    if (row < 0 || row >= source.n) {
      return InvalidArgument("row order names row ", row, " of a matrix of ", source.n);
    }
  }
  return CheckConstants(source);
}

std::span<const int32_t> InputOrderOf(const MatrixSource& source) {
  if (source.constants == nullptr) return {};
  return source.constants->input_order;
}

std::span<const float> CodebookOf(const MatrixSource& source) {
  if (source.constants != nullptr && !source.constants->codebook.empty()) {
    return source.constants->codebook;
  }
  return source.format->codebook;
}

int64_t ConstantRun(const MatrixSource& source) {
  const int64_t block = source.constants->scale_block;
  return block >= source.n * source.k ? source.k : std::gcd(block, source.k);
}

bool HasIntegers(const MatrixSource& source) {
  const WeightFormat& format = *source.format;
  if (!format.apart()) return format.group > 0;
  const bool bits = format.code_bits == 4 || format.code_bits == 8;
  const bool floats = format.activations == ActivationPolicy::kFloat;
  if (!bits || !floats || ConstantRun(source) % 32 != 0) return false;
  const std::span<const float> codebook = CodebookOf(source);
  for (size_t i = 0; i < codebook.size(); ++i) {
    if (codebook[i] != codebook[0] + static_cast<float>(i)) return false;
  }
  for (size_t block = 0; block < source.constants->scales.size(); ++block) {
    const float zero = ZeroCode(source, block);
    const bool code = zero >= 0 && zero < static_cast<float>(codebook.size());
    if (!code || zero != std::trunc(zero)) return false;
  }
  return true;
}

bool HasNibbles(const MatrixSource& source) {
  if (!source.format->apart()) return source.format->nibbles;
  return source.format->code_bits == 4 && HasIntegers(source);
}

float ZeroCode(const MatrixSource& source, size_t block) {
  const std::vector<float>& zeros = source.constants->zeros;
  return (zeros.empty() ? 0.0f : zeros[block]) - CodebookOf(source)[0];
}

void UnpackCodes(const WeightFormat& format, const std::byte* data, int64_t first, int64_t count,
                 uint8_t* codes) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(data);
  const int bits = format.code_bits;
  if (format.high_first) {
    for (int64_t i = first; i < first + count; ++i) {
      *codes++ = i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
    }
    return;
  }
  const unsigned mask = (1u << bits) - 1;
  for (int64_t at = first * bits; at < (first + count) * bits; at += bits) {
    unsigned value = bytes[at / 8];
    if (at % 8 + bits > 8) value |= unsigned{bytes[at / 8 + 1]} << 8;
    *codes++ = static_cast<uint8_t>((value >> (at % 8)) & mask);
  }
}

void DecodeSourceRow(const MatrixSource& source, int64_t row, float* out) {
  const WeightFormat& format = *source.format;
  const int64_t k = source.k;
  if (source.transposed) {
    for (int64_t i = 0; i < k; ++i) {
      format.decode(source.data + (i * source.n + row) * format.block_bytes, 1, out + i);
    }
    return;
  }
  if (!format.apart()) {
    format.decode(source.data + row * format.RowBytes(k), k / format.block, out);
    return;
  }
  const CodedRows rows(source);
  const std::span<const int32_t> order = InputOrderOf(source);
  std::vector<uint8_t> codes(static_cast<size_t>(k));
  std::vector<float> scales(static_cast<size_t>(k / rows.run())), zeros(scales);
  rows.Read(row, codes.data(), scales.data(), zeros.data());
  for (int64_t i = 0; i < k; ++i) {
    const int64_t run = i / rows.run();
    out[order.empty() ? i : order[i]] = scales[run] * (rows.values()[codes[i]] - zeros[run]);
  }
}

}  // namespace treadle
