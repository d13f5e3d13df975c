// Grids of the I types: lists of points, of which a code names one. The points are figures of
// llama.cpp (ggml-common.h), where they were found by searching; a file means nothing without them.
//
// Thread safety: constant.
#pragma once

#include <cstdint>

namespace treadle::formats {

template <int kCount, int kDimensions>
struct Grid {
  static constexpr int kPoints = kCount, kWidth = kDimensions;
  int8_t points[kCount][kDimensions];
};

extern const Grid<256, 8> kIq2Xxs;
extern const Grid<512, 8> kIq2Xs;
extern const Grid<1024, 8> kIq2S;
extern const Grid<256, 4> kIq3Xxs;
extern const Grid<512, 4> kIq3S;
extern const Grid<2048, 8> kIq1;  // IQ1_S and IQ1_M

}  // namespace treadle::formats
