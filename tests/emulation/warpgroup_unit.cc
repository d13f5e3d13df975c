#include "tests/emulation/warpgroup_unit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace treadle::simt {
namespace {

constexpr int kRows = 16;

bool IsInt8(const WarpgroupOperands& operands) { return operands.type == DType::kI8; }
int TermsOf(const WarpgroupOperands& operands) { return IsInt8(operands) ? 32 : 16; }

const WarpgroupOperands& OperandsOf(void* lane) {
  return *static_cast<const WarpgroupOperands*>(lane);
}

float Decode(DType type, uint16_t bits) {
  return type == DType::kF16 ? ToFloat(Half{bits}) : ToFloat(BFloat16{bits});
}

// The fields of a matrix descriptor (PTX).
struct Descriptor {
  uint32_t start = 0;
  uint32_t next_columns = 0;
  uint32_t next_rows = 0;
  uint32_t swizzle = 0;  // 1: of 128 bytes

  explicit Descriptor(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        next_columns(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        next_rows(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4),
        swizzle(static_cast<uint32_t>(bits >> 62)) {}

  // The address of the element of term k and column n.
  uint32_t Address(bool rows_are_terms, uint32_t k, uint32_t n) const {
    const uint32_t plain = rows_are_terms ? start + k / 8 * next_rows + k % 8 * 128 +
                                                n / 64 * next_columns + n % 64 * 2
                                          : start + n / 8 * next_rows + n % 8 * 128 + k * 2;
    return plain ^ (plain >> 3 & 0x70);  // address bits 7 to 9 onto 4 to 6
  }
  // The same of int8, without swizzle: pieces of 8 columns x 16 bytes; "columns" are terms.
  uint32_t ByteAddress(uint32_t k, uint32_t n) const {
    return start + k / 16 * next_columns + n / 8 * next_rows + n % 8 * 16 + k % 16;
  }
};

// Calls visit(lane, index in its d, index in [kRows, columns]) for every sum.
template <typename Visit>
void ForEachSum(int columns, const Visit& visit) {
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < columns / 2; ++i) {
      const int row = l / 4 + 8 * (i % 4 / 2);
      const int column = 8 * (i / 4) + 2 * (l % 4) + i % 2;
      visit(l, i, static_cast<size_t>(row * columns + column));
    }
  }
}

}  // namespace

void WarpgroupUnit::Begin(bool round_apart) {
  round_apart_ = round_apart;
  products_.clear();
  sums_.clear();
  group_ = 0;
  fenced_ = false;
  issued_ = 0;
}

WarpgroupUnit::Sums& WarpgroupUnit::SumsOf(void* const (&lanes)[32]) {
  const WarpgroupOperands& first = OperandsOf(lanes[0]);
  for (const auto& sums : sums_) {
    if (sums->lanes[0] == first.d) return *sums;
  }
  Sums& sums = *sums_.emplace_back(std::make_unique<Sums>());
  sums.columns = first.columns;
  for (int l = 0; l < 32; ++l) sums.lanes[l] = OperandsOf(lanes[l]).d;
  const auto take = [&sums](auto& values, auto poison) {
    using Value = decltype(poison);
    values.resize(static_cast<size_t>(kRows * sums.columns));
    ForEachSum(sums.columns, [&](int lane, int i, size_t at) {
      values[at] = std::exchange(static_cast<Value*>(sums.lanes[lane])[i], poison);
    });
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (IsInt8(first)) {
    take(sums.integers, std::bit_cast<int32_t>(kNan));
  } else {
    take(sums.values, kNan);
  }
  return sums;
}

void WarpgroupUnit::WriteBack(const Sums& sums) const {
  ForEachSum(sums.columns, [&](int lane, int i, size_t at) {
    if (!sums.integers.empty()) {
      static_cast<int32_t*>(sums.lanes[lane])[i] = sums.integers[at];
      return;
    }
    const float sum = sums.values[at];
    static_cast<float*>(sums.lanes[lane])[i] =
        round_apart_ ? std::nextafter(sum, std::numeric_limits<float>::infinity()) : sum;
  });
}

const char* WarpgroupUnit::Issue(void* const (&lanes)[32], std::span<const unsigned char> shared,
                                 bool read_now) {
  if (!fenced_) return "a product whose group has no WarpgroupFence before it";
  Product product;
  product.operands = OperandsOf(lanes[0]);
  for (int l = 0; l < 32; ++l) {
    const WarpgroupOperands& lane = OperandsOf(lanes[l]);
    if (lane.b != product.operands.b || lane.add != product.operands.add) {
      return "lanes ask for different products";
    }
    product.a_lanes[l] = lane.a;
    if (IsInt8(lane)) continue;
    for (int i = 0; i < 4; ++i) {
      for (int e = 0; e < 2; ++e) {
        product.a[2 * (l % 4) + e + 8 * (i / 2)][l / 4 + 8 * (i % 2)] =
            Decode(lane.type, static_cast<uint16_t>(lane.a[i] >> (16 * e)));
      }
    }
  }
  product.group = group_;
  product.sums = &SumsOf(lanes);
  if (product.sums->columns != product.operands.columns) return "sums of two shapes in one place";
  ++product.sums->in_flight;
  if (read_now) {
    if (const char* wrong = ReadB(product, shared)) return wrong;
  }
  products_.push_back(std::move(product));
  ++issued_;
  return nullptr;
}

const char* WarpgroupUnit::ReadB(Product& product, std::span<const unsigned char> shared) {
  if (!product.b.empty()) return nullptr;
  const WarpgroupOperands& operands = product.operands;
  const bool int8 = IsInt8(operands);
  const Descriptor descriptor(operands.b);
  if (descriptor.swizzle != (int8 ? 0 : 1)) {
    return int8 ? "a matrix of int8 whose pieces change places"
                : "a matrix whose pieces are not where 128-byte swizzle has them";
  }
  const auto terms = static_cast<uint32_t>(TermsOf(operands));
  const auto columns = static_cast<uint32_t>(operands.columns);
  product.b.resize(terms * columns);
  for (uint32_t k = 0; k < terms; ++k) {
    for (uint32_t n = 0; n < columns; ++n) {
      const uint32_t at =
          int8 ? descriptor.ByteAddress(k, n) : descriptor.Address(operands.rows_are_terms, k, n);
      if (at + (int8 ? 1 : 2) > shared.size()) return "a matrix that ends outside of shared memory";
      float& b = product.b[k * columns + n];
      if (int8) {
        b = static_cast<int8_t>(shared[at]);
        continue;
      }
      uint16_t bits;
      std::memcpy(&bits, &shared[at], sizeof(bits));
      b = Decode(operands.type, bits);
    }
  }
  if (int8) ReadBytesOfA(product);
  return nullptr;
}

void WarpgroupUnit::ReadBytesOfA(Product& product) {
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      for (int e = 0; e < 4; ++e) {
        product.a[4 * (l % 4) + e + 16 * (i / 2)][l / 4 + 8 * (i % 2)] =
            static_cast<int8_t>(product.a_lanes[l][i] >> (8 * e));
      }
    }
  }
}

void WarpgroupUnit::Multiply(const Product& product) {
  const int columns = product.operands.columns;
  const bool int8 = IsInt8(product.operands);
  const auto count = static_cast<size_t>(kRows * columns);
  // Sums of 32 products of int8 are exact in a float.
  std::vector<float> exact(int8 ? count : 0);
  float* d = int8 ? exact.data() : product.sums->values.data();
  if (!product.operands.add) std::fill_n(d, count, 0.0f);
  for (int k = 0; k < TermsOf(product.operands); ++k) {
    const float* b = product.b.data() + k * columns;
    for (int row = 0; row < kRows; ++row) {
      const float a = product.a[k][row];
      for (int n = 0; n < columns; ++n) d[row * columns + n] += a * b[n];
    }
  }
  for (size_t i = 0; i < exact.size(); ++i) {
    product.sums->integers[i] += static_cast<int32_t>(exact[i]);
  }
}

void WarpgroupUnit::Commit() {
  ++group_;
  fenced_ = false;
}

const char* WarpgroupUnit::Wait(void* const (&lanes)[32], std::span<const unsigned char> shared) {
  const int landed = group_ - OperandsOf(lanes[0]).pending;  // groups below this one
  auto product = products_.begin();
  for (; product != products_.end() && product->group < landed; ++product) {
    if (const char* wrong = ReadB(*product, shared)) return wrong;
    Multiply(*product);
    --product->sums->in_flight;
  }
  products_.erase(products_.begin(), product);
  std::erase_if(sums_, [this](const std::unique_ptr<Sums>& sums) {
    if (sums->in_flight > 0) return false;
    WriteBack(*sums);
    return true;
  });
  return nullptr;
}

const char* WarpgroupUnit::End() const {
  return products_.empty() ? nullptr : "a warp returned with products on their way";
}

void WarpgroupUnits::Begin(size_t warps, bool round_apart) {
  units_.resize(warps);
  for (WarpgroupUnit& unit : units_) unit.Begin(round_apart);
}

const char* WarpgroupUnits::Run(int warp, Meeting meeting, void* const (&lanes)[32],
                                std::span<const unsigned char> shared, bool read_now,
                                bool all_fenced) {
  WarpgroupUnit& unit = units_[static_cast<size_t>(warp)];
  switch (meeting) {
    case Meeting::kWarpgroupFence:
      unit.Fence();
      return nullptr;
    case Meeting::kWarpgroupCommit:
      unit.Commit();
      return nullptr;
    case Meeting::kWarpgroupWait:
      return unit.Wait(lanes, shared);
    default:
      return all_fenced ? unit.Issue(lanes, shared, read_now)
                        : "a product behind a barrier that a thread passed without an AsyncFence";
  }
}

const char* WarpgroupUnits::End(int& warp) const {
  for (size_t w = 0; w < units_.size(); ++w) {
    warp = static_cast<int>(w);
    if (const char* wrong = units_[w].End()) return wrong;
    const size_t first = w / kWarps * kWarps;
    const int64_t issued = units_[w].issued();
    if (issued > 0 && first + kWarps > units_.size()) return "products of a part of a warpgroup";
    if (issued != units_[first].issued()) {
      return "the warps of a warpgroup issued different numbers of products";
    }
  }
  return nullptr;
}

}  // namespace treadle::simt
