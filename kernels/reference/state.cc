// Short convolutions and the gated delta rule, one position after the other.
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "kernels/reference/state_page.h"

namespace treadle {
namespace {

double Length(const float* x, int64_t n) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += double{x[i]} * x[i];
  return std::sqrt(squares + 1e-6);
}

// One head's state before a position, and what follows from it.
class HeadState {
 public:
  HeadState(const StatePages& pages, int64_t head)
      : pages_(pages),
        head_(head),
        key_dim_(pages.layout().key_dim),
        value_dim_(pages.layout().value_dim),
        values_(static_cast<size_t>(key_dim_ * value_dim_)) {}

  // The state before the page that begins at `first`, then what positions up to `end` make of it.
  void Load(int64_t first, int64_t end) {
    const float* const stored = pages_.State(first, head_);
    values_.assign(stored, stored + values_.size());
    for (int64_t p = first; p < end; ++p) {
      Decay(pages_.Decay(p, head_) - (p == first ? 0 : double{pages_.Decay(p - 1, head_)}));
      Add(p);
    }
  }
  void Decay(double logarithm) {
    for (double& value : values_) value *= std::exp(logarithm);
  }
  // Adds what the position changes.
  void Add(int64_t position) {
    const float* const key = pages_.Key(position, pages_.layout().KeyHeadOf(head_));
    const float* const change = pages_.Change(position, head_);
    for (int64_t d = 0; d < key_dim_; ++d) {
      for (int64_t j = 0; j < value_dim_; ++j) {
        values_[static_cast<size_t>(d * value_dim_ + j)] += double{key[d]} * change[j];
      }
    }
  }
  // Element j of S^T x.
  template <typename T>
  double Seen(const T* x, int64_t j) const {
    double sum = 0;
    for (int64_t d = 0; d < key_dim_; ++d) {
      sum += x[d] * values_[static_cast<size_t>(d * value_dim_ + j)];
    }
    return sum;
  }
  void Store(float* to) const {
    for (const double value : values_) *to++ = static_cast<float>(value);
  }

 private:
  const StatePages& pages_;
  const int64_t head_;
  const int64_t key_dim_, value_dim_;
  std::vector<double> values_;  // [key_dim, value_dim]
};

}  // namespace

void ReferenceBackend::Convolve(Tensor x, const float* weight, const float* bias, bool silu,
                                const KvView& kv, Tensor out) {
  for (const SequenceSpan& span : kv.sequences) {
    const StatePages pages(kv, span);
    const int64_t taps = pages.layout().taps, channels = pages.layout().channels;
    const int64_t size = pages.page_size();
    for (int64_t i = 0; i < span.num_rows; ++i) {
      const int64_t position = span.first_position + i, slot = position % size;
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t t = 0; slot == 0 && t + 1 < taps; ++t) {
          pages.Input(position, t)[c] = position == 0 ? 0 : pages.Input(position - 1, size + t)[c];
        }
        pages.Input(position, slot + taps - 1)[c] = x.Row<float>(span.first_row + i)[c];
        double sum = bias == nullptr ? 0 : bias[c];
        for (int64_t t = 0; t < taps; ++t) {
          sum += double{weight[t * channels + c]} * pages.Input(position, slot + t)[c];
        }
        out.Row<float>(span.first_row + i)[c] =
            static_cast<float>(silu ? sum / (1 + std::exp(-sum)) : sum);
      }
    }
  }
}

void ReferenceBackend::GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                                  const float* biases, const float* skips, const KvView& kv,
                                  Tensor out) {
  for (const SequenceSpan& span : kv.sequences) {
    const StatePages pages(kv, span);
    const StateLayout& layout = pages.layout();
    const int64_t dim = layout.key_dim, size = pages.page_size();
    for (int64_t head = 0; head < layout.heads; ++head) {
      HeadState state(pages, head);
      for (int64_t i = 0; i < span.num_rows; ++i) {
        const int64_t row = span.first_row + i, position = span.first_position + i;
        const int64_t first = position - position % size;
        if (position == first) {
          if (position > 0) state.Load(first - size, first);
          state.Store(pages.State(position, head));
        }
        state.Load(first, position);
        const float* const q = qkv.Row<float>(row) + layout.KeyHeadOf(head) * dim;
        const float* const k = q + layout.key_heads * dim;
        const float* const v =
            qkv.Row<float>(row) + 2 * layout.key_heads * dim + head * layout.value_dim;
        const double x = double{decay.Row<float>(row)[head]} + biases[head];
        const double step = std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x)));
        const double g = -rates[head] * step;
        const bool delta = skips == nullptr;
        const double factor =
            delta ? 1 / (1 + std::exp(-double{beta.Row<float>(row)[head]})) : step;
        pages.Decay(position, head) = static_cast<float>(
            (position == first ? 0 : double{pages.Decay(position - 1, head)}) + g);
        state.Decay(g);
        float* const key = pages.Key(position, layout.KeyHeadOf(head));
        const double length = delta ? Length(k, dim) : 1;
        for (int64_t d = 0; d < dim; ++d) key[d] = static_cast<float>(k[d] / length);
        float* const change = pages.Change(position, head);
        for (int64_t j = 0; j < layout.value_dim; ++j) {
          change[j] = static_cast<float>(factor * (v[j] - (delta ? state.Seen(key, j) : 0)));
        }
        state.Add(position);
        const double scale = delta ? 1 / (Length(q, dim) * std::sqrt(static_cast<double>(dim))) : 1;
        float* const to = out.Row<float>(row) + head * layout.value_dim;
        for (int64_t j = 0; j < layout.value_dim; ++j) {
          to[j] = static_cast<float>(scale * state.Seen(q, j) + (delta ? 0 : skips[head] * v[j]));
        }
      }
    }
  }
}

}  // namespace treadle
