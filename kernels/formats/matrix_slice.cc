#include "kernels/formats/matrix_slice.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle {
namespace {

// `rows`: of the source, in the order of the slice.
void CopyBlocks(const MatrixSource& source, std::span<const int32_t> rows, int64_t begin,
                MatrixSlice& slice) {
  const WeightFormat& format = *source.format;
  // In a transposed source, values lie one by one.
  const int64_t bytes = source.transposed ? format.block_bytes : format.RowBytes(slice.k);
  const int64_t pieces = source.transposed ? slice.k : 1;
  std::byte* to = slice.data.data();
  for (const int32_t row : rows) {
    for (int64_t i = 0; i < pieces; ++i, to += bytes) {
      const int64_t at = source.transposed
                             ? ((begin + i) * source.n + row) * bytes
                             : row * format.RowBytes(source.k) + format.RowBytes(begin);
      std::memcpy(to, source.data + at, static_cast<size_t>(bytes));
    }
  }
}

void CopyCodes(const MatrixSource& source, std::span<const int32_t> rows, int64_t begin,
               MatrixSlice& slice) {
  // So many rows fill whole bytes.
  constexpr size_t kRows = 8;
  const WeightFormat& format = *source.format;
  std::vector<uint8_t> codes;
  std::byte* to = slice.data.data();
  for (size_t first = 0; first < rows.size(); first += kRows) {
    const auto some = rows.subspan(first, std::min(kRows, rows.size() - first));
    const int64_t count = std::ssize(some) * slice.k;
    codes.assign(static_cast<size_t>(count + count % 2), 0);  // half a byte ends an odd matrix
    for (size_t i = 0; i < some.size(); ++i) {
      UnpackCodes(format, source.data, some[i] * source.k + begin, slice.k,
                  codes.data() + static_cast<int64_t>(i) * slice.k);
    }
    formats::PackCodes(format, codes.data(), count, to);
    to += count * format.code_bits / 8;
  }
}

void CopyConstants(const MatrixSource& source, std::span<const int32_t> rows, int64_t begin,
                   MatrixSlice& slice) {
  const MatrixConstants& from = *source.constants;
  MatrixConstants& to = slice.constants;
  to.codebook = from.codebook;
  to.input_order = from.input_order;
  to.outlier_threshold = from.outlier_threshold;
  to.outlier_rule = from.outlier_rule;
  // In every row a scale of the source begins at a multiple of its block, less the row's offset;
  // the new block divides all of these. Where rows do not share a block, a row has one scale.
  const int64_t block = from.scale_block;
  to.scale_block = block % source.k == 0
                       ? slice.k
                       : std::gcd(std::gcd(block, source.k), std::gcd(begin, slice.k));
  for (const int32_t row : rows) {
    for (int64_t column = begin; column < begin + slice.k; column += to.scale_block) {
      const int64_t at = (row * source.k + column) / block;
      to.scales.push_back(from.scales[at]);
      if (!from.zeros.empty()) to.zeros.push_back(from.zeros[at]);
    }
  }
}

// The canonical values.
void CopyFloats(const MatrixSource& source, std::span<const int32_t> rows, int64_t begin,
                MatrixSlice& slice) {
  std::vector<float> values(static_cast<size_t>(source.k));
  const size_t bytes = static_cast<size_t>(slice.k) * sizeof(float);
  std::byte* to = slice.data.data();
  for (const int32_t row : rows) {
    DecodeSourceRow(source, row, values.data());
    std::memcpy(to, values.data() + begin, bytes);
    to += bytes;
  }
}

}  // namespace

absl::StatusOr<MatrixSlice> SliceMatrix(const MatrixSource& source, std::span<const int32_t> rows,
                                        int64_t begin, int64_t end) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  const WeightFormat& format = *source.format;
  if (begin < 0 || begin >= end || end > source.k) {
    return InvalidArgument("columns ", begin, " to ", end, " of a matrix [", source.n, ", ",
                           source.k, "], expected a part of it");
  }
  const int64_t unit = ColumnUnit(format);
  if (begin % unit != 0 || end % unit != 0) {
    return InvalidArgument("columns ", begin, " to ", end, " of a matrix [", source.n, ", ",
                           source.k, "] in ", format.name, ", expected whole blocks of ", unit);
  }
  std::vector<int32_t> from(rows.begin(), rows.end());
  if (rows.empty()) {
    from.resize(static_cast<size_t>(source.n));
    std::iota(from.begin(), from.end(), 0);
  }
  for (int32_t& row : from) {
    if (row < 0 || row >= source.n) {
      return InvalidArgument("row ", row, " of a matrix of ", source.n);
    }
    row = static_cast<int32_t>(source.SourceRow(row));
  }
  MatrixSlice slice = {.format = source.format, .n = std::ssize(from), .k = end - begin};
  const bool as_floats = !InputOrderOf(source).empty() && slice.k < source.k;
  if (as_floats) slice.format = FindWeightFormat("f32");
  slice.data.resize(static_cast<size_t>(slice.format->MatrixBytes(slice.n, slice.k)));
  if (as_floats) {
    CopyFloats(source, from, begin, slice);
  } else if (format.apart()) {
    CopyCodes(source, from, begin, slice);
    CopyConstants(source, from, begin, slice);
  } else {
    CopyBlocks(source, from, begin, slice);
  }
  return slice;
}

MatrixSlice JoinColumns(std::vector<MatrixSlice> slices) {
  if (slices.size() == 1) return std::move(slices[0]);
  MatrixSlice joined = {.format = slices[0].format, .n = slices[0].n, .k = 0};
  if (joined.format->apart()) joined.format = FindWeightFormat("f32");
  for (const MatrixSlice& slice : slices) joined.k += slice.k;
  std::vector<float> values(static_cast<size_t>(joined.k));
  for (int64_t row = 0; row < joined.n; ++row) {
    for (const MatrixSlice& slice : slices) {
      const auto bytes = static_cast<size_t>(joined.format->RowBytes(slice.k));
      const std::byte* from = slice.data.data() + static_cast<size_t>(row) * bytes;
      if (slice.format->apart()) {
        DecodeSourceRow(slice.source(), row, values.data());
        from = reinterpret_cast<const std::byte*>(values.data());
      }
      joined.data.insert(joined.data.end(), from, from + bytes);
    }
  }
  return joined;
}

}  // namespace treadle
