#include "kernels/reference/reference_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "kernels/host_backend.h"
#include "kernels/reference/reference_ops.h"

namespace treadle {
namespace {

class ReferenceBackend final : public HostBackend {
 public:
  explicit ReferenceBackend(ComputeMode compute) : compute_(compute) {}

  std::string_view name() const override { return "reference"; }
  std::string description() const override {
    return Str("reference, compute ",
               Name(QuantizesActivations(compute_) ? compute_ : ComputeMode::kExact));
  }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    void* data = ::operator new(bytes, kAlignment, std::nothrow);
    if (data == nullptr) return ResourceExhausted("cannot allocate ", bytes, " bytes");
    std::memset(data, 0, bytes);
    return Buffer(data, bytes, [](void* p) { ::operator delete(p, kAlignment); });
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return reference::Pack(source);
  }

  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    TREADLE_CHECK(out.cols == table.k() && out.rows == static_cast<int64_t>(ids.size()));
    for (int64_t row = 0; row < out.rows; ++row) {
      float* to = out.Row<float>(row);
      const int64_t from = TableRow(table, ids[row], first_id);
      if (from < 0) {
        if (!accumulate) std::fill_n(to, out.cols, 0.0f);
        continue;
      }
      const auto weights = reference::WeightRow(table, from);
      for (int64_t i = 0; i < out.cols; ++i) to[i] = accumulate ? to[i] + weights[i] : weights[i];
    }
  }

  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out) override {
    for (int64_t row = 0; row < x.rows; ++row) {
      const float* from = x.Row<float>(row);
      double squares = 0;
      for (int64_t i = 0; i < x.cols; ++i) squares += double{from[i]} * from[i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(x.cols) + eps);
      float* to = out.Row<float>(row);
      for (int64_t i = 0; i < x.cols; ++i) {
        to[i] = static_cast<float>(from[i] * scale * weight[i]);
      }
    }
  }

  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    for (int64_t row = 0; row < x.rows; ++row) {
      const float* from = x.Row<float>(row);
      const double count = static_cast<double>(x.cols);
      double sum = 0;
      for (int64_t i = 0; i < x.cols; ++i) sum += from[i];
      const double mean = sum / count;
      double squares = 0;
      for (int64_t i = 0; i < x.cols; ++i) squares += (from[i] - mean) * (from[i] - mean);
      const double scale = 1 / std::sqrt(squares / count + eps);
      float* to = out.Row<float>(row);
      for (int64_t i = 0; i < x.cols; ++i) {
        const double shift = bias == nullptr ? 0.0 : bias[i];
        to[i] = static_cast<float>((from[i] - mean) * scale * weight[i] + shift);
      }
    }
  }

  void MatMul(Tensor x, std::span<const Projection> projections) override {
    reference::MatMul(x, projections, compute_);
  }

  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    reference::RotateAndStoreKv(q, k, v, rotary, kv);
  }

  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    reference::Attention(q, kv, scale, out);
  }

  void SwiGlu(Tensor gate, Tensor up, Tensor out) override {
    for (int64_t row = 0; row < out.rows; ++row) {
      for (int64_t i = 0; i < out.cols; ++i) {
        const double x = gate.Row<float>(row)[i];
        const double silu = x / (1 + std::exp(-x));
        out.Row<float>(row)[i] = static_cast<float>(silu * up.Row<float>(row)[i]);
      }
    }
  }

  void Gelu(Tensor x, Tensor out) override {
    const double root = std::sqrt(2 / M_PI);
    for (int64_t row = 0; row < x.rows; ++row) {
      for (int64_t i = 0; i < x.cols; ++i) {
        const double v = x.Row<float>(row)[i];
        out.Row<float>(row)[i] =
            static_cast<float>(0.5 * v * (1 + std::tanh(root * (v + 0.044715 * v * v * v))));
      }
    }
  }

  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(out.Row<float>(static_cast<int64_t>(i)), x.Row<float>(rows[i]),
                  static_cast<size_t>(x.cols) * sizeof(float));
    }
  }

  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    for (const PageCopy& copy : copies) {
      std::memmove(pages + copy.to * layout.PageBytes(), pages + copy.from * layout.PageBytes(),
                   static_cast<size_t>(layout.PageBytes()));
    }
  }

  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    for (size_t i = 0; i < rows.size(); ++i) {
      const float* row = logits.Row<float>(static_cast<int64_t>(i));
      results[i] = ReferenceSample({row, static_cast<size_t>(logits.cols)}, rows[i]);
    }
    KeepSamples(rows, results);
  }

  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    for (size_t i = 0; i < rows.size(); ++i) {
      const float* row = logits.Row<float>(static_cast<int64_t>(i));
      shards[i] =
          ReferenceSampleShard({row, static_cast<size_t>(logits.cols)}, first_token, rows[i]);
    }
  }

 private:
  const ComputeMode compute_;
};

}  // namespace

std::unique_ptr<Backend> CreateReferenceBackend(ComputeMode compute) {
  return std::make_unique<ReferenceBackend>(compute);
}

}  // namespace treadle
