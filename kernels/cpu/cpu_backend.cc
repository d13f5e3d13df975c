#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/matmul/pack.h"
#include "kernels/cpu/ops/ops_state.h"
#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

constexpr int kMaxThreads = 1024;

}  // namespace

namespace {
ComputeMode MeaningOf(ComputeMode compute) {
  return compute == ComputeMode::kAuto ? kCpuAuto : compute;
}
}  // namespace

CpuOps::CpuOps(int threads, bool pin, int first_cpu, CpuIsa isa, ComputeMode compute)
    : isa_(isa),
      compute_(compute),
      pool_(threads, pin, first_cpu),
      matmul_(pool_, isa, MeaningOf(compute)),
      state_(std::make_unique<State>(pool_, isa)) {}

CpuOps::~CpuOps() = default;

std::string CpuOps::description() const {
  return Str("cpu ", Name(isa_), ", ", pool_.size(), pool_.size() == 1 ? " thread" : " threads",
             ", compute ", Name(compute_),
             compute_ == ComputeMode::kAuto ? Str(" (", Name(kCpuAuto), ")") : "");
}

absl::StatusOr<Buffer> CpuOps::Allocate(size_t bytes) {
  std::shared_ptr<uint8_t> memory = MapMemory(bytes);
  if (memory == nullptr) return ResourceExhausted("no memory for a buffer of ", bytes, " bytes");
  uint8_t* data = memory.get();
  return Buffer(data, bytes, [memory = std::move(memory)](void*) {});
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> CpuOps::Pack(const MatrixSource& source) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  return PackMatrix(source, PackTargetOf(isa_, MeaningOf(compute_), source), pool_, arena_);
}

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

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return InvalidArgument("threads is ", options.threads, ", expected 0 to ", kMaxThreads);
  }
  if (options.first_cpu < 0) {
    return InvalidArgument("first_cpu is ", options.first_cpu, ", expected 0 or more");
  }
  CpuIsa isa;
  if (options.isa.has_value()) {
    isa = *options.isa;
    const bool supported = std::ranges::count(SupportedIsas(), isa) > 0;
    if (!supported) return InvalidArgument("this processor cannot run ", Name(isa));
  } else {
    TREADLE_ASSIGN_OR_RETURN(isa, ChooseIsa());
  }
  const int threads = options.threads > 0 ? options.threads : UsableCpus();
  return std::make_unique<CpuOps>(threads, options.pin, options.first_cpu, isa, options.compute);
}

}  // namespace treadle
