#include "kernels/formats/gptq.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle {
namespace {

// Where AWQ keeps column 8 i + j: the nibble of word i.
constexpr int kAwqNibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7};

constexpr int64_t kTile = 16;  // words of a cache line

int64_t GroupSize(const GroupQuantizedTensors& tensors) {
  return tensors.group_size == -1 ? tensors.k : tensors.group_size;
}
int64_t Groups(const GroupQuantizedTensors& tensors) {
  return (tensors.k + GroupSize(tensors) - 1) / GroupSize(tensors);
}

absl::Status CheckSize(std::string_view what, size_t found, int64_t rows, int64_t cols) {
  if (static_cast<int64_t>(found) == rows * cols) return absl::OkStatus();
  return InvalidArgument(what, " has ", found, " elements, expected [", rows, ", ", cols, "]");
}

absl::Status CheckGroups(const GroupQuantizedTensors& tensors) {
  if (tensors.g_idx.empty()) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckSize("g_idx", tensors.g_idx.size(), tensors.k, 1));
  for (int64_t i = 0; i < tensors.k; ++i) {
    const int32_t group = tensors.g_idx[i];
    if (group < 0 || group >= Groups(tensors)) {
      return InvalidArgument("g_idx names group ", group, " at ", i, ", expected 0 to ",
                             Groups(tensors) - 1);
    }
  }
  return absl::OkStatus();
}

absl::Status Check(const GroupQuantizedTensors& tensors) {
  const int64_t n = tensors.n, k = tensors.k;
  const bool awq = tensors.packing == GroupPacking::kAwq;
  const bool rows = tensors.packing == GroupPacking::kRows;
  if (tensors.bits != 4 && (tensors.bits != 8 || awq)) {
    return InvalidArgument(tensors.bits, awq ? " bits, expected 4" : " bits, expected 4 or 8");
  }
  const int64_t codes = 32 / tensors.bits;  // in a word
  if (n < 1 || k < 1 || (n % codes != 0 && !rows) || k % codes != 0) {
    return InvalidArgument("matrix [", n, ", ", k, "]: expected multiples of ", codes);
  }
  if (tensors.group_size < 1 && tensors.group_size != -1) {
    return InvalidArgument("groups of ", tensors.group_size, ", expected at least 1, or -1");
  }
  TREADLE_RETURN_IF_ERROR(
      CheckSize("qweight", tensors.qweight.size(), awq ? k : k / codes, awq ? n / codes : n));
  if (!rows || !tensors.qzeros.empty()) {
    const int64_t words = (n + codes - 1) / codes;
    TREADLE_RETURN_IF_ERROR(CheckSize("qzeros", tensors.qzeros.size(),
                                      rows ? words : Groups(tensors),
                                      rows ? Groups(tensors) : words));
  }
  TREADLE_RETURN_IF_ERROR(CheckSize("scales", tensors.scales.size(), Groups(tensors), n));
  return CheckGroups(tensors);
}

// The columns as the matrix keeps them: those of a group side by side.
struct Columns {
  std::vector<int32_t> order;   // column i is the file's order[i]; empty: as in the file
  std::vector<int32_t> groups;  // [k]
  int64_t block = 0;            // groups change at multiples of it only
};

Columns SortByGroup(const GroupQuantizedTensors& tensors) {
  const auto k = static_cast<size_t>(tensors.k);
  Columns columns;
  columns.groups.resize(k);
  const auto is_zero = [](int32_t group) { return group == 0; };
  if (std::ranges::all_of(tensors.g_idx, is_zero)) {
    for (size_t i = 0; i < k; ++i) {
      columns.groups[i] = static_cast<int32_t>(static_cast<int64_t>(i) / GroupSize(tensors));
    }
  } else {
    std::ranges::copy(tensors.g_idx, columns.groups.begin());
    if (!std::ranges::is_sorted(tensors.g_idx)) {
      columns.order.resize(k);
      std::iota(columns.order.begin(), columns.order.end(), 0);
      std::ranges::stable_sort(columns.order, {},
                               [&](int32_t column) { return tensors.g_idx[column]; });
      std::ranges::sort(columns.groups);
    }
  }
  columns.block = tensors.k;
  for (size_t i = 1; i < k; ++i) {
    if (columns.groups[i] != columns.groups[i - 1]) {
      columns.block = std::gcd(columns.block, static_cast<int64_t>(i));
    }
  }
  return columns;
}

// Puts the codes of a row in order.
void ReorderRow(const WeightFormat& format, std::span<const int32_t> order, int64_t row,
                std::byte* data) {
  const auto k = static_cast<int64_t>(order.size());
  std::vector<uint8_t> stored(order.size()), codes(order.size());
  UnpackCodes(format, data, row * k, k, stored.data());
  for (size_t i = 0; i < order.size(); ++i) codes[i] = stored[order[i]];
  formats::PackCodes(format, codes.data(), k, data + row * k * format.code_bits / 8);
}

// Rows [begin, end) of flat codes. GPTQ's words along k already are as ours along a row.
void UnpackGptq(const GroupQuantizedTensors& tensors, int64_t begin, int64_t end, std::byte* out) {
  const int64_t words = tensors.k * tensors.bits / 32;
  for (int64_t tile = begin; tile < end; tile += kTile) {
    for (int64_t word = 0; word < words; ++word) {
      for (int64_t n = tile; n < std::min(end, tile + kTile); ++n) {
        std::memcpy(out + 4 * (n * words + word), &tensors.qweight[word * tensors.n + n], 4);
      }
    }
  }
}

void CopyRows(const GroupQuantizedTensors& tensors, int64_t begin, int64_t end, std::byte* out) {
  const int64_t words = tensors.k * tensors.bits / 32;
  std::memcpy(out + 4 * begin * words, tensors.qweight.data() + begin * words,
              static_cast<size_t>(4 * (end - begin) * words));
}

// Field `index` of words that lie low first.
uint32_t Field(std::span<const int32_t> words, int bits, int64_t index) {
  const int64_t codes = 32 / bits;
  const auto word = static_cast<uint32_t>(words[index / codes]);
  return word >> (index % codes * bits) & ((1u << bits) - 1);
}

uint32_t AwqField(std::span<const int32_t> words, int64_t index) {
  return Field(words, 4, index / 8 * 8 + kAwqNibbles[index % 8]);
}

// Words [begin, end) of each k, that is eight times as many rows. A tile's rows fit a cache.
void UnpackAwq(const GroupQuantizedTensors& tensors, int64_t begin, int64_t end, std::byte* out) {
  const int64_t words = tensors.n / 8;
  const int64_t row_bytes = tensors.k / 2;
  for (int64_t tile = begin; tile < end; tile += kTile) {
    for (int64_t byte = 0; byte < row_bytes; ++byte) {
      const int32_t* even = tensors.qweight.data() + 2 * byte * words;
      const int32_t* odd = even + words;
      for (int64_t word = tile; word < std::min(end, tile + kTile); ++word) {
        for (int j = 0; j < 8; ++j) {
          const int shift = 4 * kAwqNibbles[j];
          const uint32_t low = static_cast<uint32_t>(even[word]) >> shift & 15;
          const uint32_t high = static_cast<uint32_t>(odd[word]) >> shift & 15;
          out[(8 * word + j) * row_bytes + byte] = static_cast<std::byte>(low | high << 4);
        }
      }
    }
  }
}

// The number that is added to a stored zero point, modulo 2^bits.
uint32_t ZeroShift(const GroupQuantizedTensors& tensors) {
  if (tensors.packing == GroupPacking::kAwq || tensors.packing == GroupPacking::kRows) return 0;
  const uint32_t middle = 1u << (tensors.bits - 1);
  const auto all = [&](uint32_t field) {
    for (int64_t i = 0; i < Groups(tensors) * tensors.n; ++i) {
      if (Field(tensors.qzeros, tensors.bits, i) != field) return false;
    }
    return true;
  };
  if (tensors.symmetric && all(middle - 1)) return 1;
  if (tensors.symmetric && all(middle)) return 0;
  return tensors.packing == GroupPacking::kGptqV1 ? 1 : 0;
}

// The zero point of a row's group, as it is stored.
uint32_t ZeroOf(const GroupQuantizedTensors& tensors, int64_t n, int64_t group) {
  const int64_t at = group * tensors.n + n;
  switch (tensors.packing) {
    case GroupPacking::kAwq:
      return AwqField(tensors.qzeros, at);
    case GroupPacking::kRows: {
      if (tensors.qzeros.empty()) return 1u << (tensors.bits - 1);
      const int64_t codes = 32 / tensors.bits;
      const int64_t word = n / codes * Groups(tensors) + group;
      return Field(tensors.qzeros.subspan(static_cast<size_t>(word), 1), tensors.bits, n % codes);
    }
    default:
      return Field(tensors.qzeros, tensors.bits, at);
  }
}

// Groups of k become blocks of the flat matrix. Where groups differ in size, smaller blocks do.
void SetConstants(const GroupQuantizedTensors& tensors, const Columns& columns,
                  MatrixConstants& constants) {
  const int64_t block = columns.block;
  const uint32_t shift = ZeroShift(tensors);
  const uint32_t mask = (1u << tensors.bits) - 1;
  constants.scale_block = block;
  for (int64_t n = 0; n < tensors.n; ++n) {
    for (int64_t k = 0; k < tensors.k; k += block) {
      const int64_t group = columns.groups[k];
      const uint32_t zero = ZeroOf(tensors, n, group);
      constants.zeros.push_back(static_cast<float>((zero + shift) & mask));
      const bool rows = tensors.packing == GroupPacking::kRows;
      const int64_t at = rows ? n * Groups(tensors) + group : group * tensors.n + n;
      constants.scales.push_back(tensors.scales[static_cast<size_t>(at)]);
    }
  }
}

// One zero point for all: the codebook has room for it.
void FoldZeros(const WeightFormat& format, MatrixConstants& constants) {
  const float zero = constants.zeros.front();
  for (const float other : constants.zeros) {
    if (other != zero) return;
  }
  constants.codebook.assign(format.codebook.begin(), format.codebook.end());
  for (float& value : constants.codebook) value -= zero;
  constants.zeros.clear();
}

}  // namespace

absl::StatusOr<QuantizedMatrix> ConvertGroupQuantized(const GroupQuantizedTensors& tensors,
                                                      const ParallelFor& parallel_for) {
  TREADLE_RETURN_IF_ERROR(Check(tensors));
  QuantizedMatrix matrix;
  matrix.format = FindWeightFormat(tensors.bits == 4 ? "gptq4" : "gptq8");
  matrix.n = tensors.n;
  matrix.k = tensors.k;
  matrix.data.resize(static_cast<size_t>(matrix.format->MatrixBytes(tensors.n, tensors.k)));
  const bool awq = tensors.packing == GroupPacking::kAwq;
  const auto unpack = awq                                      ? UnpackAwq
                      : tensors.packing == GroupPacking::kRows ? CopyRows
                                                               : UnpackGptq;
  parallel_for(awq ? tensors.n / 8 : tensors.n, [&](int64_t begin, int64_t end) {
    unpack(tensors, begin, end, matrix.data.data());
  });
  Columns columns = SortByGroup(tensors);
  if (!columns.order.empty()) {
    parallel_for(tensors.n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        ReorderRow(*matrix.format, columns.order, row, matrix.data.data());
      }
    });
  }
  SetConstants(tensors, columns, matrix.constants);
  matrix.constants.input_order = std::move(columns.order);
  FoldZeros(*matrix.format, matrix.constants);
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(matrix.source()));
  return matrix;
}

}  // namespace treadle
