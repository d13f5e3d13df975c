// AddLowRank: what adapters add to products.
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// A sum over k is of this many chains, each over a contiguous part; a piece of work has half of
// them.
inline constexpr int64_t kLowRankChains = 8;
inline constexpr int64_t kPieceChains = kLowRankChains / 2;
// Rows that one call of a kernel takes at most, and columns of LowRankUp.
inline constexpr int64_t kLowRankRows = 8;
inline constexpr int64_t kLowRankColumns = 128;

enum class LowRankType : uint8_t { kFloat, kHalf, kBFloat };

// Some chains of a panel of x A, for some rows.
struct LowRankDownArguments {
  const float* x;  // [*, k]
  int64_t x_stride;
  const int32_t* rows;  // [count], of x
  int64_t count;
  int64_t k;
  // [k, 16]; null: x has these 16 elements of x A, fewer if k is, and chain 0 gets them
  const void* a;
  LowRankType type;
  int64_t chain;  // the first of kPieceChains
  float* h;       // [count, kLowRankChains, h_stride], from the panel's first column on
  int64_t h_stride;
};
// Some columns of some rows of the output.
struct LowRankUpArguments {
  const float* h;  // as above, of all panels
  int64_t h_stride;
  const int32_t* rows;  // [count], of out
  int64_t count;
  int64_t rank;
  const void* b;  // [panels, rank, 16], from the first column on
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

// Loads of 16 elements of a type. `fetch`: what lies kFetchBytes on is fetched meanwhile.
inline constexpr int64_t kFetchBytes = 2048;
template <typename T, Vec (*load)(const T*)>
struct Elements {
  TREADLE_SIMD static Vec At(const void* p, int64_t i, bool fetch) {
    const T* const at = static_cast<const T*>(p) + i;
    if (fetch) FetchSoon(reinterpret_cast<const char*>(at) + kFetchBytes);
    return load(at);
  }
};
using Floats = Elements<float, Load>;
using Halves = Elements<uint16_t, Load>;
using BFloats = Elements<uint16_t, LoadBFloat16>;

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
inline constexpr int kTileSums = kWideRegisters ? 16 : 4;

// Calls body for tiles of rows that make [0, count), the largest first.
template <int kRows = kTileRows, typename Body>
TREADLE_SIMD void InTiles(int64_t count, const Body& body, int64_t first = 0) {
  for (; first + kRows <= count; first += kRows) body.template operator()<kRows>(first);
  if constexpr (kRows > 1) InTiles<kRows / 2>(count, body, first);
}

// One chain, of rows [first, first + kRows). A is read in the order of memory.
template <int kRows, typename Type>
TREADLE_LOOP void DownTile(const LowRankDownArguments& a, int64_t first, int64_t chain) {
  const int64_t length = (a.k + kLowRankChains - 1) / kLowRankChains;
  const int64_t end = (chain + 1) * length < a.k ? (chain + 1) * length : a.k;
  const float* x[kRows];
  Vec sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    x[r] = a.x + a.rows[first + r] * a.x_stride;
    sums[r] = Zero();
  }
  for (int64_t i = chain * length; i < end; ++i) {
    const Vec factor = Type::At(a.a, i * kLanes, first == 0);
    for (int r = 0; r < kRows; ++r) sums[r] = Fma(Broadcast(x[r][i]), factor, sums[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    Store(a.h + ((first + r) * kLowRankChains + chain) * a.h_stride, sums[r]);
  }
}

// kPanels panels from column i on, of rows [first, first + kRows) of the output.
template <int kRows, int kPanels, typename Type>
TREADLE_SIMD void UpTile(const LowRankUpArguments& a, int64_t first, int64_t i) {
  const float* const h = a.sums + first * a.h_stride;
  Vec sums[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) sums[r][p] = Zero();
  }
  for (int64_t j = 0; j < a.rank; ++j) {
    for (int p = 0; p < kPanels; ++p) {
      const Vec factor = Type::At(a.b, (i + p * kLanes) * a.rank + j * kLanes, first == 0);
      for (int r = 0; r < kRows; ++r) {
        sums[r][p] = Fma(Broadcast(h[r * a.h_stride + j]), factor, sums[r][p]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* const out = a.out + a.rows[first + r] * a.out_stride + i;
    for (int p = 0; p < kPanels; ++p) {
      const int64_t lanes = kPanels > 1 ? kLanes : a.columns - i;
      float* const to = out + p * kLanes;
      StoreLanes(to, Add(LoadLanes(to, lanes), sums[r][p]), lanes);
    }
  }
}

// Rows [first, first + kRows) of the output.
template <int kRows, typename Type>
TREADLE_LOOP void UpRows(const LowRankUpArguments& a, int64_t first) {
  constexpr int kPanels = kTileSums / kRows < 4 ? kTileSums / kRows : 4;
  int64_t i = 0;
  for (; i + kPanels * kLanes <= a.columns; i += kPanels * kLanes) {
    UpTile<kRows, kPanels, Type>(a, first, i);
  }
  for (; i < a.columns; i += kLanes) UpTile<kRows, 1, Type>(a, first, i);
}

}  // namespace

void LowRankDown(const LowRankDownArguments& a) {
  if (a.a == nullptr) {
    for (int64_t row = 0; row < a.count; ++row) {
      const float* const x = a.x + a.rows[row] * a.x_stride;
      for (int64_t c = a.chain; c < a.chain + kPieceChains; ++c) {
        Store(a.h + (row * kLowRankChains + c) * a.h_stride, c == 0 ? LoadLanes(x, a.k) : Zero());
      }
    }
    return;
  }
  WithType(a.type, [&](auto type) {
    for (int64_t c = a.chain; c < a.chain + kPieceChains; ++c) {
      InTiles(a.count,
              [&]<int kRows>(int64_t first) { DownTile<kRows, decltype(type)>(a, first, c); });
    }
  });
}

void LowRankUp(const LowRankUpArguments& a) {
  for (int64_t row = 0; row < a.count; ++row) {
    const float* const h = a.h + row * kLowRankChains * a.h_stride;
    for (int64_t j = 0; j < a.h_stride; j += kLanes) {
      const auto two = [&](int64_t c) {
        return Add(Load(h + c * a.h_stride + j), Load(h + (c + 1) * a.h_stride + j));
      };
      Store(a.sums + row * a.h_stride + j, Add(Add(two(0), two(2)), Add(two(4), two(6))));
    }
  }
  WithType(a.type, [&](auto type) {
    InTiles(a.count, [&]<int kRows>(int64_t first) { UpRows<kRows, decltype(type)>(a, first); });
  });
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/ops_state.h"

namespace treadle {
namespace {

static_assert(kLowRankPanel == 16);  // a Vec of the kernels

LowRankType TypeOf(const LowRank& factors) {
  TREADLE_CHECK(factors.type != DType::kI8);
  if (factors.type == DType::kF32) return LowRankType::kFloat;
  return factors.type == DType::kF16 ? LowRankType::kHalf : LowRankType::kBFloat;
}

// Pieces in groups, each of which reads memory in one direction: one for each thread where there
// are few pieces, else so many that no thread waits long.
class PieceGroups {
 public:
  PieceGroups(std::span<const LowRankPiece> pieces, int threads) : pieces_(pieces) {
    const size_t each = std::clamp<size_t>(pieces.size() / (size_t{8} * threads), 1, 4);
    size_ = std::max<size_t>(1, (pieces.size() + each * threads - 1) / (each * threads));
  }
  int64_t count() const { return static_cast<int64_t>((pieces_.size() + size_ - 1) / size_); }
  template <typename Body>
  void ForEach(int64_t group, const Body& body) const {
    const size_t begin = static_cast<size_t>(group) * size_;
    for (const LowRankPiece& piece :
         pieces_.subspan(begin, std::min(size_, pieces_.size() - begin))) {
      body(piece);
    }
  }

 private:
  const std::span<const LowRankPiece> pieces_;
  size_t size_;
};

}  // namespace

void CpuOps::AddLowRank(Tensor x, std::span<const LowRankProduct> products) {
  // Blocks of rows that one product multiplies, and their pieces: panels by halves of the chains,
  // then columns.
  std::vector<LowRankBlock>& blocks = state_->low_rank_blocks;
  std::vector<LowRankPiece>& downs = state_->low_rank_downs;
  std::vector<LowRankPiece>& ups = state_->low_rank_ups;
  blocks.clear();
  downs.clear();
  ups.clear();
  int64_t floats = 0, widest = 0;
  for (const LowRankProduct& product : products) {
    const int64_t panels = LowRankPanels(product.by.rank), width = panels * kLowRankPanel;
    TREADLE_CHECK(product.by.a != nullptr || x.cols == product.by.rank);
    const auto rows = std::ssize(product.rows);
    for (int64_t first = 0; first < rows; first += kLowRankRows) {
      const auto block = static_cast<int32_t>(blocks.size());
      const int64_t count = std::min(kLowRankRows, rows - first);
      for (int32_t at = 0; at < 2 * panels; ++at) downs.push_back({block, at});
      for (int32_t at = 0; at * kLowRankColumns < product.out.cols; ++at)
        ups.push_back({block, at});
      blocks.push_back({&product, first, count, floats});
      floats += count * kLowRankChains * width;
    }
    widest = std::max(widest, width);
  }
  const auto h_bytes = static_cast<size_t>(floats) * sizeof(float);
  const auto sum_bytes = static_cast<size_t>(pool_.size() * kLowRankRows * widest) * sizeof(float);
  state_->low_rank_scratch.Reserve(ScratchMemory::Aligned(h_bytes) + sum_bytes);
  auto* const h = state_->low_rank_scratch.Take<float>(h_bytes);
  auto* const sums = state_->low_rank_scratch.Take<float>(sum_bytes);
  const auto at = [](const void* factor, const LowRank& by, int64_t elements) {
    const auto bytes = static_cast<size_t>(elements) * SizeOf(by.type);
    return factor == nullptr ? nullptr : static_cast<const std::byte*>(factor) + bytes;
  };
  const auto down = [&](const LowRankPiece& piece) {
    const LowRankBlock& block = blocks[static_cast<size_t>(piece.block)];
    const LowRank& by = block.product->by;
    const int64_t column = piece.part / 2 * kLowRankPanel;
    const int64_t x_column = by.a == nullptr ? column : 0;
    kLowRankDown[isa_]({x.Row<float>(0) + x_column, x.stride,
                        block.product->rows.data() + block.first, block.count, x.cols - x_column,
                        at(by.a, by, column * x.cols), TypeOf(by), piece.part % 2 * kPieceChains,
                        h + block.h + column, LowRankPanels(by.rank) * kLowRankPanel});
  };
  const auto up = [&](int worker, const LowRankPiece& piece) {
    const LowRankBlock& block = blocks[static_cast<size_t>(piece.block)];
    const auto& [by, rows, out] = *block.product;
    const int64_t column = piece.part * kLowRankColumns;
    kLowRankUp[isa_]({h + block.h, LowRankPanels(by.rank) * kLowRankPanel,
                      rows.data() + block.first, block.count, by.rank,
                      at(by.b, by, column * by.rank), TypeOf(by), out.Row<float>(0) + column,
                      out.stride, std::min(kLowRankColumns, out.cols - column),
                      sums + worker * kLowRankRows * widest});
  };
  const PieceGroups down_groups(downs, pool_.size()), up_groups(ups, pool_.size());
  pool_.ParallelForEach(
      down_groups.count(), [&](int, int64_t group) { down_groups.ForEach(group, down); },
      up_groups.count(),
      [&](int worker, int64_t group) {
        up_groups.ForEach(group, [&](const LowRankPiece& piece) { up(worker, piece); });
      });
}

}  // namespace treadle
#endif
