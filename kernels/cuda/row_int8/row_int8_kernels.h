// The kernels of LLM.int8() (Dettmers, chapter 2); what they compute: ComputeMode in
// kernels/backend.h.
//
// Sums over k are of integers and exact, whatever their order; everything after them is one fixed
// sequence of float operations for each result. So all kernels here, for any number of rows, give
// the same bits, those of the CPU backend.
//
// Codes lie as the matrix instructions (16 features x 8 rows x 32 columns of k, or more rows) take
// them, so that copies and loads are whole lines, without bank conflicts. A unit is 64 columns of
// k.
//   weights      [features / 32, units] of 2048 bytes: A of 512 bytes for two tiles of features,
//                each with two instructions; 16 bytes of a lane side by side (simt.h's fragments)
//   activations  [rows / 8, units] of 512 bytes: four pieces of 16 columns, each with 16 bytes of
//                eight rows. Warpgroups read them from shared memory as they are
//                (warpgroup_int8.h); for a warp LoadMatrix4 makes them two instructions' B.
// Feature 4 g + 2 i + j of 32 is row g + 8 j of tile i: so a lane gets the results of features side
// by side (four with both tiles, two with one), and writes them at once. Features, rows and columns
// beyond the last are zeros, or (rows) anything: nobody looks at them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/segment.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

inline constexpr int kInt8Unit = 64;
inline constexpr int kInt8GroupFeatures = 32;
inline constexpr int kInt8TileRows = 8;
inline constexpr int kInt8WeightUnitBytes = kInt8GroupFeatures * kInt8Unit;
inline constexpr int kInt8RowUnitBytes = kInt8TileRows * kInt8Unit;
inline constexpr int kInt8PieceBytes = kInt8TileRows * 16;
// 128 * 127 * k stays below 2^31.
inline constexpr int64_t kMaxInt8Columns = int64_t{1} << 17;

TREADLE_HOST_DEVICE int64_t Int8Units(int64_t k) { return (k + kInt8Unit - 1) / kInt8Unit; }

// Where the code of (feature, column) lies.
TREADLE_HOST_DEVICE int64_t Int8WeightByte(int64_t feature, int64_t column, int64_t units) {
  const auto f = static_cast<uint32_t>(feature);
  const auto c = static_cast<uint32_t>(column);
  const uint32_t instruction = f % 4 / 2 * 2 + c % kInt8Unit / 32;
  const uint32_t lane = f % kInt8GroupFeatures / 4 * 4 + c % 16 / 4;
  const uint32_t word = c % 32 / 16 * 2 + f % 2;
  const int64_t unit = int64_t{f / kInt8GroupFeatures} * units + c / kInt8Unit;
  return unit * kInt8WeightUnitBytes + instruction * 512 + lane * 16 + word * 4 + c % 4;
}
TREADLE_HOST_DEVICE int64_t Int8RowByte(int64_t row, int64_t column, int64_t units) {
  const auto r = static_cast<uint32_t>(row);
  const auto c = static_cast<uint32_t>(column);
  const int64_t unit = int64_t{r / kInt8TileRows} * units + c / kInt8Unit;
  return unit * kInt8RowUnitBytes + c % kInt8Unit / 16 * kInt8PieceBytes + r % 8 * 16 + c % 16;
}

// A row of activations but for its codes: a line of 128 bytes. Of rows with more outliers than are
// listed, they are looked for in x again.
inline constexpr int kInt8Listed = 30;
struct Int8Row {
  float scale = 0;
  int32_t outliers = 0;
  int32_t columns[kInt8Listed] = {};  // in no order
};

// Words of a bit for each column.
TREADLE_HOST_DEVICE int Int8FlagWords(int64_t k) { return static_cast<int>((k + 31) / 32); }

// The activations of a product, and where they are quantized to.
struct Int8Input {
  const float* x = nullptr;  // [rows, x_stride]
  int64_t x_stride = 0;
  int32_t rows = 0;
  int32_t k = 0;
  int32_t units = 0;
  // An element is an outlier if the bits of its magnitude, as a number, reach this: NaN is larger
  // than everything. Above all bits: there are none.
  uint32_t threshold_bits = ~uint32_t{0};
  int32_t of_call = 0;              // OutlierRule::kPerCall
  const int32_t* owners = nullptr;  // MatMulInput's; of_call only
  uint8_t* codes = nullptr;         // [rows / 8, units] units, 16-byte aligned
  Int8Row* row_info = nullptr;      // [rows]
  uint32_t* call_flags = nullptr;   // [Int8FlagWords(k)] columns that hold an outlier; of_call only
};

struct Int8Segment : Segment {
  const uint8_t* codes = nullptr;  // [n / 32, units] units
  const float* scales = nullptr;   // [n]
};

// Projections of one input, in one launch.
struct Int8Product {
  Int8Input input;
  Int8Segment segments[kMaxSegments];
  int32_t num_segments = 0;
  // LaunchInt8Tiles only.
  int32_t whole_tiles = 0;       // Int8TilesPlan; set by the launch
  int32_t splits = 1;            // the same
  int32_t* sums = nullptr;       // Int8SumBytes(multiprocessors)
  uint32_t* arrivals = nullptr;  // [Int8Arrivals(multiprocessors)], zeros before and after
};

// Bytes of Int8Input::codes, row_info and call_flags.
struct Int8ScratchBytes {
  size_t codes = 0;
  size_t row_info = 0;
  size_t call_flags = 0;
};
Int8ScratchBytes Int8Scratch(int64_t rows, int64_t k);

// Codes, scales and outliers of all rows.
void LaunchInt8Quantize(Device& device, const Int8Input& input);

// Few rows (at most kInt8StreamRows): weights stream through once, bound by bytes.
inline constexpr int64_t kInt8StreamRows = 16;
void LaunchInt8Stream(Device& device, Int8Product product);
// Whether LaunchInt8Stream quantizes x itself; otherwise, as LaunchInt8Tiles, it needs
// LaunchInt8Quantize before it.
bool Int8StreamQuantizes(const Device& device, int64_t rows, int64_t k);

// More rows: tiles of features x rows, as ChooseInt8Tiles says.
void LaunchInt8Tiles(Device& device, Int8Product product);
inline constexpr int kInt8BlockFeatures = 128;
inline constexpr int kInt8WarpgroupFeatures = 192;
inline constexpr int kInt8WarpgroupRows = 256;
// A product as the plan sees it: tiles of kInt8BlockFeatures, and of kInt8WarpgroupFeatures, or 0
// of them where the device has no warpgroups.
struct Int8TilesShape {
  int64_t rows = 0;
  int64_t feature_tiles = 0;
  int64_t warpgroup_tiles = 0;
  int64_t units = 0;
};
// Features and rows of a tile. The first `whole` tiles have a block each; `splits` blocks share the
// units of k of each of the others.
struct Int8TilesPlan {
  int features = 0;
  int rows = 0;
  int64_t whole = 0;
  int splits = 1;
  friend bool operator==(const Int8TilesPlan&, const Int8TilesPlan&) = default;
};
// The plan of the least predicted time. most_rows: what the machine has shared memory for, of tiles
// of kInt8BlockFeatures.
Int8TilesPlan ChooseInt8Tiles(const Int8TilesShape& shape, int multiprocessors,
                              int most_rows = 256);
int64_t Int8Tiles(const Int8TilesShape& shape, const Int8TilesPlan& plan);
// LaunchInt8Tiles' call for a plan of kInt8WarpgroupFeatures, and whether it could.
void LaunchInt8Warpgroups(Device& device, const Int8Product& product, uint32_t blocks);
bool Int8WarpgroupsFit(const DeviceProperties& machine, int64_t k);
size_t Int8SumBytes(int multiprocessors);
int Int8Arrivals(int multiprocessors);

// Embed of a table [*, k].
struct Int8Embed {
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
  int32_t units = 0;
  EmbedRows rows;
};
void LaunchInt8Embed(Device& device, const Int8Embed& embed);

// On the host: groups [first, first + count) of 32 rows of the packed matrix, count * units * 2048
// bytes.
void PackInt8Groups(const MatrixSource& source, int64_t first, int64_t count, uint8_t* out);

}  // namespace treadle::cuda
