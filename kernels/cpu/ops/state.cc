// Convolve and GatedDelta: layers that keep a state of fixed size (kernels/state_layout.h).
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// Some columns of rows that lie in one page.
struct ConvolveArguments {
  const float* x;  // [rows, columns]
  int64_t x_stride;
  float* inputs;  // [taps - 1 + page_size, columns], `channels` apart; the rows' own ones are made
  int64_t channels;
  bool begins;          // the rows are the page's first: its first taps - 1 inputs are made, too,
  const float* before;  // from these; null: zeros
  int64_t slot;         // of the first row
  int64_t rows;
  int64_t columns;
  int64_t taps;
  const float* weight;  // [taps, columns], `channels` apart
  const float* bias;    // or null
  bool silu;
  float* out;  // [rows, columns]
  int64_t out_stride;
};
TREADLE_ISA_KERNEL(ConvolveRows, void(const ConvolveArguments&));

// One key head's part of a page.
struct DeltaPage {
  float* keys;     // [page_size, key_dim], keys_stride apart
  float* changes;  // [page_size], changes_stride apart: of the first value head, as the others'
  float* decays;   // [page_size], decays_stride apart
  float* state;    // [key_dim, value_dim]
};
// Rows of one key head that lie in one page. Of its value heads, each is `head_step` further on.
struct DeltaArguments {
  const float* q;  // [rows, key_dim]; this and the next two: `stride` apart
  const float* k;
  const float* v;  // [rows, value_dim]
  int64_t stride;
  const float* decay;  // [rows]
  int64_t decay_stride;
  const float* beta;  // likewise
  int64_t beta_stride;
  const float* rates;
  const float* biases;
  int64_t slot;  // of the first row
  int64_t rows;
  int64_t page_size;
  int64_t group;
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

void ConvolveRows(const ConvolveArguments& a) {
  ForEachVec(a.columns, [&](int64_t i, int64_t lanes) {
    for (int64_t t = 0; a.begins && t + 1 < a.taps; ++t) {
      const Vec x = a.before == nullptr ? Zero() : LoadLanes(a.before + t * a.channels + i, lanes);
      StoreLanes(a.inputs + t * a.channels + i, x, lanes);
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      float* const first = a.inputs + (a.slot + row) * a.channels + i;
      StoreLanes(first + (a.taps - 1) * a.channels, LoadLanes(a.x + row * a.x_stride + i, lanes),
                 lanes);
      Vec sum = a.bias == nullptr ? Zero() : LoadLanes(a.bias + i, lanes);
      for (int64_t t = 0; t < a.taps; ++t) {
        sum = Fma(LoadLanes(a.weight + t * a.channels + i, lanes),
                  LoadLanes(first + t * a.channels, lanes), sum);
      }
      StoreLanes(a.out + row * a.out_stride + i, a.silu ? Silu(sum) : sum, lanes);
    }
  });
}

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
  constexpr int kMost = kWideRegisters ? 8 : 2;
  int64_t row = 0;
  for (; row + kMost <= rows; row += kMost) MultiplyRows<kMost>(p, row);
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

}  // namespace

void DeltaRows(const DeltaArguments& a) {
  for (int64_t h = 0; a.begins && h < a.group; ++h) MakeState(a, h);
  const int64_t dim = a.key_dim;
  float* const vectors = a.scratch;                // the rows' keys, then queries: [2 rows, dim]
  float* const seen = vectors + 2 * a.rows * dim;  // the state times these: [2 rows, value_dim]
  float* const keys =
      seen + 2 * a.rows * a.value_dim;                 // keys times earlier keys: [rows, page_size]
  float* const queries = keys + a.rows * a.page_size;  // queries times them, likewise
  float* const key_weights = queries + a.rows * a.page_size;  // the same with decays
  float* const weights = key_weights + a.rows * a.page_size;
  float* const decays = weights + a.rows * a.page_size;  // [page_size]
  float* const powers = decays + a.page_size + 16;       // [rows]
  float* const betas = powers + a.page_size + 16;        // likewise
  for (int64_t row = 0; row < a.rows; ++row) {
    float* const key = vectors + row * dim;
    Normalize(a.k + row * a.stride, dim, 1.0f, key);
    Normalize(a.q + row * a.stride, dim, 1.0f / Sqrt(static_cast<float>(dim)),
              vectors + (a.rows + row) * dim);
    float* const stored = a.page.keys + (a.slot + row) * a.keys_stride;
    for (int64_t d = 0; d < dim; ++d) stored[d] = key[d];
  }
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t i = 0; i <= a.slot + row; ++i) {
      const float* const key = a.page.keys + i * a.keys_stride;
      keys[row * a.page_size + i] = Dot(vectors + row * dim, key, dim);
      queries[row * a.page_size + i] = Dot(vectors + (a.rows + row) * dim, key, dim);
    }
  }
  for (int64_t h = 0; h < a.group; ++h) {
    const DeltaPage page = HeadOf(a, a.page, h);
    const int64_t on = h * a.head_step;
    Multiply(
        {vectors, dim, page.state, a.value_dim, dim, a.value_dim, nullptr, 1.0f, seen, a.value_dim},
        2 * a.rows);
    float* const own = decays + a.slot;  // of the rows
    for (int64_t row = 0; row < a.rows; ++row) {
      own[row] = a.decay[row * a.decay_stride + on] + a.biases[on];
      betas[row] = a.beta[row * a.beta_stride + on];
    }
    ForEachVec(a.rows, [&](int64_t row, int64_t lanes) {
      const Vec fall = Mul(Broadcast(a.rates[on]), SoftPlus(LoadLanes(own + row, lanes)));
      StoreLanes(own + row, fall, lanes);
      const Vec beta = LoadLanes(betas + row, lanes);
      StoreLanes(betas + row, TimesSigmoid(Broadcast(1.0f), beta), lanes);
    });
    for (int64_t i = 0; i < a.slot; ++i) decays[i] = page.decays[i * a.decays_stride];
    for (int64_t i = a.slot; i < a.slot + a.rows; ++i) {
      decays[i] = (i == 0 ? 0.0f : decays[i - 1]) - decays[i];
      page.decays[i * a.decays_stride] = decays[i];
    }
    ForEachVec(a.rows, [&](int64_t row, int64_t lanes) {
      StoreLanes(powers + row, Exp(LoadLanes(own + row, lanes)), lanes);
    });
    for (int64_t row = 0; row < a.rows; ++row) {
      ForEachVec(a.slot + row + 1, [&](int64_t i, int64_t lanes) {
        const Vec power = Exp(Sub(Broadcast(own[row]), LoadLanes(decays + i, lanes)));
        const int64_t at = row * a.page_size + i;
        StoreLanes(key_weights + at, Mul(power, LoadLanes(keys + at, lanes)), lanes);
        StoreLanes(weights + at, Mul(power, LoadLanes(queries + at, lanes)), lanes);
      });
    }
    ForEachVec(a.value_dim, [&](int64_t j, int64_t lanes) {
      for (int64_t row = 0; row < a.rows; ++row) {
        const float* const of_key = key_weights + row * a.page_size;
        const float* const of_query = weights + row * a.page_size;
        const Vec power = Broadcast(powers[row]);
        Vec known = Mul(power, LoadLanes(seen + row * a.value_dim + j, lanes));
        Vec out = Mul(power, LoadLanes(seen + (a.rows + row) * a.value_dim + j, lanes));
        const int64_t slot = a.slot + row;
        for (int64_t i = 0; i < slot; ++i) {
          const Vec change = LoadLanes(page.changes + i * a.changes_stride + j, lanes);
          known = Fma(Broadcast(of_key[i]), change, known);
          out = Fma(Broadcast(of_query[i]), change, out);
        }
        const Vec value = LoadLanes(a.v + row * a.stride + on * a.value_dim + j, lanes);
        const Vec change = Mul(Broadcast(betas[row]), Sub(value, known));
        StoreLanes(page.changes + slot * a.changes_stride + j, change, lanes);
        StoreLanes(a.out + row * a.out_stride + on * a.value_dim + j,
                   Fma(Broadcast(of_query[slot]), change, out), lanes);
      }
    });
  }
}

}  // namespace treadle::TREADLE_ISA
#else
#include <algorithm>

#include "kernels/cpu/ops/ops_state.h"
#include "kernels/cpu/ops/split_rows.h"

namespace treadle {
namespace {

// Rows of a span that lie in one page.
struct PageRows {
  int64_t row;  // the first, of the batch
  int64_t rows;
  int64_t slot;  // of the first
  float* page;
  float* before;  // the page before it, if the rows begin theirs; null: position 0
};

template <typename Body>
void ForEachPage(const KvView& kv, const SequenceSpan& span, Body body) {
  const int64_t size = kv.layout.page_size;
  const auto page_at = [&](int64_t i) {
    return reinterpret_cast<float*>(kv.pages + span.pages[i] * kv.layout.PageStride());
  };
  const int64_t end = int64_t{span.first_position} + span.num_rows;
  for (int64_t at = span.first_position; at < end;) {
    const int64_t page = at / size, slot = at % size;
    const int64_t rows = std::min(size - slot, end - at);
    body(PageRows{span.first_row + at - span.first_position, rows, slot, page_at(page),
                  slot == 0 && page > 0 ? page_at(page - 1) : nullptr});
    at += rows;
  }
}

}  // namespace

void CpuOps::Convolve(Tensor x, const float* weight, const float* bias, bool silu, const KvView& kv,
                      Tensor out) {
  const StateLayout& state = kv.layout.state;
  CheckSameShape(x, out);
  TREADLE_CHECK(x.cols == state.channels);
  const auto convolve = [&](int64_t begin, int64_t end) {  // channels
    for (const SequenceSpan& span : kv.sequences) {
      ForEachPage(kv, span, [&](const PageRows& p) {
        const float* before = p.before;
        if (before != nullptr) before += kv.layout.page_size * state.channels + begin;
        kConvolveRows[isa_]({x.Row<float>(p.row) + begin, x.stride, p.page + begin, state.channels,
                             p.slot == 0, before, p.slot, p.rows, end - begin, state.taps,
                             weight + begin, bias == nullptr ? nullptr : bias + begin, silu,
                             out.Row<float>(p.row) + begin, out.stride});
      });
    }
  };
  if (x.rows * x.cols < kSerialElements) return convolve(0, x.cols);
  pool_.ParallelFor(x.cols, 64, convolve);
}

void CpuOps::GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                        const float* biases, const KvView& kv, Tensor out) {
  const KvLayout& layout = kv.layout;
  const StateLayout& state = layout.state;
  const int64_t queries = state.key_heads * state.key_dim, group = state.group();
  TREADLE_CHECK(qkv.cols == 2 * queries + out.cols && out.cols == state.heads * state.value_dim);
  TREADLE_CHECK(decay.cols == state.heads && beta.cols == state.heads);
  const int64_t floats = DeltaScratchFloats(layout.page_size, state.key_dim, state.value_dim);
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float) * pool_.size();
  state_->delta_scratch.Reserve(bytes);
  float* const scratch = state_->delta_scratch.Take<float>(bytes);
  pool_.ParallelForEach(
      std::ssize(kv.sequences) * state.key_heads, [&](int worker, int64_t item, int64_t) {
        const int64_t head = item % state.key_heads, first = state.tiled ? head : head * group;
        const auto part_of = [&](float* page) {
          if (page == nullptr) return DeltaPage();
          return DeltaPage{
              page + state.Keys(layout.page_size) + head * state.key_dim,
              page + state.Changes(layout.page_size) + first * state.value_dim,
              page + state.Decays(layout.page_size) + first,
              page + state.State(layout.page_size) + first * state.key_dim * state.value_dim};
        };
        ForEachPage(kv, kv.sequences[item / state.key_heads], [&](const PageRows& p) {
          const float* const row = qkv.Row<float>(p.row);
          kDeltaRows[isa_]({row + head * state.key_dim,
                            row + queries + head * state.key_dim,
                            row + 2 * queries + first * state.value_dim,
                            qkv.stride,
                            decay.Row<float>(p.row) + first,
                            decay.stride,
                            beta.Row<float>(p.row) + first,
                            beta.stride,
                            rates + first,
                            biases + first,
                            p.slot,
                            p.rows,
                            layout.page_size,
                            group,
                            state.tiled ? state.key_heads : 1,
                            state.key_dim,
                            state.value_dim,
                            part_of(p.page),
                            queries,
                            state.heads * state.value_dim,
                            state.heads,
                            p.slot == 0,
                            part_of(p.before),
                            out.Row<float>(p.row) + first * state.value_dim,
                            out.stride,
                            scratch + worker * floats});
        });
      });
}

}  // namespace treadle
#endif
