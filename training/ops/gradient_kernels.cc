// Compiled once per instruction set. Reductions have 16 partial sums, combined in one order.
#include "training/ops/gradient_kernels.h"

#include "kernels/cpu/vector_math.h"
#include "training/ops/product_kernel.h"

namespace treadle::TREADLE_ISA {
namespace {

// 1 / (1 + exp(-t))
TREADLE_SIMD Vec Sigmoid(Vec t) { return TimesSigmoid(Broadcast(1.0f), t); }

// dgate += dout * up * slope, dup += dout * value, for (value, slope) of the gate.
template <typename Gate>
TREADLE_SIMD void GatedRow(const float* gate, const float* up, const float* dout, float* dgate,
                           float* dup, int64_t cols, Gate of) {
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    const Vec d = LoadLanes(dout + i, lanes);
    Vec value, slope;
    of(LoadLanes(gate + i, lanes), value, slope);
    const Vec into_gate = Mul(d, LoadLanes(up + i, lanes));
    StoreLanes(dgate + i, Fma(into_gate, slope, LoadLanes(dgate + i, lanes)), lanes);
    StoreLanes(dup + i, Fma(d, value, LoadLanes(dup + i, lanes)), lanes);
  });
}

// p = softmax of a row's scores within [begin, end), and 0 in [0, begin) and [end, cols).
TREADLE_SIMD void SoftmaxWithin(float* row, float scale, int64_t begin, int64_t end, int64_t cols) {
  for (int64_t j = 0; j < begin; ++j) row[j] = 0;
  for (int64_t j = end; j < cols; ++j) row[j] = 0;
  Vec top = Broadcast(-kInfinity), sum = Zero();
  ForEachVec(end - begin, [&](int64_t i, int64_t lanes) {
    const Vec score = Mul(LoadLanes(row + begin + i, lanes), Broadcast(scale));
    StoreLanes(row + begin + i, score, lanes);
    top = Select(FirstLanes(lanes), Max(top, score), top);
  });
  const Vec largest = Broadcast(MaxLane(top));
  ForEachVec(end - begin, [&](int64_t i, int64_t lanes) {
    const Vec power = Exp(Sub(LoadLanes(row + begin + i, lanes), largest));
    StoreLanes(row + begin + i, power, lanes);
    sum = Select(FirstLanes(lanes), Add(sum, power), sum);
  });
  const Vec inverse = Broadcast(1.0f / Sum(sum));
  ForEachVec(end - begin, [&](int64_t i, int64_t lanes) {
    StoreLanes(row + begin + i, Mul(LoadLanes(row + begin + i, lanes), inverse), lanes);
  });
}

// dp = scale * p * (dp - sum of p * dp), in place.
TREADLE_SIMD void ScoreGradient(const float* p, float* dp, float scale, int64_t cols) {
  Vec sum = Zero();
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    sum = Fma(LoadLanes(p + i, lanes), LoadLanes(dp + i, lanes), sum);
  });
  const Vec mean = Broadcast(Sum(sum)), factor = Broadcast(scale);
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    const Vec change = Sub(LoadLanes(dp + i, lanes), mean);
    StoreLanes(dp + i, Mul(Mul(LoadLanes(p + i, lanes), factor), change), lanes);
  });
}

// One head's query rows [begin, begin + count).
void AttentionGradientRows(const AttentionGradientArguments& a, int64_t head, int64_t begin,
                           int64_t count) {
  const auto first_seen = [&](int64_t i) {
    return a.window > 0 && i >= a.window ? i - a.window + 1 : 0;
  };
  const int64_t first = first_seen(begin), cols = begin + count - first, dim = a.dim;
  const float* q = a.q + begin * a.q_stride + head * dim;
  const float* dout = a.dout + begin * a.dout_stride + head * dim;
  for (int64_t i = 0; i < count * a.rows; ++i) a.scores[i] = a.dscores[i] = 0;
  AddProduct(
      {q, a.q_stride, 1, a.keys_transposed + first, a.rows, a.scores, a.rows, count, cols, dim});
  AddProduct({dout, a.dout_stride, 1, a.values_transposed + first, a.rows, a.dscores, a.rows, count,
              cols, dim});
  for (int64_t i = 0; i < count; ++i) {
    float* p = a.scores + i * a.rows;
    SoftmaxWithin(p, a.scale, first_seen(begin + i) - first, begin + i + 1 - first, cols);
  }
  // dv += p^T dout
  AddProduct({a.scores, 1, a.rows, dout, a.dout_stride, a.dv + first * a.dkv_stride, a.dkv_stride,
              cols, dim, count});
  for (int64_t i = 0; i < count; ++i) {
    ScoreGradient(a.scores + i * a.rows, a.dscores + i * a.rows, a.scale, cols);
  }
  // dq += dscores k, dk += dscores^T q
  AddProduct({a.dscores, a.rows, 1, a.keys + first * dim, dim,
              a.dq + begin * a.dq_stride + head * dim, a.dq_stride, count, dim, cols});
  AddProduct({a.dscores, 1, a.rows, q, a.q_stride, a.dk + first * a.dkv_stride, a.dkv_stride, cols,
              dim, count});
}

}  // namespace

void AddProductRange(const ProductArguments& p) { AddProduct(p); }

void RmsNormGradientRow(const float* x, const float* weight, float eps, const float* dy, float* dx,
                        int64_t cols) {
  const auto count = static_cast<float>(cols);
  Vec squares = Zero(), products = Zero();
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    const Vec value = LoadLanes(x + i, lanes);
    const Vec g = Mul(LoadLanes(dy + i, lanes), LoadLanes(weight + i, lanes));
    squares = Fma(value, value, squares);
    products = Fma(g, value, products);
  });
  const float inverse = 1.0f / Sqrt(Sum(squares) / count + eps);
  const Vec factor = Broadcast(inverse);
  const Vec mean = Broadcast(Sum(products) / count * inverse * inverse);
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    const Vec g = Mul(LoadLanes(dy + i, lanes), LoadLanes(weight + i, lanes));
    const Vec change = Fnma(LoadLanes(x + i, lanes), mean, g);
    StoreLanes(dx + i, Fma(change, factor, LoadLanes(dx + i, lanes)), lanes);
  });
}

void SwiGluGradientRow(const float* gate, const float* up, const float* dout, float* dgate,
                       float* dup, int64_t cols) {
  GatedRow(gate, up, dout, dgate, dup, cols, [](Vec x, Vec& value, Vec& slope) {
    const Vec s = Sigmoid(x);
    value = Mul(x, s);
    slope = Fma(value, Sub(Broadcast(1.0f), s), s);
  });
}

void GeGluGradientRow(const float* gate, const float* up, const float* dout, float* dgate,
                      float* dup, int64_t cols) {
  GatedRow(gate, up, dout, dgate, dup, cols, [](Vec x, Vec& value, Vec& slope) {
    const Vec square = Mul(x, x), root = Broadcast(0x1.988454p+0f);  // 2 sqrt(2 / pi)
    const Vec s = Sigmoid(Mul(root, Fma(Mul(Broadcast(0.044715f), square), x, x)));
    value = Mul(x, s);
    const Vec inner = Mul(root, Fma(Broadcast(3 * 0.044715f), square, Broadcast(1.0f)));
    slope = Fma(Mul(value, Sub(Broadcast(1.0f), s)), inner, s);
  });
}

void RotateBackHead(const float* cos, const float* sin, float* head, int64_t half_dim) {
  ForEachVec(half_dim, [&](int64_t i, int64_t lanes) {
    const Vec c = LoadLanes(cos + i, lanes), s = LoadLanes(sin + i, lanes);
    const Vec first = LoadLanes(head + i, lanes);
    const Vec second = LoadLanes(head + half_dim + i, lanes);
    StoreLanes(head + i, Fma(second, s, Mul(first, c)), lanes);
    StoreLanes(head + half_dim + i, Fnma(first, s, Mul(second, c)), lanes);
  });
}

SoftmaxSum SoftmaxRow(float* logits, float scale, int64_t cols) {
  Vec top = Broadcast(-kInfinity), sum = Zero();
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    top = Select(FirstLanes(lanes), Max(top, LoadLanes(logits + i, lanes)), top);
  });
  const float largest = MaxLane(top);
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    const Vec power = Exp(Sub(LoadLanes(logits + i, lanes), Broadcast(largest)));
    StoreLanes(logits + i, power, lanes);
    sum = Select(FirstLanes(lanes), Add(sum, power), sum);
  });
  const float total = Sum(sum);
  const Vec factor = Broadcast(scale / total);
  ForEachVec(cols, [&](int64_t i, int64_t lanes) {
    StoreLanes(logits + i, Mul(LoadLanes(logits + i, lanes), factor), lanes);
  });
  return {largest, total};
}

void AttentionGradientGroup(const AttentionGradientArguments& a) {
  for (int64_t head = 0; head < a.heads; ++head) {
    for (int64_t begin = 0; begin < a.rows; begin += kAttentionGradientRows) {
      const int64_t left = a.rows - begin;
      AttentionGradientRows(a, head, begin,
                            left < kAttentionGradientRows ? left : kAttentionGradientRows);
    }
  }
}

}  // namespace treadle::TREADLE_ISA
