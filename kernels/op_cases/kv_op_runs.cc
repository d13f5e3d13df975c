// Ops on the K/V cache.
#include <algorithm>
#include <cmath>

#include "kernels/op_cases/guarded_tensor.h"
#include "kernels/op_cases/kv_case_cache.h"
#include "kernels/op_cases/op_runs.h"
#include "kernels/op_cases/random.h"

namespace treadle::op_runs {
namespace {

// What the two ops on sequences share.
class KvRun : public OpRun {
 public:
  KvRun(const OpCase& c, Backend& backend, uint64_t seed, bool fill_chunk)
      : case_(c),
        backend_(backend),
        random_(seed),
        cache_(c, backend, random_, fill_chunk),
        q_(backend, c.rows, c.heads * c.kv.head_dim) {
    q_.Fill([&] { return random_.Normal(); });
  }
  int64_t rows() const override { return case_.rows; }

 protected:
  // The part of the batch in rows [begin, begin + count), rows counted from `begin`.
  KvView View(int64_t begin, int64_t count) {
    spans_.clear();
    int64_t row = 0;
    for (size_t s = 0; s < case_.sequences.size(); ++s) {
      const CaseSequence& sequence = case_.sequences[s];
      const int64_t first = std::max(row, begin);
      const int64_t end = std::min(row + sequence.rows, begin + count);
      if (sequence.live && first < end) {
        spans_.push_back(
            {.first_row = static_cast<int32_t>(first - begin),
             .num_rows = static_cast<int32_t>(end - first),
             .first_position = static_cast<int32_t>(sequence.first_position + first - row),
             .pages = cache_.PagesOf(s)});
      }
      row += sequence.rows;
    }
    return {.layout = cache_.layout(), .pages = cache_.pages(), .sequences = spans_};
  }
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
  int64_t heads_per_kv_head() const { return case_.heads / case_.kv.kv_heads; }

  const OpCase case_;
  Backend& backend_;
  Random random_;
  KvCaseCache cache_;
  GuardedTensor q_;
  std::vector<SequenceSpan> spans_;
};

class RotateAndStore final : public KvRun {
 public:
  RotateAndStore(const OpCase& c, Backend& backend, uint64_t seed)
      : KvRun(c, backend, seed, /*fill_chunk=*/false),
        k_(backend, c.rows, c.kv.kv_heads * c.kv.head_dim),
        v_(backend, c.rows, c.kv.kv_heads * c.kv.head_dim) {
    k_.Fill([&] { return random_.Normal(); });
    // Some values that f16 cannot hold or holds as subnormals.
    v_.Fill([&] {
      const float scale = random_.Below(50) == 0 ? 1e5f : random_.Below(50) == 0 ? 1e-6f : 1.0f;
      return scale * random_.Normal();
    });
    MakeTable();
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    const RotaryTable table = {.cos = cos_->view().Row<float>(0),
                               .sin = sin_->view().Row<float>(0),
                               .half_dim = case_.rotary_dims / 2,
                               .max_positions = positions_};
    backend_.RotateAndStoreKv(q_.view().Rows(begin, count), k_.view().Rows(begin, count),
                              v_.view().Rows(begin, count),
                              case_.rotary_dims > 0 ? &table : nullptr, View(begin, count));
  }
  void Reset() override {
    cache_.Upload();
    q_.Upload();
    k_.Upload();
    v_.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    q_.Append(out);
    cache_.Append(out);
    return out;
  }
  // Two products and a sum per rotated element; in the cache a 16-bit number may then round the
  // other way, to a neighbour.
  std::vector<float> Tolerance(const Arithmetic&) const override {
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
      for (int64_t i = 0; i < k_.cols(); ++i) {
        const double size = Turned(k_, row, i, position);
        const int64_t element =
            cache_.OutputKey(i / layout.head_dim, position % layout.page_size, i % layout.head_dim);
        const double neighbour = size > 0 ? 2 * RoundingError(size, layout.dtype) : 0;
        cache[page * 2 * layout.PartElements() + element] =
            static_cast<float>(neighbour > 0 ? neighbour : 3 * kFloatUnit * size);
      }
    });
    return tolerance;
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(q_.CheckGuards("q", false));
    TREADLE_RETURN_IF_ERROR(k_.CheckGuards("k", false));
    TREADLE_RETURN_IF_ERROR(v_.CheckGuards("v", true));
    return cache_.CheckGuards(false);
  }
  double bytes() const override {
    const double cache = static_cast<double>(2 * case_.rows * k_.cols()) *
                         static_cast<double>(SizeOf(case_.kv.dtype));
    return 4.0 * static_cast<double>(case_.rows * (2 * q_.cols() + 2 * k_.cols())) + cache;
  }
  double operations() const override {
    return 3.0 * static_cast<double>(case_.rows * (q_.cols() + k_.cols()));
  }

 private:
  void MakeTable() {
    for (const CaseSequence& sequence : case_.sequences) {
      positions_ = std::max(positions_, LiveEnd(sequence));
    }
    const int64_t half = std::max<int64_t>(case_.rotary_dims / 2, 1);
    // One long row each: the op sees a plain array.
    cos_ = std::make_unique<GuardedTensor>(backend_, 1, positions_ * half);
    sin_ = std::make_unique<GuardedTensor>(backend_, 1, positions_ * half);
    for (int64_t p = 0; p < positions_; ++p) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(p) * std::pow(1e4, -static_cast<double>(i) / half);
        cos_->Row(0)[p * half + i] = static_cast<float>(std::cos(angle));
        sin_->Row(0)[p * half + i] = static_cast<float>(std::sin(angle));
      }
    }
    cos_->Upload();
    sin_->Upload();
  }
  // |x cos| + |partner sin| of column i; 0 where nothing is computed.
  double Turned(const GuardedTensor& x, int64_t row, int64_t i, int64_t position) const {
    const int64_t half = case_.rotary_dims / 2;
    const int64_t at = i % case_.kv.head_dim;
    if (at >= 2 * half) return 0;
    const int64_t partner = at < half ? i + half : i - half;
    const int64_t angle = position * half + at % half;
    return std::fabs(double{x.Row(row)[i]} * cos_->Row(0)[angle]) +
           std::fabs(double{x.Row(row)[partner]} * sin_->Row(0)[angle]);
  }

  GuardedTensor k_, v_;
  std::unique_ptr<GuardedTensor> cos_, sin_;
  int64_t positions_ = 1;
};

class Attend final : public KvRun {
 public:
  Attend(const OpCase& c, Backend& backend, uint64_t seed)
      : KvRun(c, backend, seed, /*fill_chunk=*/true),
        scale_(1 / std::sqrt(static_cast<float>(c.kv.head_dim))),
        out_(backend, c.rows, c.heads * c.kv.head_dim,
             OutputType(c, backend, c.heads * c.kv.head_dim)) {
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    backend_.Attention(q_.view().Rows(begin, count), View(begin, count), scale_,
                       out_.view().Rows(begin, count));
  }
  void Reset() override {
    cache_.Upload();
    q_.Upload();
    out_.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    out_.Append(out);
    return out;
  }
  // An error e in the scores moves every weight by a factor of at most 1 +- 2e; sums add their own.
  std::vector<float> Tolerance(const Arithmetic& arithmetic) const override {
    const DType rounds = arithmetic.attention_in_cache_type ? case_.kv.dtype : DType::kF32;
    std::vector<float> tolerance(static_cast<size_t>(out_.rows() * out_.cols()), 0.0f);
    ForEachRow([&](size_t s, int64_t row, int64_t position) {
      for (int64_t head = 0; head < case_.heads; ++head) {
        HeadTolerance(s, row, head, position + 1, rounds,
                      tolerance.data() + row * out_.cols() + head * case_.kv.head_dim);
      }
    });
    return tolerance;
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(q_.CheckGuards("q", true));
    TREADLE_RETURN_IF_ERROR(out_.CheckGuards("out", false));
    return cache_.CheckGuards(true);
  }
  double bytes() const override {
    double slots = 0;
    for (const CaseSequence& sequence : case_.sequences) {
      slots += static_cast<double>(LiveEnd(sequence));
    }
    return slots * static_cast<double>(2 * case_.kv.kv_heads * case_.kv.head_dim) *
               static_cast<double>(SizeOf(case_.kv.dtype)) +
           static_cast<double>(sizeof(float) + SizeOf(out_.dtype())) *
               static_cast<double>(case_.rows * q_.cols());
  }
  double operations() const override {
    double pairs = 0;
    ForEachRow([&](size_t, int64_t, int64_t p) { pairs += static_cast<double>(p + 1); });
    return 4.0 * pairs * static_cast<double>(q_.cols());
  }

 private:
  // rounds: the type that the query and the weights are rounded to; kF32: they are not.
  void HeadTolerance(size_t s, int64_t row, int64_t head, int64_t positions, DType rounds,
                     float* out) const {
    const int64_t head_dim = case_.kv.head_dim;
    const int64_t kv_head = head / heads_per_kv_head();
    const float* q = q_.Row(row) + head * head_dim;
    std::vector<double> weight(static_cast<size_t>(positions));
    std::vector<double> score_squares(weight.size());  // of what rounding q may add, independently
    double best = -INFINITY;
    double magnitude = 0;
    for (int64_t p = 0; p < positions; ++p) {
      double size = 0;
      for (int64_t i = 0; i < head_dim; ++i) {
        const double key = cache_.Key(s, p, kv_head, i);
        weight[p] += scale_ * q[i] * key;
        size += std::fabs(scale_ * q[i] * key);
        const double error = scale_ * RoundingError(std::fabs(q[i]), rounds) * key;
        score_squares[p] += error * error;
      }
      best = std::max(best, weight[p]);
      magnitude = std::max(magnitude, size);
    }
    double total = 0;
    for (double& w : weight) total += w = std::exp(w - best);
    const double score_unit = 2 * (4 + std::sqrt(static_cast<double>(head_dim))) * magnitude;
    const double sum_unit = 16 + std::sqrt(static_cast<double>(positions));
    for (int64_t i = 0; i < head_dim; ++i) {
      double size = 0;
      double sum = 0;
      for (int64_t p = 0; p < positions; ++p) {
        const double value = cache_.Value(s, p, kv_head, i);
        size += weight[p] * std::fabs(value);
        sum += weight[p] * value;
      }
      double tolerance = kFloatUnit * (score_unit + sum_unit) * size / total;
      if (rounds != DType::kF32) {
        // An error d of a weight moves the result by d (value - result) / total. Keys and values of
        // these cases are random, so the weights' errors are independent.
        double squares = 0;
        for (int64_t p = 0; p < positions; ++p) {
          const double distance = cache_.Value(s, p, kv_head, i) - sum / total;
          const double rounding = RoundingError(weight[p], rounds);
          squares += distance * distance *
                     (weight[p] * weight[p] * score_squares[p] + rounding * rounding);
        }
        tolerance += kSurely * std::sqrt(squares) / total;
      }
      out[i] = static_cast<float>(tolerance);
    }
  }

  const float scale_;
  GuardedTensor out_;
};

class CopyPages final : public OpRun {
 public:
  CopyPages(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c), backend_(backend), random_(seed), cache_(c, backend, random_, true) {
    const int64_t pages = cache_.layout().num_pages;
    for (int64_t i = 0; i < c.rows; ++i) {  // in order: a copy may read what an earlier one wrote
      const int64_t from = random_.Below(pages);
      const int64_t to = (from + 1 + random_.Below(pages - 1)) % pages;
      copies_.push_back({static_cast<int32_t>(from), static_cast<int32_t>(to)});
    }
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    backend_.CopyPages(cache_.layout(), cache_.pages(), std::span(copies_).subspan(begin, count));
  }
  void Reset() override { cache_.Upload(); }
  std::vector<float> Output() const override {
    std::vector<float> out;
    cache_.Append(out);
    return out;
  }
  std::vector<float> Tolerance(const Arithmetic&) const override {
    return std::vector<float>(
        static_cast<size_t>(cache_.layout().num_pages * 2 * cache_.layout().PartElements()), 0.0f);
  }
  absl::Status CheckGuards() const override { return cache_.CheckGuards(false); }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override {
    return 2.0 * static_cast<double>(case_.rows * cache_.layout().PageBytes());
  }
  double operations() const override { return 0; }

 private:
  const OpCase case_;
  Backend& backend_;
  Random random_;
  KvCaseCache cache_;
  std::vector<PageCopy> copies_;
};

}  // namespace

std::unique_ptr<OpRun> MakeRotateAndStoreKv(const OpCase& op_case, Backend& backend,
                                            uint64_t seed) {
  return std::make_unique<RotateAndStore>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeAttention(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Attend>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeCopyPages(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<CopyPages>(op_case, backend, seed);
}

}  // namespace treadle::op_runs
