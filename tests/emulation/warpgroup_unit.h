// One warp's quarter of a warpgroup's matrix unit: rows 16 w .. 16 w + 15 of every product (see
// kernels/cuda/runtime/warpgroup.h). What a product adds to becomes NaN (integers: those bits) when
// it is issued, and the sums are there when they have been waited for. B, and A of int8 products,
// is read when the product is issued, or only then: which is drawn, so that writing it too late or
// too early shows.
//
// Thread safety: as the machine that it belongs to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/dtype.h"
#include "tests/emulation/machine.h"

namespace treadle::simt {

// Operands of each lane for a product or a wait.
struct WarpgroupOperands {
  void* d = nullptr;            // [columns / 8][4]
  const uint32_t* a = nullptr;  // [4]; of int8 products it outlives them
  uint64_t b = 0;  // SharedMatrix::bits; addresses count from the block's shared memory on
  int columns = 0;
  DType type = DType::kBF16;    // of A and B; kI8: the sums are int32
  bool rows_are_terms = false;  // RowsOf::kTerms
  bool add = false;
  int pending = 0;  // of a wait
};

// Functions that return a text say what is wrong with the kernel, or null.
class WarpgroupUnit {
 public:
  // A block begins. round_apart: sums come out a unit in the last place larger.
  void Begin(bool round_apart);
  void Fence() { fenced_ = true; }
  // lanes: WarpgroupOperands. read_now: B is read at once.
  const char* Issue(void* const (&lanes)[32], std::span<const unsigned char> shared, bool read_now);
  void Commit();
  const char* Wait(void* const (&lanes)[32], std::span<const unsigned char> shared);
  // The warp has returned.
  const char* End() const;
  int64_t issued() const { return issued_; }

 private:
  // Accumulators that products add to, of all lanes.
  struct Sums {
    void* lanes[32] = {};
    int columns = 0;
    int in_flight = 0;              // products
    std::vector<float> values;      // [16, columns]; or
    std::vector<int32_t> integers;  // the same
  };
  struct Product {
    WarpgroupOperands operands;        // of lane 0
    const uint32_t* a_lanes[32] = {};  // of int8 products
    float a[32][16] = {};              // [k, row]
    std::vector<float> b;              // [k, columns]; empty: neither is read yet
    int group = 0;
    Sums* sums = nullptr;
  };

  Sums& SumsOf(void* const (&lanes)[32]);
  static const char* ReadB(Product& product, std::span<const unsigned char> shared);
  static void ReadBytesOfA(Product& product);
  static void Multiply(const Product& product);
  void WriteBack(const Sums& sums) const;

  std::vector<Product> products_;            // on their way, in order
  std::vector<std::unique_ptr<Sums>> sums_;  // of those
  int group_ = 0;                            // that is being filled
  bool fenced_ = false;                      // since the last group
  int64_t issued_ = 0;
  bool round_apart_ = false;
};

// The units of a block.
class WarpgroupUnits {
 public:
  static constexpr int kWarps = 4;  // of a warpgroup

  void Begin(size_t warps, bool round_apart);
  // Step for which the lanes of a warp met: kWarpgroupFence or one after it. all_fenced: no thread
  // has passed a barrier with copies that it has not fenced.
  const char* Run(int warp, Meeting meeting, void* const (&lanes)[32],
                  std::span<const unsigned char> shared, bool read_now, bool all_fenced);
  // When all have returned. `warp`: whose kernel is wrong.
  const char* End(int& warp) const;

 private:
  std::vector<WarpgroupUnit> units_;  // of each warp
};

}  // namespace treadle::simt
