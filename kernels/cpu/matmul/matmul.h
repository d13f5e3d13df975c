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

// How CpuMatMul wants matrices.
PackTarget PackTargetOf(CpuIsa isa, ComputeMode compute);

// One compute mode.
struct MatMulKernel {
  MatMulFunction* run;
  QuantizeFunction* quantize;  // null: activations stay float
  int64_t code_bytes;          // of a quantized activation
  bool codebooks;              // whether apart formats take quantized activations too
  // The kernel of many rows, and how they are quantized; null where there is none.
  MatMulFunction* run_tiles = nullptr;
  QuantizeLaneFunction* quantize_lane = nullptr;
  int64_t tile_block = 0;                        // bytes
  MatMulFunction* run_row_int8_tiles = nullptr;  // of kRowInt8
};

class CpuMatMul {
 public:
  CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute);

  // Backend::MatMul. Every weight is a CpuMatrix.
  void Run(Tensor x, std::span<const Projection> projections);

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
  // The shared input in one order of its features.
  struct Input {
    const int32_t* order;                 // [k]; null: as it is
    bool quantize = false, tile = false;  // for kernels of rows, and of tiles
    Tensor x = {};                        // [rows, k], in this order
    int8_t* codes = nullptr;
    ActivationBlock* blocks = nullptr;
    uint8_t* tiles = nullptr;
  };

  void Plan(const Tensor& x, std::span<const Projection> projections);
  size_t InputFor(const int32_t* order, int64_t k);
  void ReserveScratch(const Tensor& x);
  int64_t TileBytes(const Tensor& x) const;
  void PrepareRows(const Tensor& x, const Input& input, int64_t begin, int64_t end);
  void Prepare(const Tensor& x);
  void RunGroups(int worker, int64_t begin, int64_t end);

  ThreadPool& pool_;
  const MatMulKernel kernel_;

  ScratchMemory memory_;
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
