// RotateAndStoreKv and Attention.
#include <algorithm>
#include <cmath>

#include "tests/kernels/op_tolerances.h"

namespace treadle {
namespace {

class KvTolerances {
 public:
  explicit KvTolerances(const OpRun& run)
      : run_(run), case_(run.op_case()), cache_(*run.cache), q_(run.tensor("q")) {}

  // Two products and a sum per rotated element; in the cache a 16-bit number may then round the
  // other way, to a neighbour.
  std::vector<float> Rotation() const {
    const GuardedTensor& k = run_.tensor("k");
    const KvLayout& layout = cache_.layout();
    const auto q_elements = static_cast<size_t>(q_.rows() * q_.cols());
    const auto cache_elements = static_cast<size_t>(layout.num_pages * 2 * layout.PartElements());
    std::vector<float> tolerance(q_elements + cache_elements, 0.0f);
    float* cache = tolerance.data() + q_elements;
    ForEachRow([&](size_t s, int64_t row, int64_t position) {
      for (int64_t i = 0; i < q_.cols(); ++i) {
        tolerance[row * q_.cols() + i] =
            static_cast<float>(3 * kFloatUnit * Turned(q_, row, i, position));
      }
      const int64_t page = cache_.PagesOf(s)[position / layout.page_size];
      for (int64_t i = 0; i < k.cols(); ++i) {
        const double size = Turned(k, row, i, position);
        const int64_t element = OutputKey(layout, i / layout.head_dim, position % layout.page_size,
                                          i % layout.head_dim);
        const double neighbour = size > 0 ? 2 * RoundingError(size, layout.dtype) : 0;
        cache[page * 2 * layout.PartElements() + element] =
            static_cast<float>(neighbour > 0 ? neighbour : 3 * kFloatUnit * size);
      }
    });
    return tolerance;
  }

  // An error e in the scores moves every weight by a factor of at most 1 +- 2e; sums add their own.
  std::vector<float> Attention(const Arithmetic& arithmetic) const {
    const DType rounds = arithmetic.attention_in_cache_type ? case_.kv.dtype : DType::kF32;
    std::vector<float> tolerance(static_cast<size_t>(q_.rows() * q_.cols()), 0.0f);
    ForEachRow([&](size_t s, int64_t row, int64_t position) {
      for (int64_t head = 0; head < case_.heads; ++head) {
        HeadTolerance(s, row, head, position, rounds,
                      tolerance.data() + row * q_.cols() + head * case_.kv.head_dim);
      }
    });
    return tolerance;
  }

 private:
  // body(sequence, row, position) for every live row.
  template <typename Body>
  void ForEachRow(Body body) const {
    int64_t row = 0;
    for (size_t s = 0; s < case_.sequences.size(); ++s) {
      const CaseSequence& sequence = case_.sequences[s];
      for (int64_t i = 0; i < sequence.rows; ++i, ++row) {
        if (sequence.live) body(s, row, sequence.first_position + i);
      }
    }
  }

  // |x cos| + |partner sin| of column i; 0 where nothing is computed.
  double Turned(const GuardedTensor& x, int64_t row, int64_t i, int64_t position) const {
    const int64_t half = case_.rotary_dims / 2;
    const int64_t at = i % case_.kv.head_dim;
    if (at >= 2 * half) return 0;
    const int64_t partner = at < half ? i + half : i - half;
    const int64_t angle = position * half + at % half;
    return std::fabs(double{x.Row(row)[i]} * run_.tensor("cos").Row(0)[angle]) +
           std::fabs(double{x.Row(row)[partner]} * run_.tensor("sin").Row(0)[angle]);
  }

  // rounds: the type that the query and the weights are rounded to; kF32: they are not.
  void HeadTolerance(size_t s, int64_t row, int64_t head, int64_t position, DType rounds,
                     float* out) const {
    const int64_t first = case_.window > 0 ? std::max<int64_t>(0, position - case_.window + 1) : 0;
    const int64_t positions = position + 1 - first;
    const int64_t head_dim = case_.kv.head_dim;
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    const int64_t kv_head = head / (case_.heads / case_.kv.kv_heads);
    const float* q = q_.Row(row) + head * head_dim;
    std::vector<double> weight(static_cast<size_t>(positions));
    std::vector<double> score_squares(weight.size());  // of what rounding q may add, independently
    const double sink = case_.sunk ? run_.tensor("sinks").Row(0)[head] : -INFINITY;
    double best = sink;
    double magnitude = 0;
    for (int64_t p = 0; p < positions; ++p) {
      double size = 0;
      for (int64_t i = 0; i < head_dim; ++i) {
        const double key = cache_.Key(s, first + p, kv_head, i);
        weight[p] += scale * q[i] * key;
        size += std::fabs(scale * q[i] * key);
        const double error = scale * RoundingError(std::fabs(q[i]), rounds) * key;
        score_squares[p] += error * error;
      }
      if (case_.sloped) {
        const double fall =
            run_.tensor("slopes").Row(0)[head] * static_cast<double>(positions - 1 - p);
        weight[p] -= fall;
        size += fall;
      }
      best = std::max(best, weight[p]);
      magnitude = std::max(magnitude, size);
    }
    double total = std::exp(sink - best);
    for (double& w : weight) total += w = std::exp(w - best);
    const double score_unit = 2 * (4 + std::sqrt(static_cast<double>(head_dim))) * magnitude;
    const double sum_unit = 16 + std::sqrt(static_cast<double>(positions));
    for (int64_t i = 0; i < head_dim; ++i) {
      double size = 0;
      double sum = 0;
      for (int64_t p = 0; p < positions; ++p) {
        const double value = cache_.Value(s, first + p, kv_head, i);
        size += weight[p] * std::fabs(value);
        sum += weight[p] * value;
      }
      double tolerance = kFloatUnit * (score_unit + sum_unit) * size / total;
      if (rounds != DType::kF32) {
        // An error d of a weight moves the result by d (value - result) / total. Keys and values of
        // these cases are random, so the weights' errors are independent.
        double squares = 0;
        for (int64_t p = 0; p < positions; ++p) {
          const double distance = cache_.Value(s, first + p, kv_head, i) - sum / total;
          const double rounding = RoundingError(weight[p], rounds);
          squares += distance * distance *
                     (weight[p] * weight[p] * score_squares[p] + rounding * rounding);
        }
        tolerance += kSurely * std::sqrt(squares) / total;
      }
      out[i] = static_cast<float>(tolerance);
    }
  }

  const OpRun& run_;
  const OpCase& case_;
  const KvCaseCache& cache_;
  const GuardedTensor& q_;
};

}  // namespace

int64_t OutputKey(const KvLayout& layout, int64_t head, int64_t slot, int64_t i) {
  KvLayout order = layout;
  order.key_order = KeyOrder::kByFeature;
  return order.KeyElement(head, slot, i);
}

std::vector<float> RotationTolerance(const OpRun& run, const Arithmetic&) {
  return KvTolerances(run).Rotation();
}
std::vector<float> AttentionTolerance(const OpRun& run, const Arithmetic& arithmetic) {
  return KvTolerances(run).Attention(arithmetic);
}

}  // namespace treadle
