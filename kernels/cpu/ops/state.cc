// GatedDelta: layers that keep a state of fixed size (kernels/state_layout.h).
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// One key head's part of a page.
struct DeltaPage {
  float* keys;     // [page_size, key_dim], keys_stride apart
  float* changes;  // [page_size], changes_stride apart: of the first value head, as the others'
  float* decays;   // [page_size], decays_stride apart
  float* state;    // [key_dim, value_dim]
};
// Rows of one key head that lie in one page, and some of its value heads, each of them `head_step`
// further on.
struct DeltaArguments {
  const float* q;  // [rows, key_dim]; this and the next two: `stride` apart
  const float* k;
  const float* v;  // [rows, value_dim]
  int64_t stride;
  const float* decay;  // [rows]
  int64_t decay_stride;
  const float* beta;  // likewise; with skips null
  int64_t beta_stride;
  const float* rates;
  const float* biases;
  const float* skips;  // or null
  int64_t slot;        // of the first row
  int64_t rows;
  int64_t page_size;
  int64_t heads;
  bool stores_keys;  // the other calls for the key head read those of earlier rows alone
  int64_t head_step;
  int64_t key_dim;
  int64_t value_dim;
  DeltaPage page;
  int64_t keys_stride;
  int64_t changes_stride;
  int64_t decays_stride;
  bool begins;       // the rows are the page's first: its state is made, too,
  DeltaPage before;  // from this page; null: zeros
  float* out;        // [rows, value_dim]
  int64_t out_stride;
  float* scratch;  // [DeltaScratchFloats]
};
TREADLE_ISA_KERNEL(DeltaRows, void(const DeltaArguments&));
constexpr int64_t DeltaScratchFloats(int64_t page_size, int64_t key_dim, int64_t value_dim) {
  return 2 * page_size * (key_dim + value_dim) + 4 * page_size * page_size + 4 * (page_size + 16);
}

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {

namespace {

// y = scale * start + x b, by fma over ascending depth. x: [rows, depth]; b: [depth, n]; start: y's
// shape, or null for zeros.
struct Product {
  const float* x;
  int64_t x_stride;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  int64_t n;
  const float* start;
  float scale;
  float* y;  // as far apart as start's rows
  int64_t y_stride;
};

template <int kRows, int kVecs>
TREADLE_SIMD void MultiplyTile(const Product& p, int64_t row, int64_t i, int64_t lanes) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVecs; ++j) {
      const int64_t at = (row + r) * p.y_stride + i + j * kLanes;
      sums[r][j] =
          p.start == nullptr ? Zero() : Mul(Broadcast(p.scale), LoadLanes(p.start + at, lanes));
    }
  }
  const float* x = p.x + row * p.x_stride;
  for (int64_t d = 0; d < p.depth; ++d) {
    Vec b[kVecs];
    for (int j = 0; j < kVecs; ++j) b[j] = LoadLanes(p.b + d * p.b_stride + i + j * kLanes, lanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec each = Broadcast(x[r * p.x_stride + d]);
      for (int j = 0; j < kVecs; ++j) sums[r][j] = Fma(each, b[j], sums[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVecs; ++j) {
      StoreLanes(p.y + (row + r) * p.y_stride + i + j * kLanes, sums[r][j], lanes);
    }
  }
}

template <int kRows>
TREADLE_LOOP void MultiplyRows(const Product& p, int64_t row) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= p.n; i += 2 * kLanes) MultiplyTile<kRows, 2>(p, row, i, kLanes);
  for (; i < p.n; i += kLanes) {
    MultiplyTile<kRows, 1>(p, row, i, p.n - i < kLanes ? p.n - i : kLanes);
  }
}

void Multiply(const Product& p, int64_t rows) {
  constexpr int kMax = kWideRegisters ? 8 : 2;
  int64_t row = 0;
  for (; row + kMax <= rows; row += kMax) MultiplyRows<kMax>(p, row);
  if constexpr (kWideRegisters) {
    for (; row + 2 <= rows; row += 2) MultiplyRows<2>(p, row);
  }
  for (; row < rows; ++row) MultiplyRows<1>(p, row);
}

TREADLE_SIMD float Dot(const float* x, const float* y, int64_t n) {
  Vec sum = Zero();
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    sum = Fma(LoadLanes(x + i, lanes), LoadLanes(y + i, lanes), sum);
  });
  return Sum(sum);
}

// to = x / (length of x) * scale.
TREADLE_SIMD void Normalize(const float* x, int64_t n, float scale, float* to) {
  const Vec factor = Broadcast(scale / Sqrt(Dot(x, x, n) + 1e-6f));
  ForEachVec(n, [&](int64_t i, int64_t lanes) {
    StoreLanes(to + i, Mul(LoadLanes(x + i, lanes), factor), lanes);
  });
}

// Value head number h of the key head's.
TREADLE_SIMD DeltaPage HeadOf(const DeltaArguments& a, const DeltaPage& page, int64_t h) {
  const int64_t on = h * a.head_step;
  return {page.keys, page.changes + on * a.value_dim, page.decays + on,
          page.state + on * a.key_dim * a.value_dim};
}

// A value head's state before a page, from the page before it.
void MakeState(const DeltaArguments& a, int64_t h) {
  float* const state = HeadOf(a, a.page, h).state;
  if (a.before.keys == nullptr) {
    ForEachVec(a.key_dim * a.value_dim,
               [&](int64_t i, int64_t lanes) { StoreLanes(state + i, Zero(), lanes); });
    return;
  }
  const DeltaPage before = HeadOf(a, a.before, h);
  float* const weights = a.scratch;                    // [page_size]
  float* const weighted = weights + a.page_size + 16;  // keys: [key_dim, page_size]
  const float last = before.decays[(a.page_size - 1) * a.decays_stride];
  for (int64_t i = 0; i < a.page_size; ++i) weights[i] = last - before.decays[i * a.decays_stride];
  ForEachVec(a.page_size, [&](int64_t i, int64_t lanes) {
    StoreLanes(weights + i, Exp(LoadLanes(weights + i, lanes)), lanes);
  });
  for (int64_t i = 0; i < a.page_size; ++i) {
    const float* const key = before.keys + i * a.keys_stride;
    for (int64_t d = 0; d < a.key_dim; ++d) weighted[d * a.page_size + i] = weights[i] * key[d];
  }
  float all[kLanes];
  Store(all, Exp(Broadcast(last)));
  Multiply({weighted, a.page_size, before.changes, a.changes_stride, a.page_size, a.value_dim,
            before.state, all[0], state, a.value_dim},
           a.key_dim);
}

// log(1 + exp(x)): max(x, 0) + 2 artanh(y / (2 + y)) with y = exp(-|x|), by artanh's series, whose
// next term is below 2^-26 of the first.
TREADLE_SIMD Vec SoftPlus(Vec x) {
  const Vec y = Exp(Sub(Zero(), Max(x, Sub(Zero(), x))));
  const Vec s = Div(y, Add(Broadcast(2.0f), y));
  const Vec square = Mul(s, s);
  Vec series = Broadcast(1.0f / 15);
  for (int i = 13; i > 0; i -= 2) {
    series = Fma(series, square, Broadcast(1.0f / static_cast<float>(i)));
  }
  return Add(Max(x, Zero()), Mul(Add(s, s), series));
}

// The memory of a call: vectors of the rows' keys and then of their queries, and for each value
// head what follows from these.
struct DeltaRowValues {
  explicit DeltaRowValues(const DeltaArguments& a)
      : vectors(a.scratch),
        seen(vectors + 2 * a.rows * a.key_dim),
        keys(seen + 2 * a.rows * a.value_dim),
        queries(keys + a.rows * a.page_size),
        key_weights(queries + a.rows * a.page_size),
        weights(key_weights + a.rows * a.page_size),
        decays(weights + a.rows * a.page_size),
        powers(decays + a.page_size + 16),
        factors(powers + a.page_size + 16) {}

  float* const vectors;      // [2 rows, key_dim]
  float* const seen;         // the state times these: [2 rows, value_dim]
  float* const keys;         // keys times earlier keys: [rows, page_size]
  float* const queries;      // queries times them, likewise
  float* const key_weights;  // the same with decays
  float* const weights;
  float* const decays;   // [page_size]
  float* const powers;   // [rows]
  float* const factors;  // of what is to be added: betas or steps, likewise
};

// Fills vectors, keys and queries.
void TakeVectors(const DeltaArguments& a, const DeltaRowValues& v) {
  const int64_t dim = a.key_dim;
  const bool delta = a.skips == nullptr;
  for (int64_t row = 0; row < a.rows; ++row) {
    float* const key = v.vectors + row * dim;
    float* const query = v.vectors + (a.rows + row) * dim;
    if (delta) {
      Normalize(a.k + row * a.stride, dim, 1.0f, key);
      Normalize(a.q + row * a.stride, dim, 1.0f / Sqrt(static_cast<float>(dim)), query);
    }
    for (int64_t d = 0; !delta && d < dim; ++d) {
      key[d] = a.k[row * a.stride + d];
      query[d] = a.q[row * a.stride + d];
    }
    float* const stored = a.page.keys + (a.slot + row) * a.keys_stride;
    for (int64_t d = 0; a.stores_keys && d < dim; ++d) stored[d] = key[d];
  }
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t i = 0; i <= a.slot + row; ++i) {
      const float* const key =
          i < a.slot ? a.page.keys + i * a.keys_stride : v.vectors + (i - a.slot) * dim;
      if (delta) v.keys[row * a.page_size + i] = Dot(v.vectors + row * dim, key, dim);
      v.queries[row * a.page_size + i] = Dot(v.vectors + (a.rows + row) * dim, key, dim);
    }
  }
}

// Fills decays, powers, factors and weights of a value head.
void TakeDecays(const DeltaArguments& a, const DeltaPage& page, int64_t on,
                const DeltaRowValues& v) {
  const bool delta = a.skips == nullptr;
  float* const own = v.decays + a.slot;  // of the rows
  for (int64_t row = 0; row < a.rows; ++row) {
    own[row] = a.decay[row * a.decay_stride + on] + a.biases[on];
    if (delta) v.factors[row] = a.beta[row * a.beta_stride + on];
  }
  ForEachVec(a.rows, [&](int64_t row, int64_t lanes) {
    const Vec step = SoftPlus(LoadLanes(own + row, lanes));
    StoreLanes(own + row, Mul(Broadcast(a.rates[on]), step), lanes);
    StoreLanes(v.factors + row,
               delta ? TimesSigmoid(Broadcast(1.0f), LoadLanes(v.factors + row, lanes)) : step,
               lanes);
  });
  for (int64_t i = 0; i < a.slot; ++i) v.decays[i] = page.decays[i * a.decays_stride];
  for (int64_t i = a.slot; i < a.slot + a.rows; ++i) {
    v.decays[i] = (i == 0 ? 0.0f : v.decays[i - 1]) - v.decays[i];
    page.decays[i * a.decays_stride] = v.decays[i];
  }
  ForEachVec(a.rows, [&](int64_t row, int64_t lanes) {
    StoreLanes(v.powers + row, Exp(LoadLanes(own + row, lanes)), lanes);
  });
  for (int64_t row = 0; row < a.rows; ++row) {
    ForEachVec(a.slot + row + 1, [&](int64_t i, int64_t lanes) {
      const Vec power = Exp(Sub(Broadcast(own[row]), LoadLanes(v.decays + i, lanes)));
      const int64_t at = row * a.page_size + i;
      if (delta) StoreLanes(v.key_weights + at, Mul(power, LoadLanes(v.keys + at, lanes)), lanes);
      StoreLanes(v.weights + at, Mul(power, LoadLanes(v.queries + at, lanes)), lanes);
    });
  }
}

// Changes and results of a value head.
template <bool kDelta>
TREADLE_LOOP void ChangeHead(const DeltaArguments& a, const DeltaPage& page, int64_t on,
                             const DeltaRowValues& v) {
  ForEachVec(a.value_dim, [&](int64_t j, int64_t lanes) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const float* const of_key = v.key_weights + row * a.page_size;
      const float* const of_query = v.weights + row * a.page_size;
      const Vec power = Broadcast(v.powers[row]);
      Vec known = Zero();
      if (kDelta) known = Mul(power, LoadLanes(v.seen + row * a.value_dim + j, lanes));
      Vec out = Mul(power, LoadLanes(v.seen + (a.rows + row) * a.value_dim + j, lanes));
      const int64_t slot = a.slot + row;
      for (int64_t i = 0; i < slot; ++i) {
        const Vec change = LoadLanes(page.changes + i * a.changes_stride + j, lanes);
        if (kDelta) known = Fma(Broadcast(of_key[i]), change, known);
        out = Fma(Broadcast(of_query[i]), change, out);
      }
      const Vec value = LoadLanes(a.v + row * a.stride + on * a.value_dim + j, lanes);
      const Vec change = Mul(Broadcast(v.factors[row]), kDelta ? Sub(value, known) : value);
      StoreLanes(page.changes + slot * a.changes_stride + j, change, lanes);
      out = Fma(Broadcast(of_query[slot]), change, out);
      if (!kDelta) out = Fma(Broadcast(a.skips[on]), value, out);
      StoreLanes(a.out + row * a.out_stride + on * a.value_dim + j, out, lanes);
    }
  });
}

}  // namespace

void DeltaRows(const DeltaArguments& a) {
  for (int64_t h = 0; a.begins && h < a.heads; ++h) MakeState(a, h);
  const bool delta = a.skips == nullptr;
  const DeltaRowValues v(a);
  TakeVectors(a, v);
  for (int64_t h = 0; h < a.heads; ++h) {
    const DeltaPage page = HeadOf(a, a.page, h);
    const int64_t on = h * a.head_step;
    const int64_t first = delta ? 0 : a.rows;  // only queries look at the state
    Multiply({v.vectors + first * a.key_dim, a.key_dim, page.state, a.value_dim, a.key_dim,
              a.value_dim, nullptr, 1.0f, v.seen + first * a.value_dim, a.value_dim},
             2 * a.rows - first);
    TakeDecays(a, page, on, v);
    (delta ? ChangeHead<true> : ChangeHead<false>)(a, page, on, v);
  }
}

}  // namespace treadle::TREADLE_ISA
#else
#include <algorithm>

#include "kernels/cpu/ops/ops_state.h"
#include "kernels/cpu/ops/state_rows.h"

namespace treadle {
namespace {

// The part of a page that a key head has, with its value heads from `first` on; null: nothing.
DeltaPage PartOf(const KvLayout& layout, float* page, int64_t head, int64_t first) {
  if (page == nullptr) return {};
  const StateLayout& state = layout.state;
  const int64_t size = layout.page_size;
  return {page + state.Keys(size) + head * state.key_dim,
          page + state.Changes(size) + first * state.value_dim, page + state.Decays(size) + first,
          page + state.State(size) + first * state.key_dim * state.value_dim};
}

}  // namespace

void CpuOps::GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                        const float* biases, const float* skips, const KvView& kv, Tensor out) {
  const KvLayout& layout = kv.layout;
  const StateLayout& state = layout.state;
  const int64_t queries = state.key_heads * state.key_dim, group = state.group();
  TREADLE_CHECK(qkv.cols == 2 * queries + out.cols && out.cols == state.heads * state.value_dim);
  TREADLE_CHECK(decay.cols == state.heads && beta.cols == (skips == nullptr ? state.heads : 0));
  const int64_t floats = DeltaScratchFloats(layout.page_size, state.key_dim, state.value_dim);
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float) * pool_.size();
  state_->delta_scratch.Reserve(bytes);
  float* const scratch = state_->delta_scratch.Take<float>(bytes);
  // Value heads of a key head are shared out where there are fewer of these than threads.
  const int64_t items = std::max<int64_t>(std::ssize(kv.sequences) * state.key_heads, 1);
  const int64_t parts = std::clamp<int64_t>(2 * pool_.size() / items, 1, group);
  int64_t rounds = 0;
  for (const SequenceSpan& span : kv.sequences) rounds = std::max(rounds, PagesOf(kv, span));
  const auto run = [&](int worker, const SequenceSpan& span, int64_t head, int64_t part,
                       int64_t round) {
    const PageRows p = RowsIn(kv, span, round);
    const int64_t begin = part * group / parts, end = (part + 1) * group / parts;
    const int64_t first = state.tiled ? head + begin * state.key_heads : head * group + begin;
    const float* const row = qkv.Row<float>(p.row);
    kDeltaRows[isa_]({row + head * state.key_dim,
                      row + queries + head * state.key_dim,
                      row + 2 * queries + first * state.value_dim,
                      qkv.stride,
                      decay.Row<float>(p.row) + first,
                      decay.stride,
                      skips == nullptr ? beta.Row<float>(p.row) + first : nullptr,
                      beta.stride,
                      rates + first,
                      biases + first,
                      skips == nullptr ? nullptr : skips + first,
                      p.slot,
                      p.rows,
                      layout.page_size,
                      end - begin,
                      /*stores_keys=*/part == 0,
                      state.tiled ? state.key_heads : 1,
                      state.key_dim,
                      state.value_dim,
                      PartOf(layout, p.page, head, first),
                      queries,
                      state.heads * state.value_dim,
                      state.heads,
                      p.slot == 0,
                      PartOf(layout, p.before, head, first),
                      out.Row<float>(p.row) + first * state.value_dim,
                      out.stride,
                      scratch + worker * floats});
  };
  // Page by page, for whoever makes a state reads all keys of the page before.
  for (int64_t round = 0; round < rounds; ++round) {
    pool_.ParallelForEach(items * parts, [&](int worker, int64_t item, int64_t) {
      const int64_t head = item / parts % state.key_heads;
      const size_t sequence = static_cast<size_t>(item / parts / state.key_heads);
      if (sequence >= kv.sequences.size()) return;
      const SequenceSpan& span = kv.sequences[sequence];
      if (round < PagesOf(kv, span)) run(worker, span, head, item % parts, round);
    });
  }
}

}  // namespace treadle
#endif
