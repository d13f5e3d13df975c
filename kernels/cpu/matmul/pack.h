// Packing a checkpoint's matrix into the layouts of matmul_kernels.h, and reading rows back.
//
// Thread safety: PackMatrix uses the pool, so it runs on the rank's thread; a CpuMatrix is
// constant.
#pragma once

#include <memory>
#include <utility>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/cpu/matmul/matmul_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/weight_arena.h"

namespace treadle {

// The layout that the kernels of one instruction set and compute mode take.
struct PackTarget {
  // Codes of more bits are packed as the integers that they stand for (PackKind::kWords).
  int table_bits;
  // Whether inline formats may be packed as kCodes4.
  bool inline_codes;
  CpuIsa isa;
  ComputeMode compute;    // of ModeOf
  bool integers = false;  // whether products round activations to integers
  // But for LLM.int8(): PackedView::bf16, and whether its kernel takes tiles.
  bool bf16 = false;
  bool tiles = false;
};

class CpuMatrix final : public PackedMatrix {
 public:
  CpuMatrix(const PackedView& view, size_t bytes, std::shared_ptr<uint8_t> memory,
            const PackTarget& target)
      : view_(view),
        bytes_(bytes),
        memory_(std::move(memory)),
        isa_(target.isa),
        compute_(target.compute) {}
  // Its rows are read where they lie (MatrixSource::file).
  explicit CpuMatrix(const MatrixSource& stored)
      : view_{.kind = PackKind::kF32,
              .data = nullptr,
              .n = stored.n,
              .k = stored.k,
              .group_bytes = 0,
              .format = stored.format},
        bytes_(static_cast<size_t>(stored.format->MatrixBytes(stored.n, stored.k))),
        stored_(stored) {}
  int64_t n() const override { return view_.n; }
  int64_t k() const override { return view_.k; }
  const WeightFormat& format() const override { return *view_.format; }
  size_t bytes() const override { return bytes_; }
  // Packed matrices alone have these two.
  ComputeMode compute() const { return compute_; }
  const PackedView& view() const {
    TREADLE_CHECK(memory_ != nullptr);
    return view_;
  }
  // Row `row`, decoded canonically, to out [k]; added to it if `accumulate`.
  void DecodeRow(int64_t row, bool accumulate, float* out) const;

 private:
  const PackedView view_;
  const size_t bytes_;
  const std::shared_ptr<uint8_t> memory_;
  const CpuIsa isa_ = CpuIsa::kAvx2;  // of what decodes
  const ComputeMode compute_ = ComputeMode::kExact;
  const MatrixSource stored_ = {};
};

// The source has passed CheckMatrixSource. Errors: too many columns for LLM.int8(), no memory.
absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(const MatrixSource& source,
                                                         const PackTarget& target, ThreadPool& pool,
                                                         WeightArena& arena);

}  // namespace treadle
