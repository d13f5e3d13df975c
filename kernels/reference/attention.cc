// Rotary embedding, the K/V cache, and causal attention as a two-pass softmax.
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "kernels/reference/sequence_cache.h"

namespace treadle {
namespace {

// Pairs (x[i], x[i + half_dim]) of one head turn by position * frequency[i].
void Rotate(float* head, const RotaryTable& table, int64_t position) {
  TREADLE_CHECK(position < table.max_positions);
  for (int64_t i = 0; i < table.half_dim; ++i) {
    const double cos = table.cos[position * table.half_dim + i];
    const double sin = table.sin[position * table.half_dim + i];
    const double first = head[i];
    const double second = head[i + table.half_dim];
    head[i] = static_cast<float>(first * cos - second * sin);
    head[i + table.half_dim] = static_cast<float>(second * cos + first * sin);
  }
}

// Over positions [first, first + count), of which the last is the query's own.
void AttendHead(const float* q, const SequenceCache& cache, int64_t kv_head, const KvLayout& layout,
                int64_t first, int64_t count, double scale, double slope, double sink, float* out) {
  std::vector<double> weight(static_cast<size_t>(count));
  double best = sink;
  for (int64_t p = 0; p < count; ++p) {
    double dot = 0;
    for (int64_t i = 0; i < layout.head_dim; ++i) {
      dot += double{q[i]} * cache.Key(first + p, kv_head, i);
    }
    weight[p] = dot * scale - slope * static_cast<double>(count - 1 - p);
    best = std::fmax(best, weight[p]);
  }
  double total = std::exp(sink - best);
  for (double& w : weight) total += w = std::exp(w - best);
  for (int64_t i = 0; i < layout.ValueDim(); ++i) {
    double sum = 0;
    for (int64_t p = 0; p < count; ++p) sum += weight[p] * cache.Value(first + p, kv_head, i);
    out[i] = static_cast<float>(sum / total);
  }
}

}  // namespace

void ReferenceBackend::RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                                        const KvView& kv) {
  const int64_t head_dim = kv.layout.head_dim;
  TREADLE_CHECK(k.cols == kv.layout.kv_heads * head_dim);
  TREADLE_CHECK(v.cols == k.cols || kv.layout.latent_dim > 0);
  TREADLE_CHECK(q.cols % head_dim == 0 && (!rotary || 2 * rotary->half_dim <= head_dim));
  for (const SequenceSpan& span : kv.sequences) {
    const SequenceCache cache(kv, span);
    for (int64_t i = 0; i < span.num_rows; ++i) {
      const int64_t row = span.first_row + i;
      const int64_t position = span.first_position + i;
      if (rotary != nullptr) {
        for (int64_t at = 0; at < q.cols; at += head_dim) {
          Rotate(q.Row<float>(row) + at, *rotary, position);
        }
        for (int64_t at = 0; at < k.cols; at += head_dim) {
          Rotate(k.Row<float>(row) + at, *rotary, position);
        }
      }
      std::vector<float> keys(k.Row<float>(row), k.Row<float>(row) + k.cols);
      std::vector<float> values = keys;
      if (kv.layout.latent_dim == 0) values.assign(v.Row<float>(row), v.Row<float>(row) + v.cols);
      for (std::vector<float>* part : {&keys, &values}) {
        if (compute_ != ComputeMode::kBf16 || kv.layout.dtype == DType::kI8) break;
        for (float& x : *part) x = KvBf16(kv.layout.dtype, x);
      }
      for (int64_t head = 0; head < kv.layout.kv_heads; ++head) {
        cache.Store(position, head, keys.data() + head * head_dim, values.data() + head * head_dim);
      }
    }
  }
}

void ReferenceBackend::Attention(Tensor q, const KvView& kv, float scale, Tensor out) {
  const int64_t head_dim = kv.layout.head_dim;
  const int64_t heads = q.cols / head_dim;
  const int64_t queries_per_head = heads / kv.layout.kv_heads;
  const int64_t value_dim = kv.layout.ValueDim();
  TREADLE_CHECK(heads * head_dim == q.cols && out.cols == heads * value_dim);
  TREADLE_CHECK(out.rows == q.rows);
  TREADLE_CHECK(queries_per_head * kv.layout.kv_heads == heads);
  for (const SequenceSpan& span : kv.sequences) {
    const SequenceCache cache(kv, span);
    for (int64_t i = 0; i < span.num_rows; ++i) {
      const int64_t row = span.first_row + i;
      const int64_t position = span.first_position + i, first = kv.FirstSeen(position);
      for (int64_t head = 0; head < heads; ++head) {
        AttendHead(q.Row<float>(row) + head * head_dim, cache, head / queries_per_head, kv.layout,
                   first, position + 1 - first, scale, kv.slopes == nullptr ? 0 : kv.slopes[head],
                   kv.sinks == nullptr ? -INFINITY : kv.sinks[head],
                   out.Row<float>(row) + head * value_dim);
      }
    }
  }
}

}  // namespace treadle
