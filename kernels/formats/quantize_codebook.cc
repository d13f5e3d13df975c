#include <algorithm>
#include <bit>
#include <numeric>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle::formats {
namespace {

// How many bounds lie below each value. Comparisons of all bounds vectorize; few of them are
// quicker than a search.
template <int kBounds>
void Count(const float* values, int64_t count, const float* bounds, uint8_t* ranks) {
  for (int64_t i = 0; i < count; ++i) {
    int rank = 0;
    for (int b = 0; b < kBounds; ++b) rank += values[i] > bounds[b] ? 1 : 0;
    ranks[i] = static_cast<uint8_t>(rank);
  }
}

void Search(int bits, const float* values, int64_t count, const float* bounds, uint8_t* ranks) {
  for (int64_t i = 0; i < count; ++i) {
    int rank = 0;
    for (int half = 1 << (bits - 1); half > 0; half /= 2) {
      rank += values[i] > bounds[rank + half - 1] ? half : 0;
    }
    ranks[i] = static_cast<uint8_t>(rank);
  }
}

}  // namespace

CodebookEncoder::CodebookEncoder(std::span<const float> codebook)
    : bits_(std::bit_width(codebook.size()) - 1), ranked_(codebook.size()) {
  TREADLE_CHECK(codebook.size() == size_t{1} << bits_ && bits_ >= 3 && bits_ <= 8);
  std::iota(ranked_.begin(), ranked_.end(), uint8_t{0});
  std::stable_sort(ranked_.begin(), ranked_.end(),
                   [&](uint8_t a, uint8_t b) { return codebook[a] < codebook[b]; });
  for (size_t i = 1; i < ranked_.size(); ++i) {
    bounds_.push_back((codebook[ranked_[i - 1]] + codebook[ranked_[i]]) / 2);
  }
}

void CodebookEncoder::Encode(const float* values, int64_t count, uint8_t* codes) const {
  if (bits_ == 3) {
    Count<7>(values, count, bounds_.data(), codes);
  } else if (bits_ == 4) {
    Count<15>(values, count, bounds_.data(), codes);
  } else {
    Search(bits_, values, count, bounds_.data(), codes);
  }
  for (int64_t i = 0; i < count; ++i) codes[i] = ranked_[codes[i]];
}

void PackCodes(const WeightFormat& format, const uint8_t* codes, int64_t count, std::byte* out) {
  if (format.high_first) {
    for (int64_t i = 0; i < count; i += 2) {
      out[i / 2] = static_cast<std::byte>(codes[i] << 4 | codes[i + 1]);
    }
    return;
  }
  const int bits = format.code_bits;
  uint32_t pending = 0;
  int pending_bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    pending |= uint32_t{codes[i]} << pending_bits;
    pending_bits += bits;
    if (pending_bits >= 8) {
      *out++ = static_cast<std::byte>(pending & 255);
      pending >>= 8;
      pending_bits -= 8;
    }
  }
  if (pending_bits > 0) *out = static_cast<std::byte>(pending);
}

}  // namespace treadle::formats
