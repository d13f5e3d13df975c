// Convolve and GatedDelta.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/tolerant_reference.h"
#include "kernels/reference/state_page.h"

namespace treadle {
namespace {

// How far one head's rows may be off. What a row rounds is a part of the magnitudes that it sums;
// errors of a state's columns do not grow, because a change takes away what a key of length 1 sees
// or, in Mamba 2's form, nothing of the state; and those of different rows are independent.
class DeltaErrors {
 public:
  // errors: of the cache. delta: the gated delta rule, else Mamba 2's form.
  DeltaErrors(bool delta, const StatePages& pages, const SequenceSpan& span, int64_t head,
              const KvView& kv, std::vector<float>& errors)
      : delta_(delta),
        pages_(pages),
        span_(span),
        head_(head),
        kv_(kv),
        errors_(errors),
        squares_(static_cast<size_t>(pages.layout().value_dim)) {}

  // Row `i` of the span, which the reference has just computed; skip: of the head, in Mamba 2's
  // form. out: [value_dim].
  void AddRow(int64_t i, const float* q, const float* v, float skip, float* out) {
    const StateLayout& layout = pages_.layout();
    const int64_t dim = layout.key_dim, values = layout.value_dim;
    const int64_t position = span_.first_position + i;
    if (state_.empty()) LoadStart(position);
    if (position % pages_.page_size() == 0 && position > 0) {
      for (int64_t at = 0; at < dim * values; ++at) {
        Note(pages_.State(position, head_) + at,
             Unit() * sizes_[static_cast<size_t>(at)] + OfColumn(at % values));
      }
      BeginPage();
    }
    const double decay = DecayOf(position);
    largest_decay_ = std::max<double>(largest_decay_, std::fabs(pages_.Decay(position, head_)));
    Note(&pages_.Decay(position, head_), kFloatUnit * 16 * (largest_decay_ + std::fabs(decay)));
    const float* const key = pages_.Key(position, layout.KeyHeadOf(head_));
    double length = 1e-6, key_square = 0;  // squares
    for (int64_t d = 0; d < dim; ++d) {
      Note(key + d, kFloatUnit * (8 + std::sqrt(static_cast<double>(dim))) * std::fabs(key[d]));
      length += double{q[d]} * q[d];
      key_square += double{key[d]} * key[d];
    }
    const double query = delta_ ? std::sqrt(length * static_cast<double>(dim)) : 1;
    Decay(decay);
    for (int64_t j = 0; j < values; ++j) {
      double& square = squares_[static_cast<size_t>(j)];
      square *= std::exp(2 * decay);
      const float* const change = pages_.Change(position, head_) + j;
      const double own =
          Unit() * (delta_ ? std::fabs(v[j]) + Seen(key, j) : 2 * std::fabs(*change));
      Note(change, own + (delta_ ? OfColumn(j) : 0));
      square += own * own * (delta_ ? 1 : key_square);
      for (int64_t d = 0; d < dim; ++d) Add(d, j, double{key[d]} * *change);
      const double skipped = delta_ ? 0 : std::fabs(skip * v[j]);
      out[j] = static_cast<float>(Unit() * (Seen(q, j) + skipped) / query +
                                  OfColumn(j) * std::sqrt(length) / query + 0x1p-126);
    }
  }

 private:
  void Add(int64_t d, int64_t j, double term) {
    const auto at = static_cast<size_t>(d * pages_.layout().value_dim + j);
    state_[at] += term;
    sizes_[at] += std::fabs(term);
  }
  void Decay(double logarithm) {
    for (double& value : state_) value *= std::exp(logarithm);
    for (double& size : sizes_) size *= std::exp(logarithm);
  }
  // From here on, the sums begin with the state as it is.
  void BeginPage() {
    for (size_t at = 0; at < state_.size(); ++at) sizes_[at] = std::fabs(state_[at]);
  }
  // The sum of the magnitudes of x times those that make column j.
  double Seen(const float* x, int64_t j) const {
    double sum = 0;
    for (int64_t d = 0; d < pages_.layout().key_dim; ++d) {
      sum += std::fabs(x[d]) * sizes_[static_cast<size_t>(d * pages_.layout().value_dim + j)];
    }
    return sum;
  }
  // The error of column j of the state.
  double OfColumn(int64_t j) const { return 4 * std::sqrt(squares_[static_cast<size_t>(j)]); }
  // Roundings of sums over features and positions, and of exp of a difference of decays.
  double Unit() const {
    const auto terms = static_cast<double>(pages_.layout().key_dim + pages_.page_size());
    return kFloatUnit * (8 + std::sqrt(terms) + 4 * largest_decay_);
  }
  double DecayOf(int64_t position) const {
    const bool first = position % pages_.page_size() == 0;
    return pages_.Decay(position, head_) - (first ? 0 : double{pages_.Decay(position - 1, head_)});
  }
  // The state before a row.
  void LoadStart(int64_t position) {
    const StateLayout& layout = pages_.layout();
    const int64_t size = pages_.page_size();
    const int64_t begin = std::max<int64_t>(0, position - 1) / size * size;
    const float* const first = pages_.State(begin, head_);
    state_.assign(first, first + layout.key_dim * layout.value_dim);
    sizes_.resize(state_.size());
    BeginPage();
    for (int64_t p = begin; p < position; ++p) {
      largest_decay_ = std::max<double>(largest_decay_, std::fabs(pages_.Decay(p, head_)));
      Decay(DecayOf(p));
      const float* const key = pages_.Key(p, layout.KeyHeadOf(head_));
      for (int64_t d = 0; d < layout.key_dim; ++d) {
        for (int64_t j = 0; j < layout.value_dim; ++j) {
          Add(d, j, double{key[d]} * pages_.Change(p, head_)[j]);
        }
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

  const bool delta_;
  const StatePages& pages_;
  const SequenceSpan& span_;
  const int64_t head_;
  const KvView& kv_;
  std::vector<float>& errors_;
  std::vector<double> state_;    // [key_dim, value_dim]
  std::vector<double> sizes_;    // likewise: magnitudes of the terms of its page that make it
  std::vector<double> squares_;  // [value_dim]: of errors of columns, of their lengths
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
                                   const float* biases, const float* skips, const KvView& kv,
                                   Tensor out) {
  below().GatedDelta(qkv, decay, beta, rates, biases, skips, kv, out);
  Begin();
  tolerances_.cache.resize(FloatsOf(kv.layout));
  float* const errors = Writes(out);
  const StateLayout& layout = kv.layout.state;
  for (const SequenceSpan& span : kv.sequences) {
    const StatePages pages(kv, span);
    for (int64_t head = 0; head < layout.heads; ++head) {
      DeltaErrors of_head(skips == nullptr, pages, span, head, kv, tolerances_.cache);
      for (int64_t i = 0; i < span.num_rows; ++i) {
        const int64_t row = span.first_row + i;
        const float* const all = qkv.Row<float>(row);
        of_head.AddRow(i, all + layout.KeyHeadOf(head) * layout.key_dim,
                       all + 2 * layout.key_heads * layout.key_dim + head * layout.value_dim,
                       skips == nullptr ? 0 : skips[head],
                       errors + row * out.cols + head * layout.value_dim);
      }
    }
  }
}

}  // namespace treadle
