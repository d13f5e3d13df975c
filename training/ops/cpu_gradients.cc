#include "training/ops/cpu_gradients.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/ops/split_rows.h"
#include "kernels/cpu/weight_arena.h"
#include "training/ops/gradient_kernels.h"

namespace treadle {
namespace {

// Rows of a weight matrix that are decoded at a time.
constexpr int64_t kDecodedRows = 128;

class CpuGradients final : public GradientOps {
 public:
  explicit CpuGradients(CpuOps& backend)
      : backend_(backend), pool_(backend.pool()), isa_(backend.isa()) {}

  void ProductGradient(const PackedMatrix& weight, Tensor dy, Tensor dx) override {
    TREADLE_CHECK(dy.rows == dx.rows && dy.cols == weight.n() && dx.cols == weight.k());
    const auto bytes = static_cast<size_t>(kDecodedRows * weight.k()) * sizeof(float);
    decoded_.Reserve(bytes);
    float* const decoded = decoded_.Take<float>(bytes);
    std::vector<int32_t> ids(static_cast<size_t>(kDecodedRows));
    for (int64_t n = 0; n < weight.n(); n += kDecodedRows) {
      const int64_t count = std::min(kDecodedRows, weight.n() - n);
      std::iota(ids.begin(), ids.end(), static_cast<int32_t>(n));
      backend_.Embed(weight, std::span(ids).first(static_cast<size_t>(count)), 0, false,
                     DenseTensor(decoded, DType::kF32, count, weight.k()));
      Product({dy.Row<float>(0) + n, dy.stride, 1, decoded, weight.k(), dx.Row<float>(0), dx.stride,
               dx.rows, dx.cols, count});
    }
  }

  void LowRankGradient(const LowRankUpdate& u, Tensor x, Tensor dy, Tensor dx) override {
    TREADLE_CHECK(x.rows == dy.rows && x.cols == u.k && dy.cols == u.n && dx.cols == u.k);
    const int64_t rank = u.factors.rank;
    inner_.assign(static_cast<size_t>(x.rows * rank), 0);  // scale * x A^T
    for (int64_t r = 0; r < rank; r += kLowRankPanel) {
      Product({x.Row<float>(0), x.stride, 1,
               static_cast<const float*>(u.factors.a) + LowRankAt(u.k, 0, r), kLowRankPanel,
               inner_.data() + r, rank, x.rows, std::min(kLowRankPanel, rank - r), u.k});
    }
    for (float& value : inner_) value *= u.scale;
    Product({inner_.data(), 1, rank, dy.Row<float>(0), dy.stride, u.b_gradient, u.n, rank, u.n,
             x.rows});
    inner_.assign(inner_.size(), 0);  // scale * dy B
    Product({dy.Row<float>(0), dy.stride, 1, u.b, rank, inner_.data(), rank, x.rows, rank, u.n});
    Product(
        {inner_.data(), 1, rank, x.Row<float>(0), x.stride, u.a_gradient, u.k, rank, u.k, x.rows});
    Product({inner_.data(), rank, 1, u.a, u.k, dx.Row<float>(0), dx.stride, x.rows, u.k, rank});
  }

  void RmsNormGradient(Tensor x, const float* weight, float eps, Tensor dy, Tensor dx) override {
    CheckSameShape(x, dy);
    CheckSameShape(x, dx);
    SplitRows(pool_, x.rows, x.cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kRmsNormGradientRow[isa_](x.Row<float>(i), weight, eps, dy.Row<float>(i), dx.Row<float>(i),
                                  x.cols);
      }
    });
  }

  void GatedGradient(bool gelu, Tensor gate, Tensor up, Tensor dout, Tensor dgate,
                     Tensor dup) override {
    CheckSameShape(gate, dout);
    const auto kernel = gelu ? kGeGluGradientRow[isa_] : kSwiGluGradientRow[isa_];
    SplitRows(pool_, gate.rows, gate.cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernel(gate.Row<float>(i), up.Row<float>(i), dout.Row<float>(i), dgate.Row<float>(i),
               dup.Row<float>(i), gate.cols);
      }
    });
  }

  void RotateBack(Tensor x, int64_t head_dim, const RotaryTable& rotary,
                  std::span<const SequenceSpan> sequences) override {
    for (const SequenceSpan& s : sequences) {
      SplitRows(pool_, s.num_rows, x.cols, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t angle = (s.first_position + i) * rotary.half_dim;
          float* row = x.Row<float>(s.first_row + i);
          for (int64_t head = 0; head < x.cols; head += head_dim) {
            kRotateBackHead[isa_](rotary.cos + angle, rotary.sin + angle, row + head,
                                  rotary.half_dim);
          }
        }
      });
    }
  }

  void AttentionGradient(Tensor q, const KvView& kv, float scale, Tensor dout, Tensor dq, Tensor dk,
                         Tensor dv) override {
    TREADLE_CHECK(kv.layout.dtype == DType::kF32 && kv.layout.key_order == KeyOrder::kByFeature);
    TREADLE_CHECK(kv.slopes == nullptr && kv.sinks == nullptr);
    const int64_t kv_heads = kv.layout.kv_heads, dim = kv.layout.head_dim;
    const int64_t group = q.cols / dim / kv_heads;
    std::vector<std::vector<float>> scratch(static_cast<size_t>(pool_.size()));
    const int64_t items = std::ssize(kv.sequences) * kv_heads;
    pool_.ParallelForEach(items, [&](int worker, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const SequenceSpan& s = kv.sequences[item / kv_heads];
        const int64_t head = item % kv_heads, column = head * dim, rows = s.num_rows;
        TREADLE_CHECK(s.first_position == 0);
        std::vector<float>& memory = scratch[worker];
        memory.resize(static_cast<size_t>(rows * (3 * dim + 2 * kAttentionGradientRows)));
        float* const keys = memory.data();
        float* const scores = keys + 3 * rows * dim;
        ReadCache(kv, s, head, keys);
        kAttentionGradientGroup[isa_]({.q = q.Row<float>(s.first_row) + group * column,
                                       .dout = dout.Row<float>(s.first_row) + group * column,
                                       .dq = dq.Row<float>(s.first_row) + group * column,
                                       .q_stride = q.stride,
                                       .dout_stride = dout.stride,
                                       .dq_stride = dq.stride,
                                       .dk = dk.Row<float>(s.first_row) + column,
                                       .dv = dv.Row<float>(s.first_row) + column,
                                       .dkv_stride = dk.stride,
                                       .keys = keys,
                                       .keys_transposed = keys + rows * dim,
                                       .values_transposed = keys + 2 * rows * dim,
                                       .scores = scores,
                                       .dscores = scores + kAttentionGradientRows * rows,
                                       .rows = rows,
                                       .dim = dim,
                                       .heads = group,
                                       .window = kv.window,
                                       .scale = scale});
      }
    });
  }

  double CrossEntropy(Tensor logits, std::span<const int32_t> targets, float scale) override {
    TREADLE_CHECK(logits.rows == std::ssize(targets));
    std::vector<double> losses(targets.size());
    pool_.ParallelFor(logits.rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* const row = logits.Row<float>(i);
        const float chosen = row[targets[i]];
        const auto [top, sum] = kSoftmaxRow[isa_](row, scale, logits.cols);
        losses[i] = std::log(double{sum}) + (double{top} - double{chosen});
        row[targets[i]] -= scale;
      }
    });
    return std::accumulate(losses.begin(), losses.end(), 0.0);
  }

 private:
  // Runs it on all threads, cut along the longer side of c.
  void Product(const ProductArguments& all) {
    const bool by_rows = all.m >= all.n;
    pool_.ParallelFor(by_rows ? all.m : all.n, by_rows ? 8 : 32, [&](int64_t begin, int64_t end) {
      ProductArguments part = all;
      (by_rows ? part.m : part.n) = end - begin;
      part.a += by_rows ? begin * all.a_row : 0;
      part.b += by_rows ? 0 : begin;
      part.c += by_rows ? begin * all.c_stride : begin;
      kAddProductRange[isa_](part);
    });
  }

  // One head's keys [rows, dim], these transposed, and its values transposed.
  static void ReadCache(const KvView& kv, const SequenceSpan& s, int64_t head, float* to) {
    const KvLayout& layout = kv.layout;
    const int64_t rows = s.num_rows, dim = layout.head_dim;
    float* const keys_transposed = to + rows * dim;
    float* const values_transposed = keys_transposed + rows * dim;
    for (int64_t i = 0; i < rows; ++i) {
      const auto* page = reinterpret_cast<const float*>(kv.pages + s.pages[i / layout.page_size] *
                                                                       layout.PageStride());
      const int64_t slot = i % layout.page_size;
      for (int64_t k = 0; k < dim; ++k) {
        to[i * dim + k] = keys_transposed[k * rows + i] = page[layout.KeyElement(head, slot, k)];
        values_transposed[k * rows + i] = page[layout.ValueElement(head, slot, k)];
      }
    }
  }

  CpuOps& backend_;
  ThreadPool& pool_;
  const CpuIsa isa_;
  ScratchMemory decoded_;     // [kDecodedRows, k]
  std::vector<float> inner_;  // [rows, rank]
};

}  // namespace

std::unique_ptr<GradientOps> CreateCpuGradients(CpuOps& backend) {
  return std::make_unique<CpuGradients>(backend);
}

}  // namespace treadle
