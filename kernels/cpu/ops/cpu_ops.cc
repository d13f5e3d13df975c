// The ops without vector code of their own.
#include "kernels/cpu/ops/cpu_ops.h"

#include <algorithm>

#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/ops/ops_state.h"

namespace treadle {

CpuOps::CpuOps(int threads, bool pin, int first_cpu, CpuIsa isa, ComputeMode compute)
    : isa_(isa),
      pool_(threads, pin, first_cpu),
      matmul_(pool_, isa, compute),
      state_(std::make_unique<State>(pool_, isa)) {}

CpuOps::~CpuOps() = default;

void CpuOps::Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
                   bool accumulate, Tensor out) {
  constexpr int64_t kRowsPerThread = 8;  // fewer rows are not worth a hand-off
  const auto& matrix = static_cast<const CpuMatrix&>(table);
  TREADLE_CHECK(out.rows == static_cast<int64_t>(ids.size()) && out.cols == matrix.k());
  pool_.ParallelFor(out.rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (const int64_t from = TableRow(table, ids[row], first_id); from >= 0) {
        matrix.DecodeRow(from, accumulate, out.Row<float>(row));
      } else if (!accumulate) {
        std::fill_n(out.Row<float>(row), out.cols, 0.0f);
      }
    }
  });
}

void CpuOps::MatMul(Tensor x, std::span<const Projection> projections) {
  matmul_.Run(x, projections);
}

void CpuOps::Gather(Tensor x, std::span<const int32_t> rows, Tensor out) {
  HostBackend::Gather(x, rows, out);
}

void CpuOps::Copy(Tensor x, Tensor out) { HostBackend::Copy(x, out); }

void CpuOps::CopyPages(const KvLayout& layout, std::byte* pages, std::span<const PageCopy> copies) {
  HostBackend::CopyPages(layout, pages, copies);
}

}  // namespace treadle
