#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/cuda/row_int8/row_int8.h"

namespace treadle::cuda {
namespace {

void PackGroup(const MatrixSource& source, int64_t group, uint8_t* out) {
  const int64_t units = Int8Units(source.k);
  std::memset(out, 0, static_cast<size_t>(units * kInt8WeightUnitBytes));
  for (int64_t i = 0; i < kInt8GroupFeatures; ++i) {
    const int64_t feature = group * kInt8GroupFeatures + i;
    if (feature >= source.n) return;
    const std::byte* codes = source.data + source.SourceRow(feature) * source.k;
    for (int64_t column = 0; column < source.k; column += 4) {  // four columns are one word
      const auto bytes = static_cast<size_t>(std::min<int64_t>(4, source.k - column));
      std::memcpy(out + Int8WeightByte(i, column, units), codes + column, bytes);
    }
  }
}

}  // namespace

void PackInt8Groups(const MatrixSource& source, int64_t first, int64_t count, int threads,
                    uint8_t* out) {
  const int64_t group_bytes = Int8Units(source.k) * kInt8WeightUnitBytes;
  const int64_t pieces = std::clamp<int64_t>(threads, 1, count);
  const auto pack = [&](int64_t piece) {
    for (int64_t i = count * piece / pieces; i < count * (piece + 1) / pieces; ++i) {
      PackGroup(source, first + i, out + i * group_bytes);
    }
  };
  std::vector<std::jthread> others;
  for (int64_t piece = 1; piece < pieces; ++piece) others.emplace_back(pack, piece);
  pack(0);
}

}  // namespace treadle::cuda
