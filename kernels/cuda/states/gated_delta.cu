// GatedDelta, as two launches for each page that sequences have rows in: first what all value heads
// of a key head share, then each value head. A page's launches end before those of the next begin,
// for a sequence's pages are few and take turns. Contract: kernels/backend.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/states/state_pages.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTileRows = 4;  // that share loads of a state

// [rows, cols] f32.
struct Matrix {
  const float* data = nullptr;
  int64_t stride = 0;
  explicit Matrix(const Tensor& tensor) : data(tensor.Row<float>(0)), stride(tensor.stride) {}
  TREADLE_DEVICE const float* Row(int64_t row) const { return data + row * stride; }
};

struct DeltaParams {
  StatePages pages;
  Matrix qkv, decay, beta;
  const float* rates;
  const float* biases;
  const float* skips;  // null: the delta rule
  float* out;
  int64_t out_stride;
  float* queries;  // [rows, key_heads, key_dim]
  float* dots;     // [rows, key_heads, 2, page_size]: of a key, and of a query, and earlier keys
  int32_t turn;    // which of the pages that a sequence has rows in
  int32_t key_heads, heads, key_dim, value_dim;
  bool tiled;
  // Where parts of a page begin.
  int64_t keys, changes, decays, state;

  TREADLE_DEVICE float* Key(float* page, int slot, int head) const {
    return page + keys + (int64_t{slot} * key_heads + head) * key_dim;
  }
  TREADLE_DEVICE const float* Key(const float* page, int slot, int head) const {
    return page + keys + (int64_t{slot} * key_heads + head) * key_dim;
  }
  TREADLE_DEVICE int64_t ChangeAt(int slot, int head) const {
    return changes + (int64_t{slot} * heads + head) * value_dim;
  }
  TREADLE_DEVICE int64_t DecayAt(int slot, int head) const {
    return decays + int64_t{slot} * heads + head;
  }
  TREADLE_DEVICE int64_t StateAt(int head) const {
    return state + int64_t{head} * key_dim * value_dim;
  }
  TREADLE_DEVICE float* Query(int row, int head) const {
    return queries + (int64_t{row} * key_heads + head) * key_dim;
  }
  TREADLE_DEVICE float* Dots(int row, int head) const {
    return dots + (int64_t{row} * key_heads + head) * 2 * pages.page_size;
  }
};

// By a warp: a sum over ascending elements of each lane, then over the lanes.
TREADLE_DEVICE float Dot(const float* x, const float* y, int n) {
  float sum = 0;
  for (int i = simt::Lane(); i < n; i += simt::kWarp) sum = simt::Fma(x[i], y[i], sum);
  return simt::WarpSum(sum);
}

// Stores the rows' keys and queries, and their products with the page's keys. Grid: key heads,
// sequences.
TREADLE_KERNEL(kThreads) void DeltaKeysKernel(DeltaParams p) {
  simt::AwaitEarlierLaunches();
  const PageRows r = RowsIn(p.pages, simt::BlockY(), p.turn);
  if (r.rows == 0) return;
  const int head = simt::BlockX(), dim = p.key_dim;
  const bool delta = p.skips == nullptr;
  const int warps = simt::Threads() / simt::kWarp;
  for (int row = simt::Warp(); row < r.rows; row += warps) {
    const float* const q = p.qkv.Row(r.row + row) + int64_t{head} * dim;
    const float* const k = q + int64_t{p.key_heads} * dim;
    float of_key = 1, of_query = 1;
    if (delta) {
      of_key = simt::Divide(1.0f, simt::Sqrt(Dot(k, k, dim) + 1e-6f));
      const float root = simt::Sqrt(static_cast<float>(dim));
      of_query = simt::Divide(simt::Divide(1.0f, root), simt::Sqrt(Dot(q, q, dim) + 1e-6f));
    }
    float* const key = p.Key(r.page, r.slot + row, head);
    float* const query = p.Query(r.row + row, head);
    for (int i = simt::Lane(); i < dim; i += simt::kWarp) {
      key[i] = k[i] * of_key;
      query[i] = q[i] * of_query;
    }
  }
  simt::SyncThreads();
  for (int at = simt::Warp(); at < r.rows * p.pages.page_size; at += warps) {
    const int row = at / p.pages.page_size, i = at % p.pages.page_size;
    if (i > r.slot + row) continue;
    const float* const key = p.Key(r.page, i, head);
    const float of_key = delta ? Dot(p.Key(r.page, r.slot + row, head), key, dim) : 0.0f;
    const float of_query = Dot(p.Query(r.row + row, head), key, dim);
    if (simt::Lane() > 0) continue;
    float* const dots = p.Dots(r.row + row, head);
    dots[i] = of_key;
    dots[p.pages.page_size + i] = of_query;
  }
}

// log(1 + exp(x)): max(x, 0) + 2 artanh(y / (2 + y)) with y = exp(-|x|), by artanh's series, whose
// next term is below 2^-26 of the first.
TREADLE_DEVICE float SoftPlus(float x) {
  const float y = simt::Exp(x < 0.0f ? x : -x);
  const float s = simt::Divide(y, 2.0f + y);
  float series = 1.0f / 15;
  TREADLE_UNROLL
  for (int i = 13; i > 0; i -= 2) {
    series = simt::Fma(series, s * s, 1.0f / static_cast<float>(i));
  }
  return (x < 0.0f ? 0.0f : x) + (s + s) * series;
}

// One value head's rows of a page, by a block.
class DeltaHead {
 public:
  TREADLE_DEVICE DeltaHead(const DeltaParams& p, const PageRows& r)
      : p_(p),
        r_(r),
        head_(simt::BlockX()),
        key_head_(p.tiled ? head_ % p.key_heads : head_ / (p.heads / p.key_heads)),
        column_(simt::BlockZ() * kThreads + simt::Thread()),
        size_(p.pages.page_size),
        decays_(simt::DynamicShared<float>()),
        powers_(decays_ + size_),
        factors_(powers_ + size_),
        of_keys_(factors_ + size_),
        of_queries_(of_keys_ + kTileRows * size_) {}
  static constexpr int64_t SharedFloats(int64_t page_size) {
    return (3 + 2 * kTileRows) * page_size;
  }

  // Decays up to the last row, and of each row exp of its own, and beta or the step.
  TREADLE_DEVICE void TakeDecays() {
    const bool delta = p_.skips == nullptr;
    for (int i = simt::Thread(); i < r_.slot; i += simt::Threads()) {
      decays_[i] = r_.page[p_.DecayAt(i, head_)];
    }
    for (int row = simt::Thread(); row < r_.rows; row += simt::Threads()) {
      const float step = SoftPlus(p_.decay.Row(r_.row + row)[head_] + p_.biases[head_]);
      decays_[r_.slot + row] = p_.rates[head_] * step;
      factors_[row] =
          delta ? simt::Divide(1.0f, 1.0f + simt::Exp(-p_.beta.Row(r_.row + row)[head_])) : step;
    }
    simt::SyncThreads();
    for (int i = r_.slot; simt::Thread() == 0 && i < r_.slot + r_.rows; ++i) {
      decays_[i] = (i == 0 ? 0.0f : decays_[i - 1]) - decays_[i];
      if (simt::BlockZ() == 0) r_.page[p_.DecayAt(i, head_)] = decays_[i];
    }
    simt::SyncThreads();
    for (int row = simt::Thread(); row < r_.rows; row += simt::Threads()) {
      powers_[row] = simt::Exp(decays_[r_.slot + row]);
    }
  }

  // The state before the page, from the page before it.
  TREADLE_DEVICE void MakeState() {
    float* const weights = of_keys_;
    const float* const before = r_.before;
    const float last = before == nullptr ? 0.0f : before[p_.DecayAt(size_ - 1, head_)];
    for (int i = simt::Thread(); before != nullptr && i < size_; i += simt::Threads()) {
      weights[i] = simt::Exp(last - before[p_.DecayAt(i, head_)]);
    }
    simt::SyncThreads();
    if (column_ >= p_.value_dim) return;
    const float power = simt::Exp(last);
    const int64_t changes = int64_t{p_.heads} * p_.value_dim;
    for (int d = 0; d < p_.key_dim; ++d) {
      const int64_t at = p_.StateAt(head_) + int64_t{d} * p_.value_dim + column_;
      float sum = before == nullptr ? 0.0f : power * before[at];
      for (int i = 0; before != nullptr && i < size_; ++i) {
        const float key = weights[i] * p_.Key(before, i, key_head_)[d];
        sum = simt::Fma(key, before[p_.ChangeAt(0, head_) + i * changes + column_], sum);
      }
      r_.page[at] = sum;
    }
  }

  TREADLE_DEVICE void RunRows() {
    for (int first = 0; first < r_.rows; first += kTileRows) {
      const int rows = r_.rows - first < kTileRows ? r_.rows - first : kTileRows;
      simt::SyncThreads();
      TakeWeights(first, rows);
      simt::SyncThreads();
      if (column_ < p_.value_dim) RunTile(first, rows);
    }
  }

 private:
  // Products with earlier keys, with what has decayed since.
  TREADLE_DEVICE void TakeWeights(int first, int rows) {
    for (int at = simt::Thread(); at < rows * size_; at += simt::Threads()) {
      const int row = first + at / size_, i = at % size_;
      if (i > r_.slot + row) continue;
      const float power = simt::Exp(decays_[r_.slot + row] - decays_[i]);
      const float* const dots = p_.Dots(r_.row + row, key_head_);
      of_keys_[at] = power * dots[i];
      of_queries_[at] = power * dots[size_ + i];
    }
  }

  TREADLE_DEVICE void RunTile(int first, int rows) {
    const bool delta = p_.skips == nullptr;
    float of_key[kTileRows] = {}, of_query[kTileRows] = {};
    const float* const state = r_.page + p_.StateAt(head_) + column_;
    for (int d = 0; d < p_.key_dim; ++d) {
      const float s = state[int64_t{d} * p_.value_dim];
      TREADLE_UNROLL
      for (int i = 0; i < kTileRows; ++i) {
        if (i >= rows) continue;
        const int row = first + i;
        if (delta)
          of_key[i] = simt::Fma(p_.Key(r_.page, r_.slot + row, key_head_)[d], s, of_key[i]);
        of_query[i] = simt::Fma(p_.Query(r_.row + row, key_head_)[d], s, of_query[i]);
      }
    }
    TREADLE_UNROLL
    for (int i = 0; i < kTileRows; ++i) {
      if (i < rows) RunRow(first + i, i, of_key[i], of_query[i]);
    }
  }

  // of_key, of_query: the state before the page times the row's; i: of the tile.
  TREADLE_DEVICE void RunRow(int row, int i, float of_key, float of_query) {
    const bool delta = p_.skips == nullptr;
    const float* const key_weights = of_keys_ + i * size_;
    const float* const weights = of_queries_ + i * size_;
    float* const changes = r_.page + p_.ChangeAt(0, head_) + column_;
    const int64_t step = int64_t{p_.heads} * p_.value_dim;
    const int slot = r_.slot + row;
    float known = powers_[row] * of_key, out = powers_[row] * of_query;
    for (int at = 0; at < slot; ++at) {
      const float change = changes[at * step];
      if (delta) known = simt::Fma(key_weights[at], change, known);
      out = simt::Fma(weights[at], change, out);
    }
    const float value = p_.qkv.Row(
        r_.row +
        row)[int64_t{2 * p_.key_heads} * p_.key_dim + int64_t{head_} * p_.value_dim + column_];
    const float change = factors_[row] * (delta ? value - known : value);
    changes[slot * step] = change;
    out = simt::Fma(weights[slot], change, out);
    if (!delta) out = simt::Fma(p_.skips[head_], value, out);
    p_.out[(r_.row + row) * p_.out_stride + int64_t{head_} * p_.value_dim + column_] = out;
  }

  const DeltaParams& p_;
  const PageRows& r_;
  const int head_, key_head_, column_;  // a column of values, which a thread has to itself
  const int size_;                      // of a page
  // Shared memory.
  float* const decays_;      // [page_size]
  float* const powers_;      // [rows]
  float* const factors_;     // likewise
  float* const of_keys_;     // [kTileRows, page_size]
  float* const of_queries_;  // likewise
};

// Grid: value heads, sequences, parts of their columns.
TREADLE_KERNEL(kThreads) void DeltaKernel(DeltaParams p) {
  simt::AwaitEarlierLaunches();
  const PageRows r = RowsIn(p.pages, simt::BlockY(), p.turn);
  if (r.rows == 0) return;
  DeltaHead head(p, r);
  head.TakeDecays();
  if (r.slot == 0) head.MakeState();
  head.RunRows();
}

// The pages that any sequence has rows in, at most.
int64_t RoundsOf(const KvView& kv) {
  int64_t rounds = 0;
  for (const SequenceSpan& span : kv.sequences) {
    const int64_t slot = span.first_position % kv.layout.page_size;
    const int64_t end = slot + span.num_rows;
    rounds = std::max(rounds, (end + kv.layout.page_size - 1) / kv.layout.page_size);
  }
  return rounds;
}

}  // namespace

void CudaOps::GatedDelta(Tensor qkv, Tensor decay, Tensor beta, const float* rates,
                         const float* biases, const float* skips, const KvView& kv, Tensor out) {
  const StateLayout& state = kv.layout.state;
  const int64_t size = kv.layout.page_size, keys = state.key_heads * state.key_dim;
  TREADLE_CHECK(out.cols == state.heads * state.value_dim && qkv.cols == 2 * keys + out.cols);
  TREADLE_CHECK(decay.cols == state.heads && beta.cols == (skips == nullptr ? state.heads : 0));
  const auto batch = Upload(kv, qkv.rows);
  if (!batch) return;
  const int64_t dots = 2 * state.key_heads * size;
  Keep(ReserveScratch(static_cast<size_t>(qkv.rows * (keys + dots)) * sizeof(float)));
  if (!Ready()) return;
  auto* const queries = reinterpret_cast<float*>(Scratch().data());
  DeltaParams params = {StatePages(kv, *batch),
                        Matrix(qkv),
                        Matrix(decay),
                        Matrix(beta),
                        rates,
                        biases,
                        skips,
                        out.Row<float>(0),
                        out.stride,
                        queries,
                        queries + qkv.rows * keys,
                        0,
                        static_cast<int32_t>(state.key_heads),
                        static_cast<int32_t>(state.heads),
                        static_cast<int32_t>(state.key_dim),
                        static_cast<int32_t>(state.value_dim),
                        state.tiled,
                        state.Keys(size),
                        state.Changes(size),
                        state.Decays(size),
                        state.State(size)};
  const auto sequences = static_cast<uint32_t>(batch->num_sequences);
  const LaunchShape shared = {
      .grid_x = static_cast<uint32_t>(state.key_heads), .grid_y = sequences, .threads = kThreads};
  const LaunchShape each = {
      .grid_x = static_cast<uint32_t>(state.heads),
      .grid_y = sequences,
      .grid_z = static_cast<uint32_t>((state.value_dim + kThreads - 1) / kThreads),
      .threads = state.value_dim > kThreads / 2 ? kThreads : kThreads / 2u,
      .shared_bytes = static_cast<size_t>(DeltaHead::SharedFloats(size)) * sizeof(float)};
  const int64_t rounds = RoundsOf(kv);
  for (; params.turn < rounds; ++params.turn) {
    device_->Launch(DeltaKeysKernel, shared, params);
    device_->Launch(DeltaKernel, each, params);
  }
}

}  // namespace treadle::cuda
