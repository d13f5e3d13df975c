// Cutting a matrix into the parts that ranks hold (tensor parallelism), in its own format.
//
// Rows (output features) can be taken in any format. Columns (input features) of inline formats are
// cut between blocks; of apart formats anywhere: codes and constants are packed anew, and where a
// scale's block straddles the cut, blocks become as small as fits all rows. A part of the columns
// of a matrix with an input order becomes 32-bit floats: its groups would be of any size. A slice
// of an LLM.int8() matrix keeps the scales of whole rows; its product quantizes its own part of the
// activations, with that part's own absmax (finer than the whole row's).
//
// Columns in several ranges are cut apart and joined; in apart formats they then become floats.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/matrix_source.h"

namespace treadle {

using MatrixSlice = OwnedMatrix;

// Columns can be cut at multiples of this.
inline int64_t ColumnUnit(const WeightFormat& format) { return format.apart() ? 1 : format.block; }

// Rows `rows` of the packed matrix, in that order (empty: all), columns [begin, end): the canonical
// values are those of the source, bit for bit. Errors: a source that is not valid; columns that are
// not in it, or are not whole blocks (the error names the block).
absl::StatusOr<MatrixSlice> SliceMatrix(const MatrixSource& source, std::span<const int32_t> rows,
                                        int64_t begin, int64_t end);

// The columns of the first, behind them those of the second, and so on, of slices with the same
// rows and format.
MatrixSlice JoinColumns(std::vector<MatrixSlice> slices);

}  // namespace treadle
