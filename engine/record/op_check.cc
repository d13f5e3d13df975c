#include "engine/record/op_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/record/op_tolerance.h"
#include "kernels/forwarding_backend.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

// A copy of a tensor, dense.
class HostCopy {
 public:
  explicit HostCopy(Tensor from)
      : bytes_(static_cast<size_t>(from.rows * from.cols) * SizeOf(from.dtype)),
        view_(DenseTensor(bytes_.data(), from.dtype, from.rows, from.cols)) {
    const size_t row = static_cast<size_t>(from.cols) * SizeOf(from.dtype);
    for (int64_t i = 0; i < from.rows && row > 0; ++i) {
      std::memcpy(bytes_.data() + static_cast<size_t>(i) * row, from.Rows(i, 1).data, row);
    }
  }
  HostCopy(HostCopy&&) = default;
  Tensor view() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  Tensor view_;
};

// The pages that sequences' rows or copies touch, apart from all others, in a cache of their own.
class ScratchPages {
 public:
  explicit ScratchPages(const KvLayout& layout) : layout_(layout) {}

  int32_t Add(int32_t page, const std::byte* pages) {
    const auto [entry, fresh] = numbers_.try_emplace(page, static_cast<int32_t>(numbers_.size()));
    if (fresh) {
      const std::byte* const from = pages + page * layout_.PageBytes();
      bytes_.insert(bytes_.end(), from, from + layout_.PageBytes());
    }
    return entry->second;
  }
  KvLayout layout() const {
    KvLayout layout = layout_;
    layout.num_pages = std::ssize(numbers_);
    return layout;
  }
  std::byte* data() { return bytes_.data(); }
  const std::map<int32_t, int32_t>& numbers() const { return numbers_; }

 private:
  const KvLayout layout_;
  std::map<int32_t, int32_t> numbers_;  // by page of the cache
  std::vector<std::byte> bytes_;
};

class CheckingBackend final : public ForwardingBackend, public CheckedBackend {
 public:
  CheckingBackend(std::unique_ptr<Backend> below, ComputeMode compute, OpCheck& check, int stage,
                  int rank)
      : ForwardingBackend(std::move(below)),
        compute_(compute == ComputeMode::kAuto ? ComputeMode::kInt16 : compute),
        reference_(CreateReferenceBackend(compute_)),
        check_(check),
        stage_(stage),
        rank_(rank) {}

  void AtLayer(int64_t layer) override { layer_ = layer; }

  void BeginBatch(const BatchInput& batch) override {
    ForwardingBackend::BeginBatch(batch);
    reference_->BeginBatch(batch);
    layer_ = -1;
    op_ = 0;
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    TREADLE_ASSIGN_OR_RETURN(auto packed, ForwardingBackend::Pack(source));
    Weight weight{.magnitudes = MagnitudesOf(source, compute_)};
    TREADLE_ASSIGN_OR_RETURN(weight.packed, reference_->Pack(source));
    weights_.insert_or_assign(packed.get(), std::move(weight));
    return packed;
  }

  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    const bool armed = Next();
    const HostCopy expected(armed ? out : Tensor());
    ForwardingBackend::Embed(table, ids, first_id, accumulate, out);
    if (!armed) return;
    reference_->Embed(*weights_.at(&table).packed, ids, first_id, accumulate, expected.view());
    Compare("Embed", out, expected.view(), Exactly());
  }

  void RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) override {
    const bool armed = Next();
    const HostCopy input(armed ? x : Tensor()), expected(armed ? out : Tensor());
    ForwardingBackend::RmsNorm(x, weight, eps, accumulate, out);
    if (!armed) return;
    const HostCopy before(expected.view());
    reference_->RmsNorm(input.view(), weight, eps, accumulate, expected.view());
    Compare("RmsNorm", out, expected.view(),
            RmsNormTolerance(expected.view(), accumulate ? before.view() : Tensor()));
  }

  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    const bool armed = Next();
    const HostCopy input(armed ? x : Tensor()), expected(armed ? out : Tensor());
    ForwardingBackend::LayerNorm(x, weight, bias, eps, out);
    if (!armed) return;
    reference_->LayerNorm(input.view(), weight, bias, eps, expected.view());
    Compare("LayerNorm", out, expected.view(), LayerNormTolerance(input.view(), weight, bias, eps));
  }

  void MatMul(Tensor x, std::span<const Projection> projections) override {
    if (!Next()) return ForwardingBackend::MatMul(x, projections);
    const HostCopy input(x);
    std::vector<HostCopy> before, expected;
    std::vector<Projection> reference;
    for (const Projection& projection : projections) {
      before.emplace_back(projection.out);
      expected.emplace_back(projection.out);
      reference.push_back(projection);
      reference.back().weight = weights_.at(projection.weight).packed.get();
      reference.back().out = expected.back().view();
    }
    ForwardingBackend::MatMul(x, projections);
    reference_->MatMul(input.view(), reference);
    for (size_t i = 0; i < projections.size(); ++i) {
      const Projection& made = projections[i];
      const Tensor rows = input.view().Rows(made.first_row, made.out.rows);
      const auto name = projections.size() == 1 ? "MatMul" : Str("MatMul (projection ", i, ")");
      Compare(name, made.out, expected[i].view(),
              MatMulTolerance(weights_.at(made.weight).magnitudes, rows, input.view(), made.bias,
                              made.accumulate ? before[i].view() : Tensor()));
    }
  }

  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    if (!Next()) return ForwardingBackend::RotateAndStoreKv(q, k, v, rotary, kv);
    const HostCopy q_copy(q), k_copy(k), v_copy(v), k_before(k);
    ScratchPages scratch(kv.layout);
    std::vector<std::vector<int32_t>> tables;
    std::vector<SequenceSpan> spans(kv.sequences.begin(), kv.sequences.end());
    for (SequenceSpan& span : spans) {
      const int64_t end = span.first_position + span.num_rows;
      std::vector<int32_t>& table = tables.emplace_back(
          static_cast<size_t>((end + kv.layout.page_size - 1) / kv.layout.page_size), 0);
      for (int64_t p = span.first_position; p < end; ++p) {
        const auto page = static_cast<size_t>(p / kv.layout.page_size);
        table[page] = scratch.Add(span.pages[page], kv.pages);
      }
      span.pages = table.data();
    }
    ForwardingBackend::RotateAndStoreKv(q, k, v, rotary, kv);
    KvView view = kv;
    view.layout = scratch.layout();
    view.pages = scratch.data();
    view.sequences = spans;
    reference_->RotateAndStoreKv(q_copy.view(), k_copy.view(), v_copy.view(), rotary, view);
    Compare("RotateAndStoreKv (q)", q, q_copy.view(), RowTolerance(q_copy.view()));
    CompareCache(kv, view, k_before.view());
  }

  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    const bool armed = Next();
    const HostCopy input(armed ? q : Tensor()), expected(armed ? out : Tensor());
    ForwardingBackend::Attention(q, kv, scale, out);
    if (!armed) return;
    reference_->Attention(input.view(), kv, scale, expected.view());
    Compare("Attention", out, expected.view(), AttentionTolerance(input.view(), kv, scale));
  }

  // The gated ones.
#define TREADLE_CHECK_GATED(name, parameters, arguments, reference_arguments)                  \
  void name parameters override {                                                              \
    const bool armed = Next();                                                                 \
    const HostCopy x(armed ? gate : Tensor()), y(armed ? up : Tensor());                       \
    const HostCopy expected(armed ? out : Tensor());                                           \
    ForwardingBackend::name arguments;                                                         \
    if (!armed) return;                                                                        \
    reference_->name reference_arguments;                                                      \
    Compare(#name, out, expected.view(), GatedTolerance(x.view(), y.view(), expected.view())); \
  }
  TREADLE_CHECK_GATED(SwiGlu, (Tensor gate, Tensor up, Tensor out), (gate, up, out),
                      (x.view(), y.view(), expected.view()))
  TREADLE_CHECK_GATED(GeGlu, (Tensor gate, Tensor up, Tensor out), (gate, up, out),
                      (x.view(), y.view(), expected.view()))
  TREADLE_CHECK_GATED(ClampedSwiGlu, (Tensor gate, Tensor up, float limit, Tensor out),
                      (gate, up, limit, out), (x.view(), y.view(), limit, expected.view()))
#undef TREADLE_CHECK_GATED

#define TREADLE_CHECK_ELEMENTWISE(name)                                   \
  void name(Tensor x, Tensor out) override {                              \
    const bool armed = Next();                                            \
    const HostCopy input(armed ? x : Tensor());                           \
    const HostCopy expected(armed ? out : Tensor());                      \
    ForwardingBackend::name(x, out);                                      \
    if (!armed) return;                                                   \
    reference_->name(input.view(), expected.view());                      \
    Compare(#name, out, expected.view(), ElementTolerance(input.view())); \
  }
  TREADLE_CHECK_ELEMENTWISE(Gelu)
  TREADLE_CHECK_ELEMENTWISE(GeluErf)
  TREADLE_CHECK_ELEMENTWISE(Relu)
  TREADLE_CHECK_ELEMENTWISE(Copy)
#undef TREADLE_CHECK_ELEMENTWISE

  void Route(Tensor logits, bool normalize, Tensor ids, Tensor weights) override {
    const bool armed = Next();
    const HostCopy input(armed ? logits : Tensor());
    const HostCopy places(armed ? ids : Tensor()), shares(armed ? weights : Tensor());
    ForwardingBackend::Route(logits, normalize, ids, weights);
    if (!armed) return;
    reference_->Route(input.view(), normalize, places.view(), shares.view());
    Compare("Route (experts)", ids, places.view(), Exactly());
    Compare("Route (weights)", weights, shares.view(), ElementTolerance(shares.view()));
  }

  void Mix(Tensor x, std::span<const int32_t> places, Tensor weights, bool accumulate,
           Tensor out) override {
    const bool armed = Next();
    const HostCopy input(armed ? x : Tensor()), shares(armed ? weights : Tensor());
    const HostCopy expected(armed ? out : Tensor());
    ForwardingBackend::Mix(x, places, weights, accumulate, out);
    if (!armed) return;
    const HostCopy before(expected.view());
    reference_->Mix(input.view(), places, shares.view(), accumulate, expected.view());
    Compare(
        "Mix", out, expected.view(),
        MixTolerance(input.view(), places, shares.view(), accumulate ? before.view() : Tensor()));
  }

  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    const bool armed = Next();
    const HostCopy expected(armed ? out : Tensor());
    if (armed) reference_->Gather(x, rows, expected.view());
    ForwardingBackend::Gather(x, rows, out);
    if (armed) Compare("Gather", out, expected.view(), Exactly());
  }

  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    if (!Next()) return ForwardingBackend::CopyPages(layout, pages, copies);
    ScratchPages scratch(layout);
    std::vector<PageCopy> there;
    for (const PageCopy& copy : copies) {
      const int32_t from = scratch.Add(copy.from, pages);
      there.push_back({from, scratch.Add(copy.to, pages)});
    }
    ForwardingBackend::CopyPages(layout, pages, copies);
    reference_->CopyPages(scratch.layout(), scratch.data(), there);
    const auto bytes = static_cast<size_t>(layout.PageBytes());
    for (const auto& [page, number] : scratch.numbers()) {
      if (std::memcmp(pages + page * layout.PageBytes(),
                      scratch.data() + number * layout.PageBytes(), bytes) != 0) {
        return Find("CopyPages", page, "the page differs from the reference's");
      }
    }
  }

  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    const bool armed = Next();
    const HostCopy input(armed ? logits : Tensor());
    const HostCopy raw(armed ? logits : Tensor());
    ForwardingBackend::Sample(logits, rows, results);
    if (!armed) return;
    std::vector<SampleResult> expected(rows.size());
    reference_->Sample(input.view(), rows, expected);
    for (size_t i = 0; i < rows.size(); ++i) {
      const double tolerance = SampleTolerance(raw.view(), static_cast<int64_t>(i));
      const SampleResult &is = results[i], &should = expected[i];
      const auto row = static_cast<int64_t>(i);
      if (is.token != should.token) {
        return Find("Sample", row, Str("token ", is.token, ", the reference's ", should.token));
      }
      if (rows[i].top_logprobs >= 0 && !(std::fabs(is.logprob - should.logprob) <= tolerance)) {
        return Find("Sample", row,
                    Str("log probability ", is.logprob, ", the reference's ", should.logprob,
                        ", tolerance ", tolerance));
      }
    }
  }

  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    const bool armed = Next();
    const HostCopy input(armed ? logits : Tensor());
    const HostCopy raw(armed ? logits : Tensor());
    ForwardingBackend::SampleShard(logits, first_token, rows, shards);
    if (!armed) return;
    std::vector<ShardSample> expected(rows.size());
    reference_->SampleShard(input.view(), first_token, rows, expected);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      const double tolerance = expected[i].sum * SampleTolerance(raw.view(), row);
      bool same = shards[i].max == expected[i].max &&
                  shards[i].num_candidates == expected[i].num_candidates &&
                  std::fabs(shards[i].sum - expected[i].sum) <= tolerance;
      for (int32_t c = 0; same && c < expected[i].num_candidates; ++c) {
        same = shards[i].candidates[c].token == expected[i].candidates[c].token;
      }
      if (!same) {
        return Find("SampleShard", row,
                    Str("maximum ", shards[i].max, " and sum ", shards[i].sum, ", the reference's ",
                        expected[i].max, " and ", expected[i].sum, ", or other candidates"));
      }
    }
  }

 private:
  struct Weight {
    WeightMagnitudes magnitudes;
    std::unique_ptr<PackedMatrix> packed = {};
  };

  bool Next() {
    ++op_;
    return check_.armed();
  }

  void Find(std::string op, int64_t row, std::string what) {
    check_.Add({.stage = stage_,
                .op = op_,
                .rank = rank_,
                .layer = layer_,
                .name = std::move(op),
                .row = row,
                .what = std::move(what)});
  }

  void Compare(std::string op, Tensor out, Tensor expected, const ToleranceOf& tolerance) {
    TREADLE_CHECK(ForwardingBackend::Synchronize().ok());
    for (int64_t row = 0; row < out.rows; ++row) {
      for (int64_t i = 0; i < out.cols; ++i) {
        const float is = LoadElement(out.dtype, out.Rows(row, 1).data, i);
        const float should = LoadElement(expected.dtype, expected.Rows(row, 1).data, i);
        if (is == should || (std::isnan(is) && std::isnan(should))) continue;
        const double most = tolerance(row, i);
        if (std::fabs(double{is} - should) <= most) continue;
        return Find(
            std::move(op), row,
            Str("column ", i, " is ", is, ", the reference's ", should, ", tolerance ", most));
      }
    }
  }

  // What was stored of K and V, in the cache and in the reference's.
  void CompareCache(const KvView& kv, const KvView& expected, Tensor k) {
    const KvLayout& layout = kv.layout;
    for (size_t s = 0; s < kv.sequences.size(); ++s) {
      const SequenceSpan& span = kv.sequences[s];
      for (int32_t i = 0; i < span.num_rows; ++i) {
        const int64_t position = span.first_position + i;
        const int64_t page = position / layout.page_size, slot = position % layout.page_size;
        const std::byte* const is = kv.pages + span.pages[page] * layout.PageBytes();
        const std::byte* const should =
            expected.pages + expected.sequences[s].pages[page] * layout.PageBytes();
        const double tolerance = StoredTolerance(k, span.first_row + i, layout.dtype);
        for (int64_t element = 0; element < 2 * layout.kv_heads * layout.head_dim; ++element) {
          const bool value = element >= layout.kv_heads * layout.head_dim;
          const int64_t in_part = element % (layout.kv_heads * layout.head_dim);
          const int64_t head = in_part / layout.head_dim, feature = in_part % layout.head_dim;
          const int64_t at = value ? layout.ValueElement(head, slot, feature)
                                   : layout.KeyElement(head, slot, feature);
          const float a = LoadElement(layout.dtype, is, at);
          const float b = LoadElement(layout.dtype, should, at);
          if (a == b || (std::isnan(a) && std::isnan(b))) continue;
          if (!value && std::fabs(a - b) <= tolerance) continue;
          return Find(value ? "RotateAndStoreKv (v)" : "RotateAndStoreKv (k)", span.first_row + i,
                      Str("element ", in_part, " is ", a, ", the reference's ", b));
        }
      }
    }
  }

  const ComputeMode compute_;
  const std::unique_ptr<Backend> reference_;
  OpCheck& check_;
  const int stage_;
  const int rank_;
  std::map<const PackedMatrix*, Weight> weights_;
  int64_t layer_ = -1;
  int64_t op_ = 0;
};

}  // namespace

CheckedRank CheckOps(std::unique_ptr<Backend> below, ComputeMode compute, OpCheck& check, int stage,
                     int rank) {
  auto backend = std::make_unique<CheckingBackend>(std::move(below), compute, check, stage, rank);
  CheckedBackend* const checked = backend.get();
  return {std::move(backend), checked};
}

}  // namespace treadle
