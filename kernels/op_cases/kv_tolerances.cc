// RotateAndStoreKv, Attention and CopyPages.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/tolerant_reference.h"
#include "kernels/reference/sequence_cache.h"

namespace treadle {
namespace {

// |x cos| + |partner sin| of a row's column i; 0 where nothing is computed.
double Turned(const float* x, int64_t i, int64_t position, int64_t head_dim,
              const RotaryTable* rotary) {
  const int64_t half = rotary == nullptr ? 0 : rotary->half_dim;
  const int64_t at = i % head_dim;
  if (at >= 2 * half) return 0;
  const int64_t partner = at < half ? i + half : i - half;
  const int64_t angle = position * half + at % half;
  return std::fabs(double{x[i]} * rotary->cos[angle]) +
         std::fabs(double{x[partner]} * rotary->sin[angle]);
}

// Rounding to codes errs evenly within half a step, and such errors add up as smaller bounds
// (kSurely) do: the root of a third, as theirs is the variance.
const double kOfHalfSteps = std::sqrt(1.0 / 3);

// One head of one query. An error e in the scores moves every weight by a factor of at most 1 +-
// 2e; sums add their own.
class HeadError {
 public:
  // q: [head_dim]; slope, sink: 0 and -infinity where there are none. rounds: the type that the
  // query and the softmax's weights are rounded to, kI8: to codes (KvLayout); kF32: they are not.
  struct Head {
    const float* q;
    const SequenceCache& cache;
    int64_t kv_head;
    int64_t head_dim;
    int64_t first;  // position
    int64_t positions;
    double scale, slope, sink;
    DType rounds;
    bool sums_rounded = true;  // the softmax's sum is one of rounded weights
  };
  explicit HeadError(const Head& head)
      : head_(head), weight_(static_cast<size_t>(head.positions)), score_squares_(weight_.size()) {
    for (int64_t i = 0; i < head_.head_dim; ++i) {
      query_size_ = std::max(query_size_, std::fabs(double{head_.q[i]}));
    }
    for (int64_t p = 0; p < head_.positions; ++p) AddScore(p);
    double best = head_.sink;
    for (const double score : weight_) best = std::max(best, score);
    total_ = std::exp(head_.sink - best);
    for (double& weight : weight_) total_ += weight = std::exp(weight - best);
    if (head_.rounds == DType::kI8) SetCodeErrors();
  }

  // The tolerance of element i of the result.
  float Of(int64_t i) const {
    double size = 0;
    double sum = 0;
    for (int64_t p = 0; p < head_.positions; ++p) {
      const double value = head_.cache.Value(head_.first + p, head_.kv_head, i);
      size += weight_[p] * std::fabs(value);
      sum += weight_[p] * value;
    }
    const double score_unit =
        2 * (4 + std::sqrt(static_cast<double>(head_.head_dim))) * largest_score_;
    const double sum_unit = 16 + std::sqrt(static_cast<double>(head_.positions));
    double error = kFloatUnit * (score_unit + sum_unit) * size / total_;
    if (head_.rounds != DType::kF32) error += OfRounding(i, sum / total_);
    return static_cast<float>(error);
  }

 private:
  void AddScore(int64_t p) {
    double size = 0;
    for (int64_t i = 0; i < head_.head_dim; ++i) {
      const double key = head_.cache.Key(head_.first + p, head_.kv_head, i);
      const double term = head_.scale * head_.q[i] * key;
      weight_[p] += term;
      size += std::fabs(term);
      const double rounding = head_.rounds == DType::kI8
                                  ? kOfHalfSteps * query_size_ / 16256 / 2
                                  : RoundingError(std::fabs(head_.q[i]), head_.rounds);
      const double error = head_.scale * rounding * key;
      score_squares_[p] += error * error;
    }
    const double fall = head_.slope * static_cast<double>(head_.positions - 1 - p);
    weight_[p] -= fall;
    largest_score_ = std::max(largest_score_, size + fall);
  }

  // Sets what rounding each position's weight may add: half a step of its block's largest weight
  // times V's scale, which is at least a 127th of V's largest element, times a code of at most 127.
  void SetCodeErrors() {
    code_errors_.resize(weight_.size());
    for (int64_t begin = 0; begin < head_.positions;) {
      const int64_t block = (head_.first + begin) / kAttentionBlock;
      const int64_t end = std::min(head_.positions, (block + 1) * kAttentionBlock - head_.first);
      double largest = 0;
      for (int64_t p = begin; p < end; ++p) {
        for (int64_t i = 0; i < head_.head_dim; ++i) {
          const double value = head_.cache.Value(head_.first + p, head_.kv_head, i);
          largest = std::max(largest, weight_[p] * std::fabs(value));
        }
      }
      constexpr double kScaleRounding = 129.0 / 128;  // upwards, to a bfloat16
      const double half_step = largest * kScaleRounding / 32767 / 2;
      for (; begin < end; ++begin) code_errors_[begin] = kOfHalfSteps * half_step;
    }
  }

  // An error d of a weight moves the result by d (value - result) / total. Keys and values of these
  // cases are random, so the weights' errors are independent.
  double OfRounding(int64_t i, double result) const {
    double squares = 0;
    for (int64_t p = 0; p < head_.positions; ++p) {
      const double distance = head_.cache.Value(head_.first + p, head_.kv_head, i) - result;
      const double moved = head_.sums_rounded ? distance : distance + result;
      const double rounding =
          code_errors_.empty() ? moved * RoundingError(weight_[p], head_.rounds) : code_errors_[p];
      squares +=
          distance * distance * weight_[p] * weight_[p] * score_squares_[p] + rounding * rounding;
    }
    return kSurely * std::sqrt(squares) / total_;
  }

  const Head head_;
  double query_size_ = 0;              // the largest magnitude of q
  std::vector<double> weight_;         // [positions]; in the constructor, scores at first
  std::vector<double> code_errors_;    // [positions] of codes, else empty
  std::vector<double> score_squares_;  // of what rounding q may add, independently
  double largest_score_ = 0;           // of magnitudes
  double total_ = 0;
};

// How far elements of a row of kI8 may be from the codes of `values` if each value may be off by
// its error: where code or scale may round the other way. errors: [KeyByFeature(element)];
// replaced.
void ToCodeErrors(const KvLayout& layout, const float* values, int64_t head, int64_t slot,
                  float* errors) {
  float largest = 0, error = 0;
  for (int64_t i = 0; i < layout.head_dim; ++i) {
    largest = std::max(largest, std::fabs(values[i]));
    error = std::max(error, errors[KeyByFeature(layout, head, slot, i)]);
  }
  const double is = ToFloat(KvScale(largest));
  for (int64_t i = 0; i < layout.head_dim; ++i) {
    float& most = errors[KeyByFeature(layout, head, slot, i)];
    const double code = std::nearbyint(values[i] / is);
    double farthest = 0;
    for (const double scale :
         {ToFloat(KvScale(largest - error)), ToFloat(KvScale(largest + error))}) {
      for (const double value : {double{values[i]} - most, double{values[i]} + most}) {
        farthest = std::max(farthest, std::fabs(std::nearbyint(value / scale) * scale - code * is));
      }
    }
    most = static_cast<float>(farthest);
  }
}

}  // namespace

// Two products and a sum per rotated element; in the cache a 16-bit number, or a code, may then
// round the other way, to a neighbour.
void TolerantReference::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                                         const KvView& kv) {
  Begin();
  float* const turned = Writes(q, "q");
  const KvLayout& layout = kv.layout;
  tolerances_.cache.resize(
      static_cast<size_t>(layout.num_pages * layout.Parts() * layout.PartElements()));
  for (const SequenceSpan& span : kv.sequences) {
    for (int32_t r = 0; r < span.num_rows; ++r) {
      const int64_t row = span.first_row + r;
      const int64_t position = span.first_position + r;
      for (int64_t i = 0; i < q.cols; ++i) {
        const double size = Turned(q.Row<float>(row), i, position, layout.head_dim, rotary);
        turned[row * q.cols + i] = static_cast<float>(3 * kFloatUnit * size);
      }
      const int64_t page = span.pages[position / layout.page_size];
      float* const stored =
          tolerances_.cache.data() + page * layout.Parts() * layout.PartElements();
      for (int64_t i = 0; i < k.cols; ++i) {
        const double size = Turned(k.Row<float>(row), i, position, layout.head_dim, rotary);
        const bool bf16 = arithmetic_.compute == ComputeMode::kBf16 && layout.dtype != DType::kI8;
        const DType stored_as = bf16 ? DType::kBF16 : layout.dtype;
        const double neighbour = size > 0 ? 2 * RoundingError(size, stored_as) : 0;
        stored[KeyByFeature(layout, i / layout.head_dim, position % layout.page_size,
                            i % layout.head_dim)] =
            static_cast<float>(neighbour > 0 ? neighbour : 3 * kFloatUnit * size);
      }
    }
  }
  below().RotateAndStoreKv(q, k, v, rotary, kv);  // k is now what was stored, before rounding
  if (layout.dtype != DType::kI8) return;
  for (const SequenceSpan& span : kv.sequences) {
    for (int32_t r = 0; r < span.num_rows; ++r) {
      const int64_t position = span.first_position + r;
      const int64_t page = span.pages[position / layout.page_size];
      for (int64_t head = 0; head < layout.kv_heads; ++head) {
        ToCodeErrors(layout, k.Row<float>(span.first_row + r) + head * layout.head_dim, head,
                     position % layout.page_size,
                     tolerances_.cache.data() + page * layout.Parts() * layout.PartElements());
      }
    }
  }
}

void TolerantReference::Attention(Tensor q, const KvView& kv, float scale, Tensor out) {
  Begin();
  float* const errors = Writes(out);
  const int64_t head_dim = kv.layout.head_dim;
  const int64_t heads = q.cols / head_dim, value_dim = kv.layout.ValueDim();
  const bool codes = kv.layout.dtype == DType::kI8 && kv.layout.latent_dim == 0;
  const bool bf16 = arithmetic_.compute == ComputeMode::kBf16 && !codes;
  const DType rounds = bf16                                           ? DType::kBF16
                       : codes || arithmetic_.attention_in_cache_type ? kv.layout.dtype
                                                                      : DType::kF32;
  for (const SequenceSpan& span : kv.sequences) {
    const SequenceCache cache(kv, span);
    for (int32_t r = 0; r < span.num_rows; ++r) {
      const int64_t row = span.first_row + r;
      const int64_t position = span.first_position + r, first = kv.FirstSeen(position);
      for (int64_t head = 0; head < heads; ++head) {
        const HeadError error({.q = q.Row<float>(row) + head * head_dim,
                               .cache = cache,
                               .kv_head = head / (heads / kv.layout.kv_heads),
                               .head_dim = head_dim,
                               .first = first,
                               .positions = position + 1 - first,
                               .scale = scale,
                               .slope = kv.slopes == nullptr ? 0 : kv.slopes[head],
                               .sink = kv.sinks == nullptr ? -INFINITY : kv.sinks[head],
                               .rounds = rounds,
                               .sums_rounded = !bf16});
        for (int64_t i = 0; i < value_dim; ++i) {
          errors[row * out.cols + head * value_dim + i] = error.Of(i);
        }
      }
    }
  }
  below().Attention(q, kv, scale, out);
}

void TolerantReference::CopyPages(const KvLayout& layout, std::byte* pages,
                                  std::span<const PageCopy> copies) {
  Begin();
  const int64_t elements = layout.state.present() ? layout.state.Floats(layout.page_size)
                                                  : layout.Parts() * layout.PartElements();
  tolerances_.cache.resize(static_cast<size_t>(layout.num_pages * elements));
  below().CopyPages(layout, pages, copies);
}

}  // namespace treadle
