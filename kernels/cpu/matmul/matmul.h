// The CPU backend's matrix products: quantizes the shared input once (and once more for each order
// of its features that a matrix asks for), and splits the 16-feature groups of all projections over
// the pool in one task.
//
// Thread safety: confined to the rank's thread, which the pool joins.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/matmul/row_activations.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

// How CpuMatMul wants a matrix.
PackTarget PackTargetOf(CpuIsa isa, ComputeMode compute, const MatrixSource& source);

// A kernel that takes rows in tiles; none if `run` is null.
struct TileKernel {
  MatMulFunction* run = nullptr;
  QuantizeTileFunction* quantize = nullptr;
  int64_t block_bytes = 0;  // of kTileRows rows and 32 k
  bool any_rows = false;

  // Whether it pays for rows from `lane` of a tile on. Vectors do six rows in the time that a tile
  // of half the height takes, unpacking included, and eight for each further tile (Xeon with AMX,
  // 2026-11-28).
  bool Pays(int64_t lane, int64_t rows) const {
    const int64_t tiles = (lane + rows + kTileRows - 1) / kTileRows;
    return any_rows || rows > 8 * tiles - 2;
  }
};

// One compute mode.
struct MatMulKernel {
  MatMulFunction* run;
  QuantizeFunction* quantize;  // null: activations stay float
  int64_t code_bytes;          // of a quantized activation
  bool codebooks;              // whether apart formats take quantized activations too
  TileKernel tiles = {};       // of many rows
  MatMulFunction* run_row_int8_tiles = nullptr;  // of kRowInt8
  // Products of matrices with PackedView::bf16: in tiles, or else of rounded rows.
  TileKernel bf16_tiles = {};
  MatMulFunction* run_bf16 = nullptr;
  void (*round_row)(const float* x, int64_t k, float* out) = nullptr;
};

class CpuMatMul {
 public:
  CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute);

  // Backend::MatMul. Every weight is a CpuMatrix.
  void Run(Tensor x, std::span<const Projection> projections);

  // Backend::GatedMatMul. combine: of n values of a gate, of an up, and of out.
  using GatedFunction = void(const float* gate, const float* up, float* out, int64_t n);
  void RunGated(Tensor x, std::span<const Projection> pairs, GatedFunction* combine, Tensor out);

 private:
  struct Job {
    MatMulShare whole;
    int64_t first;  // its first group among those of all jobs
    int64_t first_row, rows;
    size_t input;      // which of inputs_ it takes
    int64_t row_int8;  // which of row_activations_ it takes; -1: none
    MatMulFunction* run;
    bool tiles;  // whether of rows in tiles
  };
  // The shared input in one order of its features, for bf16 products or others of one kernel.
  struct Input {
    const int32_t* order;  // [k]; null: as it is
    bool bf16;
    const MatMulKernel* kernel;
    bool quantize = false, round = false;     // for kernels of rows
    const TileKernel* tile_kernel = nullptr;  // for a kernel of tiles
    Tensor x = {};                            // [rows, k], in this order
    int8_t* codes = nullptr;
    ActivationBlock* blocks = nullptr;
    Tensor rounded = {};  // [rows, whole blocks of 32 k]
    uint8_t* tiles = nullptr;
  };

  void Plan(const Tensor& x, std::span<const Projection> projections);
  const MatMulKernel& KernelFor(const CpuMatrix& matrix) const {
    return matrix.compute() == ComputeMode::kInt8    ? int8_
           : matrix.compute() == ComputeMode::kInt12 ? int12_
                                                     : kernel_;
  }
  size_t InputFor(const CpuMatrix& matrix);
  void ReserveScratch(const Tensor& x, size_t more_bytes);  // more: of each worker, at its end
  void PrepareRows(const Tensor& x, const Input& input, int64_t begin, int64_t end);
  void Prepare(const Tensor& x);
  MatMulScratch ScratchOf(int worker) const;
  void RunShare(const Job& job, const MatMulShare& share, int64_t row, int64_t rows,
                const MatMulScratch& scratch);
  void RunGroups(int worker, int64_t begin, int64_t end);
  void RunPairs(int worker, int64_t begin, int64_t end, GatedFunction* combine, const Tensor& out);
  template <typename RunRange>
  void SplitGroups(const Tensor& x, int64_t groups, RunRange run);

  ThreadPool& pool_;
  const MatMulKernel kernel_, int8_, int12_;

  ScratchMemory memory_;
  // The threads' own, in the same places in every call: a line that another thread read before is
  // slow to write.
  ScratchMemory worker_scratch_;
  std::vector<Job> jobs_;
  RowActivations row_activations_;

  // This call's.
  std::vector<Input> inputs_;
  int64_t groups_ = 0;
  int64_t most_rows_ = 0;             // of one job
  uint8_t* worker_memory_ = nullptr;  // [threads] x (tile, sums)
  size_t worker_bytes_ = 0;
};

}  // namespace treadle
