#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "kernels/cpu/pack.h"
#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

// Below this many activations they are quantized by the caller alone: a task would cost more.
constexpr int64_t kSerialValues = 16384;
// Kernels like to run this many groups side by side, so pieces begin at multiples of it.
constexpr int64_t kGroupsTogether = 2;

size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

const MatMulKernels& KernelsOf(CpuIsa isa) {
  return isa == CpuIsa::kAvx512 ? avx512::kMatMulKernels : avx2::kMatMulKernels;
}

const MatMulKernel& KernelOf(CpuIsa isa, ComputeMode compute) {
  const MatMulKernels& kernels = KernelsOf(isa);
  switch (compute) {
    case ComputeMode::kExact:
      return kernels.exact;
    case ComputeMode::kInt8:
      return kernels.int8;
    case ComputeMode::kAuto:
    case ComputeMode::kInt16:
      break;
  }
  return kernels.int16;
}

}  // namespace

CpuMatMul::CpuMatMul(ThreadPool& pool, CpuIsa isa, ComputeMode compute)
    : pool_(pool), kernel_(KernelOf(isa, compute)), row_activations_(KernelsOf(isa).row_int8) {}

CpuMatMul::~CpuMatMul() = default;

void CpuMatMul::Plan(const Tensor& x, std::span<const Projection> projections) {
  TREADLE_CHECK(x.dtype == DType::kF32);
  jobs_.clear();
  row_activations_.Begin();
  groups_ = 0;
  quantize_ = false;
  for (const Projection& projection : projections) {
    const auto& matrix = static_cast<const CpuMatrix&>(*projection.weight);
    const Tensor& out = projection.out;
    TREADLE_CHECK(matrix.k() == x.cols && matrix.n() == out.cols && out.rows == x.rows &&
                  out.dtype == DType::kF32);
    const int64_t groups = (matrix.n() + kGroupFeatures - 1) / kGroupFeatures;
    jobs_.push_back(
        {{matrix.view(), 0, groups, projection.bias, static_cast<float*>(out.data), out.stride,
          projection.accumulate},
         groups_,
         matrix.view().kind == PackKind::kRowInt8 ? row_activations_.Add(matrix.view()) : -1});
    groups_ += groups;
    const bool blocks =
        matrix.format().group > 0 || (matrix.view().kind == PackKind::kCodes4 && kernel_.codebooks);
    quantize_ |= kernel_.quantize != nullptr && blocks;
  }
}

void CpuMatMul::ReserveScratch(const Tensor& x) {
  const size_t rows = static_cast<size_t>(x.rows);
  const size_t cols = static_cast<size_t>(x.cols);
  const size_t code_bytes =
      quantize_ ? Aligned(rows * cols * static_cast<size_t>(kernel_.code_bytes)) : 0;
  const size_t block_bytes =
      quantize_ ? Aligned(rows * (cols / kBlockValues) * sizeof(ActivationBlock)) : 0;
  worker_bytes_ = kTileBytes + rows * kMaxGroupsAtOnce * kGroupFeatures * sizeof(float);
  const size_t needed =
      code_bytes + block_bytes + worker_bytes_ * static_cast<size_t>(pool_.size());
  if (needed > capacity_) {
    memory_.reset();
    memory_ = MapMemory(needed);
    TREADLE_CHECK(memory_ != nullptr);
    capacity_ = needed;
  }
  codes_ = reinterpret_cast<int8_t*>(memory_.get());
  blocks_ = reinterpret_cast<ActivationBlock*>(memory_.get() + code_bytes);
  worker_memory_ = memory_.get() + code_bytes + block_bytes;
  if (!row_activations_.empty()) row_activations_.Reserve(x);
}

void CpuMatMul::QuantizeRows(const Tensor& x, int64_t begin, int64_t end) {
  const int64_t blocks = x.cols / kBlockValues;
  for (int64_t row = begin; row < end; ++row) {
    kernel_.quantize(x.Row<float>(row), x.cols, codes_ + row * x.cols * kernel_.code_bytes,
                     blocks_ + row * blocks);
  }
}

// Groups [begin, end) counted over all jobs.
void CpuMatMul::RunGroups(int worker, int64_t begin, int64_t end) {
  uint8_t* memory = worker_memory_ + static_cast<size_t>(worker) * worker_bytes_;
  const MatMulScratch scratch{memory, reinterpret_cast<float*>(memory + kTileBytes)};
  for (const Job& job : jobs_) {
    MatMulShare share = job.whole;
    share.group_begin = std::max(int64_t{0}, begin - job.first);
    share.group_end = std::min(job.whole.group_end, end - job.first);
    if (share.group_begin >= share.group_end) continue;
    MatMulInput input = input_;
    if (job.row_int8 >= 0) input.row_int8 = row_activations_.input(job.row_int8);
    kernel_.run(input, share, scratch);
  }
}

// Quantizes the input in the ways that the projections need.
void CpuMatMul::Quantize(const Tensor& x) {
  // In a small call a task would cost more than it saves.
  const auto split = [&](int64_t count, const auto& body) {
    if (x.rows * x.cols <= kSerialValues) {
      body(int64_t{0}, count);
    } else {
      pool_.ParallelFor(count, 1, body);
    }
  };
  if (row_activations_.any_of_call()) {
    split(x.cols, [&](int64_t begin, int64_t end) { row_activations_.FlagColumns(x, begin, end); });
  }
  if (!row_activations_.empty()) {
    split(x.rows,
          [&](int64_t begin, int64_t end) { row_activations_.QuantizeRows(x, begin, end); });
  }
  if (quantize_) {
    split(x.rows, [&](int64_t begin, int64_t end) { QuantizeRows(x, begin, end); });
  }
}

void CpuMatMul::Run(Tensor x, std::span<const Projection> projections) {
  Plan(x, projections);
  if (x.rows == 0 || groups_ == 0) return;
  ReserveScratch(x);
  input_ = {static_cast<const float*>(x.data), x.stride, codes_, blocks_, {}, x.rows, x.cols};
  Quantize(x);
  pool_.ParallelFor(groups_, kGroupsTogether,
                    [&](int worker, int64_t begin, int64_t end) { RunGroups(worker, begin, end); });
}

}  // namespace treadle
