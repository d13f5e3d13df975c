#include "kernels/cpu/matmul/pack.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/cpu/matmul/packing.h"

namespace treadle {
namespace {

// A sum of products of k codes must fit in 32 bits: 128 * 127 * k < 2^31.
constexpr int64_t kMaxRowInt8 = int64_t{1} << 17;

// The first that can hold a matrix does.
constexpr const Packing* kPackings[] = {&kHalfPacking,    &kBlockPacking,    &kRowInt8Packing,
                                        &kIntegerPacking, &kCodebookPacking, &kTablePacking,
                                        &kBytesPacking,   &kFloatPacking};

// Behind the groups of kCodes4, kTiles4, kCodes8 and kWords: floats, of which some may be unused,
// and their integers.
int64_t CodebookValues(PackKind kind) {
  if (kind == PackKind::kCodes4 || kind == PackKind::kTiles4) return 16;
  return kind == PackKind::kCodes8 || kind == PackKind::kWords ? 256 : 0;
}
size_t CodebookBytes(PackKind kind) {
  const auto values = static_cast<size_t>(CodebookValues(kind));
  // And what a kernel reads behind the last of them.
  return values > 0 ? values * (sizeof(float) + sizeof(int16_t)) + 2 * sizeof(float) : 0;
}

void PutCodebook(std::span<const float> codebook, uint8_t* at, PackedView& view) {
  auto* floats = reinterpret_cast<float*>(at);
  std::ranges::copy(codebook, floats);
  view.codebook = floats;
  auto* integers = reinterpret_cast<IntegerCodebook*>(floats + CodebookValues(view.kind));
  float largest = 0;
  for (const float value : codebook) largest = std::fmax(largest, std::fabs(value));
  constexpr float kSteps = 4095;
  const bool exact = !view.format->apart();  // integers already
  integers->step = exact ? 1 : largest / kSteps;
  const float steps = exact ? 1 : largest > 0 ? kSteps / largest : 0;
  for (size_t i = 0; i < codebook.size(); ++i) {
    integers->codes[i] = static_cast<int16_t>(std::nearbyint(codebook[i] * steps));
  }
  view.integers = integers;
}

const Packing& PlanOf(const MatrixSource& source, const PackTarget& target, PackedView& view) {
  for (const Packing* packing : kPackings) {
    view = {};
    view.n = source.n;
    view.k = source.k;
    view.format = source.format;
    if (packing->plan(source, target, view)) return *packing;
  }
  TREADLE_CHECK(false);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(const MatrixSource& source,
                                                         const PackTarget& target, ThreadPool& pool,
                                                         WeightArena& arena) {
  const WeightFormat& format = *source.format;
  if (format.activations == ActivationPolicy::kRowInt8 && source.k > kMaxRowInt8) {
    return InvalidArgument("a matrix of ", source.k, " input features in ", format.name,
                           ": expected at most ", kMaxRowInt8);
  }
  if (source.file != nullptr && !format.apart() && !source.transposed && source.row_order.empty()) {
    return std::make_unique<CpuMatrix>(source);
  }
  PackedView view;
  const Packing* packing = &PlanOf(source, target, view);
  // Floats are in the order of the features whatever they were made of.
  const std::span<const int32_t> order =
      view.kind == PackKind::kF32 ? std::span<const int32_t>() : InputOrderOf(source);
  view.bf16 = target.bf16 && view.kind != PackKind::kRowInt8;
  if (view.bf16 && target.tiles) {
    PlanTiles(source, view);
    packing = &kTilePacking;
  }

  const int64_t groups = (source.n + kGroupFeatures - 1) / kGroupFeatures;
  const size_t group_bytes = static_cast<size_t>(groups) * static_cast<size_t>(view.group_bytes);
  const size_t order_at = group_bytes + CodebookBytes(view.kind);
  const size_t bytes = order_at + order.size_bytes();
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<uint8_t> memory, arena.Allocate(bytes));
  view.data = memory.get();
  if (CodebookValues(view.kind) > 0) {
    const bool tiles = view.kind == PackKind::kTiles4;
    PutCodebook(tiles ? TileCodebook(source, view) : CodebookOf(source), memory.get() + group_bytes,
                view);
  }
  if (!order.empty()) {
    auto* copy = reinterpret_cast<int32_t*>(memory.get() + order_at);
    std::ranges::copy(order, copy);
    view.input_order = copy;
  }
  pool.ParallelFor(groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kGroupFeatures;
      const int64_t lanes = std::min(kGroupFeatures, source.n - first);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        packing->pack_row(source, view, source.SourceRow(first + lane), lane,
                          memory.get() + group * view.group_bytes);
      }
    }
  });
  return std::make_unique<CpuMatrix>(view, bytes, std::move(memory), target);
}

void CpuMatrix::DecodeRow(int64_t row, bool accumulate, float* out) const {
  const PackedView& view = view_;
  TREADLE_CHECK(row >= 0 && row < view.n);
  const WeightFormat& format = *view.format;
  const int64_t group = row / kGroupFeatures;
  const int64_t lane = row % kGroupFeatures;
  const Packing* const special = view.kind == PackKind::kRowInt8 ? &kRowInt8Packing
                                 : view.kind == PackKind::kWords ? &kCodebookPacking
                                 : IntegerRunOf(view.kind)       ? &kIntegerPacking
                                                                 : nullptr;
  // Zeros of inline formats are positive. Adding -0 changes nothing.
  const float positive = format.group > 0 ? 0.0f : -0.0f;
  const bool directly = !accumulate && view.input_order == nullptr;
  alignas(64) float tile[kDecodeChunk * kGroupFeatures];
  float chunk[kDecodeChunk];
  for (int64_t k = 0; k < view.k; k += kDecodeChunk) {
    const int64_t count = std::min(kDecodeChunk, view.k - k);
    float* to = directly ? out + k : chunk;
    if (memory_ == nullptr) {
      const std::byte* stored = stored_.data + row * format.RowBytes(view.k) + format.RowBytes(k);
      format.decode(stored, count / format.block, to);
    } else if (special != nullptr) {
      special->decode(view, view.data + group * view.group_bytes, lane, k, count, to);
    } else {
      const float* values = kDecodeTile[isa_](view, group, k, count, tile) + lane;
      for (int64_t i = 0; i < count; ++i) to[i] = values[i * kGroupFeatures] + positive;
    }
    for (int64_t i = 0; !directly && i < count; ++i) {
      float& value = out[view.input_order == nullptr ? k + i : view.input_order[k + i]];
      value = accumulate ? value + chunk[i] : chunk[i];
    }
  }
}

}  // namespace treadle
