#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "kernels/cpu/pack.h"
#include "kernels/cpu/weight_arena.h"

namespace treadle {
namespace {

// Below this many activations they are quantized by the caller alone: a barrier would cost more.
constexpr int64_t kSerialValues = 16384;

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

void CpuMatMul::RunWorker(int worker) {
  const int64_t threads = pool_.size();
  RunGroups(worker, groups_ * worker / threads, groups_ * (worker + 1) / threads);
}

// A thread's part of the quantization of the input; ends with all threads done.
void CpuMatMul::QuantizeShare(int worker) {
  const int64_t threads = pool_.size();
  const auto bound = [threads](int64_t total, int64_t part) { return total * part / threads; };
  if (!row_activations_.empty()) {
    row_activations_.FlagColumns(x_, bound(x_.cols, worker), bound(x_.cols, worker + 1));
    pool_.Barrier();
    row_activations_.QuantizeRows(x_, bound(x_.rows, worker), bound(x_.rows, worker + 1));
  }
  if (quantize_) QuantizeRows(x_, bound(x_.rows, worker), bound(x_.rows, worker + 1));
  pool_.Barrier();
}

void CpuMatMul::Run(Tensor x, std::span<const Projection> projections) {
  Plan(x, projections);
  if (x.rows == 0 || groups_ == 0) return;
  ReserveScratch(x);
  x_ = x;
  input_ = {static_cast<const float*>(x.data), x.stride, codes_, blocks_, {}, x.rows, x.cols};
  const bool quantize = quantize_ || !row_activations_.empty();
  const bool serial = x.rows * x.cols <= kSerialValues;
  if (quantize && serial) {
    row_activations_.FlagColumns(x, 0, x.cols);
    row_activations_.QuantizeRows(x, 0, x.rows);
    if (quantize_) QuantizeRows(x, 0, x.rows);
  }
  pool_.Run([&](int worker) {
    if (quantize && !serial) QuantizeShare(worker);
    RunWorker(worker);
  });
}

}  // namespace treadle
