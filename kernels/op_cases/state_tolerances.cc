// Convolve and GatedDelta.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/tolerant_reference.h"
#include "kernels/reference/state_page.h"

namespace treadle {
namespace {

// How far one head's rows may be off: magnitudes of all that is summed, in a recurrence of its own,
// each row's times the root of the number of rows since the call began, whose errors are
// independent.
class DeltaErrors {
 public:
  // errors: of the cache.
  DeltaErrors(const StatePages& pages, const SequenceSpan& span, int64_t head, const KvView& kv,
              std::vector<float>& errors)
      : pages_(pages), span_(span), head_(head), kv_(kv), errors_(errors) {}

  // Row `i` of the span, which the reference has just computed, and the logarithm of its decay.
  // out: [value_dim].
  void AddRow(int64_t i, const float* q, const float* k, const float* v, double decay, float* out) {
    const StateLayout& layout = pages_.layout();
    const int64_t dim = layout.key_dim, values = layout.value_dim;
    const int64_t position = span_.first_position + i, size = pages_.page_size();
    if (state_.empty()) LoadStart(position);
    if (position % size == 0 && position > 0) {
      for (int64_t at = 0; at < dim * values; ++at) {
        Note(pages_.State(position, head_) + at, kFloatUnit * Units() * state_[at]);
      }
    }
    rows_ += 1;
    largest_decay_ = std::max<double>(largest_decay_, std::fabs(pages_.Decay(position, head_)));
    Note(&pages_.Decay(position, head_), kFloatUnit * (8 + static_cast<double>(size)) *
                                             (largest_decay_ + std::fabs(decay) + 1e-30));
    double length = 0, query = 0;
    for (int64_t d = 0; d < dim; ++d) {
      length += double{k[d]} * k[d];
      query += double{q[d]} * q[d];
    }
    length = std::sqrt(length + 1e-6);
    query = std::sqrt((query + 1e-6) * static_cast<double>(dim));
    const int64_t key_head = layout.KeyHeadOf(head_);
    for (int64_t d = 0; d < dim; ++d) {
      Note(pages_.Key(position, key_head) + d,
           kFloatUnit * (8 + std::sqrt(static_cast<double>(dim))) * std::fabs(k[d]) / length);
    }
    const double kept = std::exp(decay);
    for (double& magnitude : state_) magnitude *= kept;
    for (int64_t j = 0; j < values; ++j) {
      double known = std::fabs(v[j]);
      for (int64_t d = 0; d < dim; ++d) {
        known += std::fabs(k[d]) / length * state_[static_cast<size_t>(d * values + j)];
      }
      Note(pages_.Change(position, head_) + j, kFloatUnit * Units() * known);
      double seen = 0;
      for (int64_t d = 0; d < dim; ++d) {
        double& magnitude = state_[static_cast<size_t>(d * values + j)];
        magnitude += std::fabs(k[d]) / length * known;
        seen += std::fabs(q[d]) / query * magnitude;
      }
      out[j] = static_cast<float>(kFloatUnit * Units() * seen + 0x1p-126);
    }
  }

 private:
  // Sums over features and positions, exp of a difference of decays, and what earlier rows bring.
  double Units() const {
    const auto dim = static_cast<double>(pages_.layout().key_dim);
    const auto size = static_cast<double>(pages_.page_size());
    return (4 + std::sqrt(dim) / 2 + std::sqrt(size) / 2 + 2 * largest_decay_) * std::sqrt(rows_ + 1);
  }
  // Magnitudes of the state before a row.
  void LoadStart(int64_t position) {
    const StateLayout& layout = pages_.layout();
    const int64_t size = pages_.page_size();
    const int64_t begin = std::max<int64_t>(0, position - 1) / size * size;
    const float* first = pages_.State(begin, head_);
    state_.assign(static_cast<size_t>(layout.key_dim * layout.value_dim), 0);
    for (double& magnitude : state_) magnitude = std::fabs(*first++);
    for (int64_t p = begin; p < position; ++p) {
      largest_decay_ = std::max<double>(largest_decay_, std::fabs(pages_.Decay(p, head_)));
      for (size_t at = 0; at < state_.size(); ++at) {
        const auto d = static_cast<int64_t>(at) / layout.value_dim;
        const auto j = static_cast<int64_t>(at) % layout.value_dim;
        state_[at] +=
            std::fabs(pages_.Key(p, layout.KeyHeadOf(head_))[d] * pages_.Change(p, head_)[j]);
      }
    }
  }
  // The error of a float of the cache.
  void Note(const float* at, double error) {
    const auto bytes = reinterpret_cast<const std::byte*>(at) - kv_.pages;
    const int64_t page = bytes / kv_.layout.PageStride();
    const int64_t element = (bytes - page * kv_.layout.PageStride()) / int64_t{sizeof(float)};
    const int64_t floats = kv_.layout.state.Floats(kv_.layout.page_size);
    errors_[static_cast<size_t>(page * floats + element)] = static_cast<float>(error + 0x1p-126);
  }

  const StatePages& pages_;
  const SequenceSpan& span_;
  const int64_t head_;
  const KvView& kv_;
  std::vector<float>& errors_;
  std::vector<double> state_;  // [key_dim, value_dim]
  double rows_ = 0;
  double largest_decay_ = 0;
};

size_t FloatsOf(const KvLayout& layout) {
  return static_cast<size_t>(layout.num_pages * layout.state.Floats(layout.page_size));
}

}  // namespace

// Inputs are stored as they are. A sum of products by fma, then a dozen roundings of silu.
void TolerantReference::Convolve(Tensor x, const float* weight, const float* bias, bool silu,
                                 const KvView& kv, Tensor out) {
  below().Convolve(x, weight, bias, silu, kv, out);
  Begin();
  tolerances_.cache.resize(FloatsOf(kv.layout));
  float* const errors = Writes(out);
  for (const SequenceSpan& span : kv.sequences) {
    const StatePages pages(kv, span);
    const int64_t taps = pages.layout().taps;
    for (int64_t i = 0; i < span.num_rows; ++i) {
      const int64_t position = span.first_position + i, row = span.first_row + i;
      for (int64_t c = 0; c < out.cols; ++c) {
        double size = bias == nullptr ? 0 : std::fabs(bias[c]);
        for (int64_t t = 0; t < taps; ++t) {
          const float* const input = pages.Input(position, position % pages.page_size() + t);
          size += std::fabs(double{weight[t * out.cols + c]} * input[c]);
        }
        errors[row * out.cols + c] = static_cast<float>(
            kFloatUnit * (static_cast<double>(taps) + (silu ? 16 : 0)) * size + 0x1p-126);
      }
    }
  }
}

void TolerantReference::GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                                   const float* biases, const KvView& kv, Tensor out) {
  below().GatedDelta(qkv, decay, beta, rates, biases, kv, out);
  Begin();
  tolerances_.cache.resize(FloatsOf(kv.layout));
  float* const errors = Writes(out);
  const StateLayout& layout = kv.layout.state;
  for (const SequenceSpan& span : kv.sequences) {
    const StatePages pages(kv, span);
    for (int64_t head = 0; head < layout.heads; ++head) {
      DeltaErrors of_head(pages, span, head, kv, tolerances_.cache);
      for (int64_t i = 0; i < span.num_rows; ++i) {
        const int64_t position = span.first_position + i, row = span.first_row + i;
        const bool begins = position % pages.page_size() == 0;
        const float* const q = qkv.Row<float>(row) + layout.KeyHeadOf(head) * layout.key_dim;
        const float* const v =
            qkv.Row<float>(row) + 2 * layout.key_heads * layout.key_dim + head * layout.value_dim;
        const double own =
            pages.Decay(position, head) - (begins ? 0 : double{pages.Decay(position - 1, head)});
        of_head.AddRow(i, q, q + layout.key_heads * layout.key_dim, v, own,
                       errors + row * out.cols + head * layout.value_dim);
      }
    }
  }
}

}  // namespace treadle
