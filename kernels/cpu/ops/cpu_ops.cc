// The elementwise and row-wise ops: how they are split over the pool.
#include "kernels/cpu/ops/cpu_ops.h"

#include <algorithm>

#include "kernels/cpu/ops/ops_state.h"

namespace treadle {
namespace {

// Below this many elements an op runs on the caller alone: waking the pool would cost more.
constexpr int64_t kSerialElements = 8192;

// Calls body(begin row, end row) for parts of [0, rows), or once for all where the op is small.
template <typename Body>
void SplitRows(ThreadPool& pool, int64_t rows, int64_t cols, Body body) {
  if (rows == 0) return;
  if (rows * cols < kSerialElements) {
    body(int64_t{0}, rows);
  } else {
    pool.ParallelFor(rows, 1, body);
  }
}

// For elementwise ops: body(row, first column, number of columns). One large row is split too.
template <typename Body>
void SplitElements(ThreadPool& pool, int64_t rows, int64_t cols, Body body) {
  if (rows == 1 && cols >= kSerialElements) {
    pool.ParallelFor(cols, 16, [&](int64_t begin, int64_t end) { body(0, begin, end - begin); });
    return;
  }
  SplitRows(pool, rows, cols, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row, 0, cols);
  });
}

void CheckSameShape(const Tensor& a, const Tensor& b) {
  TREADLE_CHECK(a.rows == b.rows && a.cols == b.cols);
  TREADLE_CHECK(a.dtype == DType::kF32 && b.dtype == DType::kF32);
}

NormArguments NormRows(const Tensor& x, const float* weight, const float* bias, float eps,
                       const Tensor& out, int64_t begin, int64_t end) {
  return {x.Row<float>(begin),
          x.stride,
          out.Row<float>(begin),
          out.stride,
          end - begin,
          x.cols,
          weight,
          bias,
          eps};
}

}  // namespace

CpuOps::CpuOps(ThreadPool& pool, CpuIsa isa)
    : state_(std::make_unique<State>(
          pool, isa == CpuIsa::kAvx2 ? avx2::kOpKernels : avx512::kOpKernels)) {}

CpuOps::~CpuOps() = default;

void CpuOps::RmsNorm(Tensor x, const float* weight, float eps, Tensor out) {
  CheckSameShape(x, out);
  SplitRows(state_->pool, x.rows, x.cols, [&](int64_t begin, int64_t end) {
    state_->kernels.rms_norm(NormRows(x, weight, nullptr, eps, out, begin, end));
  });
}

void CpuOps::LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) {
  CheckSameShape(x, out);
  SplitRows(state_->pool, x.rows, x.cols, [&](int64_t begin, int64_t end) {
    state_->kernels.layer_norm(NormRows(x, weight, bias, eps, out, begin, end));
  });
}

void CpuOps::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  CheckSameShape(gate, up);
  CheckSameShape(gate, out);
  SplitElements(state_->pool, gate.rows, gate.cols, [&](int64_t row, int64_t col, int64_t count) {
    state_->kernels.swiglu(gate.Row<float>(row) + col, up.Row<float>(row) + col,
                           out.Row<float>(row) + col, count);
  });
}

void CpuOps::Gelu(Tensor x, Tensor out) {
  CheckSameShape(x, out);
  SplitElements(state_->pool, x.rows, x.cols, [&](int64_t row, int64_t col, int64_t count) {
    state_->kernels.gelu(x.Row<float>(row) + col, out.Row<float>(row) + col, count);
  });
}

void CpuOps::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                              const KvView& kv) {
  const KvLayout& layout = kv.layout;
  const int64_t head_dim = layout.head_dim;
  TREADLE_CHECK(layout.dtype == DType::kF16 || layout.dtype == DType::kF32);
  TREADLE_CHECK(q.cols % head_dim == 0 && k.cols == layout.kv_heads * head_dim);
  CheckSameShape(k, v);
  TREADLE_CHECK(rotary == nullptr || 2 * rotary->half_dim <= head_dim);
  const int64_t element = static_cast<int64_t>(SizeOf(layout.dtype));
  SplitRows(state_->pool, q.rows, q.cols + k.cols + v.cols, [&](int64_t begin, int64_t end) {
    RotateStoreArguments a = {};
    a.heads = q.cols / head_dim;
    a.kv_heads = layout.kv_heads;
    a.head_dim = head_dim;
    a.half_dim = rotary == nullptr ? 0 : rotary->half_dim;
    a.half = layout.dtype == DType::kF16;
    a.page_size = layout.page_size;
    for (const SequenceSpan& span : kv.sequences) {
      const int64_t first = std::max<int64_t>(begin, span.first_row);
      const int64_t last = std::min<int64_t>(end, span.first_row + span.num_rows);
      for (int64_t row = first; row < last; ++row) {
        const int64_t position = span.first_position + row - span.first_row;
        const int64_t slot = position % layout.page_size;
        std::byte* page = kv.pages + span.pages[position / layout.page_size] * layout.PageBytes();
        a.q = q.Row<float>(row);
        a.k = k.Row<float>(row);
        a.v = v.Row<float>(row);
        if (rotary != nullptr) {
          a.cos = rotary->cos + position * rotary->half_dim;
          a.sin = rotary->sin + position * rotary->half_dim;
        }
        a.k_slot = page + slot * element;
        a.v_slot = page + (layout.PartElements() + slot * head_dim) * element;
        state_->kernels.rotate_store(a);
      }
    }
  });
}

}  // namespace treadle
