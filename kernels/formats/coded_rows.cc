#include "kernels/formats/coded_rows.h"

#include <algorithm>

#include "kernels/formats/families.h"

namespace treadle {
namespace {

constexpr int kFirstInteger = -128;

// Codes of inline formats that need more than four bits.
constinit const formats::Codebook<256> kIntegers =
    formats::Tabulate<256>([](int code) { return static_cast<float>(code + kFirstInteger); });

}  // namespace

CodedRows::CodedRows(const MatrixSource& source) : source_(source) {
  const WeightFormat& format = *source.format;
  if (format.apart()) {
    bits_ = format.code_bits;
    values_ = CodebookOf(source);
    run_ = ConstantRun(source);
    return;
  }
  run_ = format.group;
  values_ = kIntegers.values;
  if (!format.codebook.empty()) {
    bits_ = 4;
    values_ = format.codebook;
  }
  // Several codes may have the same value: the first one counts.
  for (size_t code = values_.size(); code-- > 0;) {
    code_of_[static_cast<int>(values_[code]) - kFirstInteger] = static_cast<uint8_t>(code);
  }
}

void CodedRows::Read(int64_t row, uint8_t* codes, float* scales, float* seconds) const {
  const WeightFormat& format = *source_.format;
  if (format.apart()) {
    const MatrixConstants& constants = *source_.constants;
    const int64_t first = row * source_.k;
    UnpackCodes(format, source_.data, first, source_.k, codes);
    for (int64_t k = 0; k < source_.k; k += run_) {
      const int64_t block = (first + k) / constants.scale_block;
      *scales++ = constants.scales[block];
      *seconds++ = constants.zeros.empty() ? 0.0f : constants.zeros[block];
    }
    return;
  }
  const std::byte* stored = source_.data + row * format.RowBytes(source_.k);
  CodeGroup group;
  for (int64_t g = 0; g < source_.k / run_; ++g) {
    format.codes(stored, g, group);
    *scales++ = group.scale;
    *seconds++ = group.offset;
    for (int64_t i = 0; i < run_; ++i) *codes++ = code_of_[group.codes[i] - kFirstInteger];
  }
}

}  // namespace treadle
