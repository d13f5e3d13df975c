// The projections of every kind of product, several of one input in one launch, and the arguments
// of Embed.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/host_device.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

inline constexpr int kMaxSegments = 4;

// One projection, but for its weights.
struct Segment {
  const float* bias = nullptr;  // [n] or null
  float* out = nullptr;         // [rows, out_stride]
  int64_t out_stride = 0;
  int32_t n = 0;
  int32_t accumulate = 0;
  int32_t first_tile = 0;  // its first tile of features; set by the launch

  Segment() = default;
  Segment(const float* bias_in, const Tensor& out_in, bool accumulate_in)
      : bias(bias_in),
        out(out_in.Row<float>(0)),
        out_stride(out_in.stride),
        n(static_cast<int32_t>(out_in.cols)),
        accumulate(accumulate_in ? 1 : 0) {}
};

// Gives every segment of a product its tiles of `width` features; returns how many there are.
template <typename Product>
int32_t NumberTiles(Product& product, int width) {
  int32_t tiles = 0;
  for (int i = 0; i < product.num_segments; ++i) {
    product.segments[i].first_tile = tiles;
    tiles += (product.segments[i].n + width - 1) / width;
  }
  return tiles;
}

// y + bias, + what is there if the results accumulate, to feature `feature` of row `row`.
TREADLE_DEVICE void StoreResult(const Segment& segment, int64_t row, int feature, float y) {
  if (segment.bias != nullptr) y += segment.bias[feature];
  float* out = segment.out + row * segment.out_stride + feature;
  *out = segment.accumulate != 0 ? y + *out : y;
}

// The segment that tile `tile` is of.
template <typename Product>
TREADLE_DEVICE auto SegmentOf(const Product& p, int tile) {
  auto segment = p.segments[0];
  TREADLE_UNROLL
  for (int i = 1; i < kMaxSegments; ++i) {
    if (i < p.num_segments && tile >= p.segments[i].first_tile) segment = p.segments[i];
  }
  return segment;
}

// Which rows of a table Backend::Embed looks up, and where they go.
struct EmbedRows {
  const int32_t* ids = nullptr;           // [rows] on the device
  const int32_t* last_samples = nullptr;  // what ids below -1 point into
  int32_t first = 0;                      // the id of the table's first row
  int32_t n = 0;                          // rows of the table
  float* out = nullptr;                   // [rows, out_stride]
  int64_t out_stride = 0;
  int32_t rows = 0;  // > 0
  int32_t k = 0;
  int32_t accumulate = 0;

  EmbedRows() = default;
  EmbedRows(const int32_t* ids_in, const int32_t* last_samples_in, int32_t first_in, int64_t n_in,
            bool accumulate_in, const Tensor& out_in)
      : ids(ids_in),
        last_samples(last_samples_in),
        first(first_in),
        n(static_cast<int32_t>(n_in)),
        out(out_in.Row<float>(0)),
        out_stride(out_in.stride),
        rows(static_cast<int32_t>(out_in.rows)),
        k(static_cast<int32_t>(out_in.cols)),
        accumulate(accumulate_in ? 1 : 0) {}
};

}  // namespace treadle::cuda
