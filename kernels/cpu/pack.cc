#include "kernels/cpu/pack.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/cpu/packing.h"

namespace treadle {
namespace {

// A sum of products of k codes must fit in 32 bits: 128 * 127 * k < 2^31.
constexpr int64_t kMaxRowInt8 = int64_t{1} << 17;

// The first that can hold a matrix does.
constexpr const Packing* kPackings[] = {&kHalfPacking, &kBlockPacking, &kRowInt8Packing,
                                        &kCodebookPacking, &kFloatPacking};

const Packing& PackingOf(PackKind kind) {
  switch (kind) {
    case PackKind::kF32:
      return kFloatPacking;
    case PackKind::kF16:
    case PackKind::kBF16:
      return kHalfPacking;
    case PackKind::kRowInt8:
      return kRowInt8Packing;
    case PackKind::kCodes4:
    case PackKind::kCodes8:
    case PackKind::kIntegers8:
    case PackKind::kE4M3:
      return kCodebookPacking;
    default:
      return kBlockPacking;
  }
}

// Behind the groups of kCodes4 and kCodes8: floats, of which some may be unused, and their
// integers.
int64_t CodebookValues(PackKind kind) {
  return kind == PackKind::kCodes4 ? 16 : kind == PackKind::kCodes8 ? 256 : 0;
}

void PutCodebook(std::span<const float> codebook, uint8_t* at, PackedView& view) {
  auto* floats = reinterpret_cast<float*>(at);
  std::ranges::copy(codebook, floats);
  view.codebook = floats;
  if (view.kind != PackKind::kCodes4) return;
  auto* integers = reinterpret_cast<IntegerCodebook*>(floats + CodebookValues(view.kind));
  float largest = 0;
  for (const float value : codebook) largest = std::fmax(largest, std::fabs(value));
  constexpr float kSteps = 4095;
  integers->step = largest / kSteps;
  for (size_t i = 0; i < codebook.size(); ++i) {
    const auto code = static_cast<int>(std::nearbyint(codebook[i] * (kSteps / largest)));
    integers->low[i] = static_cast<uint8_t>(code & 255);
    integers->high[i] = static_cast<uint8_t>(code >> 8 & 255);
  }
  view.integers = integers;
}

PackedView PlanOf(const MatrixSource& source) {
  for (const Packing* packing : kPackings) {
    PackedView view = {};
    view.n = source.n;
    view.k = source.k;
    view.format = source.format;
    if (packing->plan(source, view)) return view;
  }
  TREADLE_CHECK(false);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(const MatrixSource& source,
                                                         ThreadPool& pool, WeightArena& arena) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  const WeightFormat& format = *source.format;
  if (format.activations == ActivationPolicy::kRowInt8 && source.k > kMaxRowInt8) {
    return InvalidArgument("a matrix of ", source.k, " input features in ", format.name,
                           ": expected at most ", kMaxRowInt8);
  }
  PackedView view = PlanOf(source);
  const Packing& packing = PackingOf(view.kind);

  const int64_t groups = (source.n + kGroupFeatures - 1) / kGroupFeatures;
  const size_t group_bytes = static_cast<size_t>(groups) * static_cast<size_t>(view.group_bytes);
  size_t bytes = group_bytes + static_cast<size_t>(CodebookValues(view.kind)) * sizeof(float);
  if (view.kind == PackKind::kCodes4) bytes += sizeof(IntegerCodebook);
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<uint8_t> memory, arena.Allocate(bytes));
  view.data = memory.get();
  if (CodebookValues(view.kind) > 0) {
    PutCodebook(CodebookOf(source), memory.get() + group_bytes, view);
  }
  pool.ParallelFor(groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kGroupFeatures;
      const int64_t lanes = std::min(kGroupFeatures, source.n - first);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        packing.pack_row(source, view, source.SourceRow(first + lane), lane,
                         memory.get() + group * view.group_bytes);
      }
    }
  });
  return std::make_unique<CpuMatrix>(view, bytes, std::move(memory));
}

void DecodePackedRow(const PackedView& view, int64_t row, bool accumulate, float* out) {
  TREADLE_CHECK(row >= 0 && row < view.n);
  const uint8_t* group = view.data + row / kGroupFeatures * view.group_bytes;
  const int64_t lane = row % kGroupFeatures;
  const Packing& packing = PackingOf(view.kind);
  float chunk[kDecodeChunk];
  for (int64_t k = 0; k < view.k; k += kDecodeChunk, out += kDecodeChunk) {
    const int64_t count = std::min(kDecodeChunk, view.k - k);
    packing.decode(view, group, lane, k, count, accumulate ? chunk : out);
    if (!accumulate) continue;
    for (int64_t i = 0; i < count; ++i) out[i] += chunk[i];
  }
}

}  // namespace treadle
