#include "kernels/cpu/pack.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "kernels/dtype.h"

namespace treadle {
namespace {

constexpr int64_t kQ4CodeBytes = 256;
constexpr int64_t kQ8CodeBytes = 512;
constexpr int64_t kHalfRow = 2 * kGroupFeatures;  // bytes of 16 f16 constants

struct KindRow {
  std::string_view format;
  PackKind kind;
  int64_t values;  // of k per packed unit
  int64_t bytes;   // per packed unit of 16 features
};

constexpr KindRow kKinds[] = {
    {"f32", PackKind::kF32, 1, 4 * kGroupFeatures},
    {"f16", PackKind::kF16, 1, 2 * kGroupFeatures},
    {"bf16", PackKind::kBF16, 1, 2 * kGroupFeatures},
    {"q4_0", PackKind::kQ4_0, kBlockValues, kQ4CodeBytes + kHalfRow},
    {"q4_1", PackKind::kQ4_1, kBlockValues, kQ4CodeBytes + 2 * kHalfRow},
    {"q8_0", PackKind::kQ8_0, kBlockValues, kQ8CodeBytes + kHalfRow},
};

absl::Status CheckSource(const MatrixSource& source) {
  const WeightFormat& format = *source.format;
  if (source.n < 1 || source.k < 1 || source.k % format.block != 0) {
    return InvalidArgument("matrix [", source.n, ", ", source.k, "] in ", format.name,
                           ": expected positive sizes and k in multiples of ", format.block);
  }
  if (source.transposed && format.block != 1) {
    return InvalidArgument("a transposed matrix in ", format.name, ": expected a dense format");
  }
  if (source.row_order.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(source.row_order.size()) != source.n) {
    return InvalidArgument("row order of ", source.row_order.size(), " rows for a matrix of ",
                           source.n);
  }
  for (const int32_t row : source.row_order) {
    if (row < 0 || row >= source.n) {
      return InvalidArgument("row order names row ", row, " of a matrix of ", source.n);
    }
  }
  return absl::OkStatus();
}

// Copies 32-bit words [0, words) of one feature to its lane, flipping `flip`'s bits.
void SpreadWords(const std::byte* from, int64_t words, uint32_t flip, int64_t lane, uint8_t* to) {
  for (int64_t i = 0; i < words; ++i) {
    uint32_t word;
    std::memcpy(&word, from + 4 * i, 4);
    word ^= flip;
    std::memcpy(to + 64 * i + 4 * lane, &word, 4);
  }
}

// Where the constants and codes of one stored block go.
struct BlockPlan {
  int64_t stored_bytes;  // of a block in the checkpoint: the f16 constants, then the codes
  int64_t constants;     // how many f16 constants precede the codes
  int64_t words;         // 32-bit words of codes
  uint32_t flip;
};

BlockPlan PlanOf(PackKind kind) {
  if (kind == PackKind::kQ8_0) return {34, 1, 8, 0x80808080u};  // signed code to code + 128
  return kind == PackKind::kQ4_0 ? BlockPlan{18, 1, 4, 0} : BlockPlan{20, 2, 4, 0};
}

void PackBlocks(PackKind kind, const std::byte* row, int64_t blocks, int64_t unit_bytes,
                int64_t lane, uint8_t* group) {
  const BlockPlan plan = PlanOf(kind);
  for (int64_t b = 0; b < blocks; ++b) {
    const std::byte* block = row + b * plan.stored_bytes;
    uint8_t* unit = group + b * unit_bytes;
    SpreadWords(block + 2 * plan.constants, plan.words, plan.flip, lane, unit);
    for (int64_t c = 0; c < plan.constants; ++c) {
      std::memcpy(unit + 64 * plan.words + kHalfRow * c + 2 * lane, block + 2 * c, 2);
    }
  }
}

void PackDense(const MatrixSource& source, int64_t from, int64_t lane, uint8_t* group) {
  const int64_t width = source.format->block_bytes;
  const int64_t step = source.transposed ? source.n * width : width;
  const std::byte* first =
      source.data + (source.transposed ? from * width : from * source.k * width);
  for (int64_t i = 0; i < source.k; ++i) {
    std::memcpy(group + (i * kGroupFeatures + lane) * width, first + i * step,
                static_cast<size_t>(width));
  }
}

// Everything about a source that its layout follows from.
struct Layout {
  PackKind kind;
  int64_t unit_bytes;  // of one packed unit; unused for kStored
  int64_t group_bytes;
};

Layout LayoutOf(const MatrixSource& source) {
  for (const KindRow& row : kKinds) {
    if (row.format == source.format->name) {
      return {row.kind, row.bytes, source.k / row.values * row.bytes};
    }
  }
  return {PackKind::kStored, 0, kGroupFeatures * source.format->RowBytes(source.k)};
}

void PackRow(const MatrixSource& source, const Layout& layout, int64_t from, int64_t lane,
             uint8_t* group) {
  const int64_t row_bytes = source.format->RowBytes(source.k);
  const std::byte* row = source.data + from * row_bytes;
  switch (layout.kind) {
    case PackKind::kF32:
    case PackKind::kF16:
    case PackKind::kBF16:
      PackDense(source, from, lane, group);
      return;
    case PackKind::kQ4_0:
    case PackKind::kQ4_1:
    case PackKind::kQ8_0:
      PackBlocks(layout.kind, row, source.k / kBlockValues, layout.unit_bytes, lane, group);
      return;
    case PackKind::kStored:
      std::memcpy(group + lane * row_bytes, row, static_cast<size_t>(row_bytes));
      return;
  }
}

float HalfAt(const uint8_t* data, int64_t index) {
  Half half;
  std::memcpy(&half.bits, data + 2 * index, 2);
  return ToFloat(half);
}

float DenseAt(PackKind kind, const uint8_t* group, int64_t index) {
  if (kind == PackKind::kF16) return HalfAt(group, index);
  if (kind == PackKind::kBF16) {
    BFloat16 value;
    std::memcpy(&value.bits, group + 2 * index, 2);
    return ToFloat(value);
  }
  float value;
  std::memcpy(&value, group + 4 * index, 4);
  return value;
}

// Block `b` of one feature in the integer view of weight_format.h.
void PackedCodes(const PackedView& view, const uint8_t* group, int64_t lane, int64_t b,
                 CodeGroup& out) {
  if (view.kind == PackKind::kQ8_0) {
    const uint8_t* unit = group + b * (kQ8CodeBytes + kHalfRow);
    for (int64_t i = 0; i < kBlockValues; ++i) {
      out.codes[i] = static_cast<int8_t>(unit[i / 4 * 64 + lane * 4 + i % 4] - 128);
    }
    out.scale = HalfAt(unit + kQ8CodeBytes, lane);
    out.offset = 0;
    return;
  }
  const bool minimum = view.kind == PackKind::kQ4_1;
  const uint8_t* unit = group + b * (kQ4CodeBytes + (minimum ? 2 : 1) * kHalfRow);
  const int bias = minimum ? 0 : 8;
  for (int64_t i = 0; i < kBlockValues / 2; ++i) {
    const uint8_t pair = unit[i / 4 * 64 + lane * 4 + i % 4];
    out.codes[i] = static_cast<int8_t>((pair & 15) - bias);
    out.codes[i + 16] = static_cast<int8_t>((pair >> 4) - bias);
  }
  out.scale = HalfAt(unit + kQ4CodeBytes, lane);
  out.offset = minimum ? HalfAt(unit + kQ4CodeBytes + kHalfRow, lane) : 0.0f;
}

template <bool kAccumulate>
void DecodeRow(const PackedView& view, const uint8_t* group, int64_t lane, float* out) {
  const auto put = [out](int64_t i, float value) { out[i] = kAccumulate ? out[i] + value : value; };
  if (view.format->group == 0) {
    for (int64_t i = 0; i < view.k; ++i) {
      put(i, DenseAt(view.kind, group, i * kGroupFeatures + lane));
    }
    return;
  }
  const bool stored = view.kind == PackKind::kStored;
  const int64_t values = stored ? view.format->group : kBlockValues;
  const auto* row = reinterpret_cast<const std::byte*>(group + lane * (view.group_bytes / 16));
  CodeGroup codes;
  for (int64_t b = 0; b < view.k / values; ++b) {
    if (stored) {
      view.format->codes(row, b, codes);
    } else {
      PackedCodes(view, group, lane, b, codes);
    }
    for (int64_t i = 0; i < values; ++i) {  // the product is exact: one rounding, as with fma
      put(b * values + i, codes.scale * static_cast<float>(codes.codes[i]) + codes.offset);
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(const MatrixSource& source,
                                                         ThreadPool& pool, WeightArena& arena) {
  TREADLE_RETURN_IF_ERROR(CheckSource(source));
  const Layout layout = LayoutOf(source);
  const int64_t groups = (source.n + kGroupFeatures - 1) / kGroupFeatures;
  const size_t bytes = static_cast<size_t>(groups) * static_cast<size_t>(layout.group_bytes);
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<uint8_t> memory, arena.Allocate(bytes));
  pool.ParallelFor(groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kGroupFeatures;
      const int64_t lanes = std::min(kGroupFeatures, source.n - first);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t row = first + lane;
        const int64_t from = source.row_order.empty() ? row : source.row_order[row];
        PackRow(source, layout, from, lane, memory.get() + group * layout.group_bytes);
      }
    }
  });
  const PackedView view{layout.kind, memory.get(),       source.n,
                        source.k,    layout.group_bytes, source.format};
  return std::make_unique<CpuMatrix>(view, bytes, std::move(memory));
}

void DecodePackedRow(const PackedView& view, int64_t row, bool accumulate, float* out) {
  TREADLE_CHECK(row >= 0 && row < view.n);
  const uint8_t* group = view.data + row / kGroupFeatures * view.group_bytes;
  const int64_t lane = row % kGroupFeatures;
  if (accumulate) {
    DecodeRow<true>(view, group, lane, out);
  } else {
    DecodeRow<false>(view, group, lane, out);
  }
}

}  // namespace treadle
