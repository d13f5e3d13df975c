// The CPU backend's matrix products: quantizes the shared input once, and splits the 16-feature
// groups of all projections over the pool in one task.
//
// Thread safety: confined to the rank's thread, which the pool joins.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul_kernels.h"
#include "kernels/cpu/row_activations.h"
#include "kernels/cpu/thread_pool.h"

namespace treadle {

class CpuMatMul {
 public:
  CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute);
  ~CpuMatMul();

  // Backend::MatMul. Every weight is a CpuMatrix.
  void Run(Tensor x, std::span<const Projection> projections);

 private:
  struct Job {
    MatMulShare whole;
    int64_t first;     // its first group among those of all jobs
    int64_t row_int8;  // which of row_activations_ it takes; -1: none
  };

  void Plan(const Tensor& x, std::span<const Projection> projections);
  void ReserveScratch(const Tensor& x);
  void QuantizeRows(const Tensor& x, int64_t begin, int64_t end);
  void Quantize(const Tensor& x);
  void RunGroups(int worker, int64_t begin, int64_t end);

  ThreadPool& pool_;
  const MatMulKernel& kernel_;

  // Scratch that grows and is never given back: the steady state allocates nothing.
  std::shared_ptr<uint8_t> memory_;
  size_t capacity_ = 0;
  std::vector<Job> jobs_;
  RowActivations row_activations_;

  // This call's.
  MatMulInput input_ = {};
  bool quantize_ = false;
  int64_t groups_ = 0;
  int8_t* codes_ = nullptr;
  ActivationBlock* blocks_ = nullptr;
  uint8_t* worker_memory_ = nullptr;  // [threads] x (tile, sums)
  size_t worker_bytes_ = 0;
};

}  // namespace treadle
