// AddLowRank: what adapters add to products.
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

inline constexpr int64_t kLowRankChains = 4;
// Rows that one call of a kernel takes at most, and columns of LowRankUp.
inline constexpr int64_t kLowRankRows = 8;
inline constexpr int64_t kLowRankColumns = 256;

enum class LowRankType : uint8_t { kFloat, kHalf, kBFloat };

// One chain of x A for some rows.
struct LowRankDownArguments {
  const float* x;  // [*, k]
  int64_t x_stride;
  const int32_t* rows;  // [count], of x
  int64_t count;
  int64_t k;
  const void* a;  // [k, a_stride]; null: x is x A, and chain 0 has it
  int64_t a_stride;
  LowRankType type;
  int64_t chain;
  float* h;  // [count, kLowRankChains, a_stride]
};
// Some columns of some rows of the output.
struct LowRankUpArguments {
  const float* h;  // as above
  int64_t h_stride;
  const int32_t* rows;  // [count], of out
  int64_t count;
  int64_t rank;
  const void* b;  // [rank, b_stride], from the first column on
  int64_t b_stride;
  LowRankType type;
  float* out;  // [*, out_stride], likewise
  int64_t out_stride;
  int64_t columns;
  float* sums;  // [kLowRankRows, h_stride], for the kernel's use
};
TREADLE_ISA_KERNEL(LowRankDown, void(const LowRankDownArguments&));
TREADLE_ISA_KERNEL(LowRankUp, void(const LowRankUpArguments&));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {
namespace {

struct Floats {
  TREADLE_SIMD static Vec At(const void* p, int64_t i) {
    return Load(static_cast<const float*>(p) + i);
  }
};
struct Halves {
  TREADLE_SIMD static Vec At(const void* p, int64_t i) {
    return Load(static_cast<const uint16_t*>(p) + i);
  }
};
struct BFloats {
  TREADLE_SIMD static Vec At(const void* p, int64_t i) {
    return LoadBFloat16(static_cast<const uint16_t*>(p) + i);
  }
};

// Calls body(the loads of a type).
template <typename Body>
TREADLE_SIMD void WithType(LowRankType type, Body body) {
  switch (type) {
    case LowRankType::kFloat:
      return body(Floats());
    case LowRankType::kHalf:
      return body(Halves());
    case LowRankType::kBFloat:
      return body(BFloats());
  }
}

inline constexpr int kTileRows = kWideRegisters ? 8 : 4;

template <int kRows, typename Type>
TREADLE_LOOP void DownTile(const LowRankDownArguments& a, int64_t first) {
  const float* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = a.x + a.rows[first + r] * a.x_stride;
  for (int64_t j = 0; j < a.a_stride; j += kLanes) {
    Vec sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = Zero();
    for (int64_t i = a.chain; i < a.k; i += kLowRankChains) {
      const Vec factor = Type::At(a.a, i * a.a_stride + j);
      for (int r = 0; r < kRows; ++r) sums[r] = Fma(Broadcast(x[r][i]), factor, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) {
      Store(a.h + ((first + r) * kLowRankChains + a.chain) * a.a_stride + j, sums[r]);
    }
  }
}

// Rows [first, first + kRows) of the output.
template <int kRows, typename Type>
TREADLE_LOOP void UpTile(const LowRankUpArguments& a, int64_t first) {
  ForEachVec(a.columns, [&](int64_t i, int64_t lanes) {
    Vec sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = Zero();
    for (int64_t j = 0; j < a.rank; ++j) {
      const Vec factor = Type::At(a.b, j * a.b_stride + i);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = Fma(Broadcast(a.sums[(first + r) * a.h_stride + j]), factor, sums[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float* const out = a.out + a.rows[first + r] * a.out_stride + i;
      StoreLanes(out, Add(LoadLanes(out, lanes), sums[r]), lanes);
    }
  });
}

}  // namespace

void LowRankDown(const LowRankDownArguments& a) {
  if (a.a == nullptr) {
    for (int64_t row = 0; row < a.count; ++row) {
      const float* const x = a.x + a.rows[row] * a.x_stride;
      float* const h = a.h + (row * kLowRankChains + a.chain) * a.a_stride;
      for (int64_t j = 0; j < a.a_stride; ++j) h[j] = a.chain == 0 && j < a.k ? x[j] : 0;
    }
    return;
  }
  WithType(a.type, [&](auto type) {
    int64_t row = 0;
    for (; row + kTileRows <= a.count; row += kTileRows) {
      DownTile<kTileRows, decltype(type)>(a, row);
    }
    for (; row < a.count; ++row) DownTile<1, decltype(type)>(a, row);
  });
}

void LowRankUp(const LowRankUpArguments& a) {
  for (int64_t row = 0; row < a.count; ++row) {
    const float* const h = a.h + row * kLowRankChains * a.h_stride;
    for (int64_t j = 0; j < a.h_stride; j += kLanes) {
      const auto chain = [&](int64_t c) { return Load(h + c * a.h_stride + j); };
      Store(a.sums + row * a.h_stride + j, Add(Add(chain(0), chain(1)), Add(chain(2), chain(3))));
    }
  }
  WithType(a.type, [&](auto type) {
    int64_t row = 0;
    for (; row + kTileRows <= a.count; row += kTileRows) UpTile<kTileRows, decltype(type)>(a, row);
    for (; row < a.count; ++row) UpTile<1, decltype(type)>(a, row);
  });
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/ops_state.h"

namespace treadle {
namespace {

LowRankType TypeOf(const LowRank& factors) {
  TREADLE_CHECK(factors.type != DType::kI8);
  if (factors.type == DType::kF32) return LowRankType::kFloat;
  return factors.type == DType::kF16 ? LowRankType::kHalf : LowRankType::kBFloat;
}

int64_t ColumnParts(const LowRankProduct& product) {
  return (product.out.cols + kLowRankColumns - 1) / kLowRankColumns;
}

}  // namespace

void CpuOps::AddLowRank(Tensor x, std::span<const LowRankProduct> products) {
  // Blocks of rows that one product multiplies.
  std::vector<LowRankBlock>& blocks = state_->low_rank_blocks;
  blocks.clear();
  int64_t floats = 0, widest = 0;
  std::vector<std::pair<int32_t, int32_t> >& ups = state_->low_rank_ups;  // block, part of columns
  ups.clear();
  for (const LowRankProduct& product : products) {
    const int64_t stride = LowRankStride(product.by.rank);
    TREADLE_CHECK(product.by.a != nullptr || x.cols == product.by.rank);
    const auto rows = std::ssize(product.rows);
    for (int64_t first = 0; first < rows; first += kLowRankRows) {
      const int64_t count = std::min(kLowRankRows, rows - first);
      for (int64_t part = 0; part < ColumnParts(product); ++part) {
        ups.emplace_back(static_cast<int32_t>(blocks.size()), static_cast<int32_t>(part));
      }
      blocks.push_back({&product, first, count, floats});
      floats += count * kLowRankChains * stride;
    }
    widest = std::max(widest, stride);
  }
  const auto h_bytes = static_cast<size_t>(floats) * sizeof(float);
  const auto sum_bytes = static_cast<size_t>(pool_.size() * kLowRankRows * widest) * sizeof(float);
  state_->low_rank_scratch.Reserve(ScratchMemory::Aligned(h_bytes) + sum_bytes);
  auto* const h = state_->low_rank_scratch.Take<float>(h_bytes);
  auto* const sums = state_->low_rank_scratch.Take<float>(sum_bytes);
  pool_.ParallelForEach(std::ssize(blocks) * kLowRankChains, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const LowRankBlock& block = blocks[static_cast<size_t>(i / kLowRankChains)];
      const LowRank& by = block.product->by;
      kLowRankDown[isa_]({x.Row<float>(0), x.stride, block.product->rows.data() + block.first,
                          block.count, x.cols, by.a, LowRankStride(by.rank), TypeOf(by),
                          i % kLowRankChains, h + block.h});
    }
  });
  pool_.ParallelForEach(std::ssize(ups), [&](int worker, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const LowRankBlock& block = blocks[static_cast<size_t>(ups[static_cast<size_t>(i)].first)];
      const auto& [by, rows, out] = *block.product;
      const int64_t column = ups[static_cast<size_t>(i)].second * kLowRankColumns;
      const int64_t stride = LowRankStride(by.rank), width = LowRankStride(out.cols);
      const auto bytes = static_cast<int64_t>(SizeOf(by.type));
      kLowRankUp[isa_]({h + block.h, stride, rows.data() + block.first, block.count, by.rank,
                        static_cast<const std::byte*>(by.b) + column * bytes, width, TypeOf(by),
                        out.Row<float>(0) + column, out.stride,
                        std::min(kLowRankColumns, out.cols - column),
                        sums + worker * kLowRankRows * widest});
    }
  });
}

}  // namespace treadle
#endif
