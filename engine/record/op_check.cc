#include "engine/record/op_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/forwarding_backend.h"
#include "kernels/kv_elements.h"
#include "kernels/op_cases/tolerant_reference.h"

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

// The pages that an op may touch, apart from all others, in a cache of their own.
class ScratchPages {
 public:
  ScratchPages(const KvLayout& layout, std::byte* pages)
      : layout_(layout), pages_(pages), stride_(layout.PageStride()) {
    layout_.num_pages = 0;
    layout_.layers = 1;
  }

  // Gives the page's number here.
  int32_t Add(int32_t page) {
    const auto [entry, fresh] = numbers_.try_emplace(page, static_cast<int32_t>(originals_.size()));
    if (fresh) {
      const std::byte* const from = pages_ + page * stride_;
      bytes_.insert(bytes_.end(), from, from + layout_.PageBytes());
      originals_.push_back(page);
      ++layout_.num_pages;
    }
    return entry->second;
  }
  const KvLayout& layout() const { return layout_; }
  std::byte* data() { return bytes_.data(); }
  // By number here.
  int32_t OriginalOf(int32_t number) const { return originals_[static_cast<size_t>(number)]; }
  std::byte* OriginalPage(int32_t number) const { return pages_ + OriginalOf(number) * stride_; }

 private:
  KvLayout layout_;
  std::byte* const pages_;
  const int64_t stride_;
  std::map<int32_t, int32_t> numbers_;
  std::vector<int32_t> originals_;
  std::vector<std::byte> bytes_;
};

using Weights = std::map<const PackedMatrix*, std::unique_ptr<PackedMatrix>>;

// An op's arguments once more, for the reference: copies of whatever the op may write.
class Twins {
 public:
  // weights: the reference's, by the other backend's.
  explicit Twins(const Weights& weights) : weights_(weights) {}

  // Passes on what ops only read. An argument of a new type that an op may write does not compile.
  template <typename T>
  T Of(T argument) {
    static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, const float*> ||
                  std::is_same_v<T, const RotaryTable*> || std::is_same_v<T, XieluScales> ||
                  std::is_same_v<T, Routing> || std::is_same_v<T, std::span<const int32_t>> ||
                  std::is_same_v<T, std::span<const SampleRow>>);
    return argument;
  }
  const PackedMatrix& Of(const PackedMatrix& weight) { return *weights_.at(&weight); }
  Tensor Of(Tensor tensor) {
    const Tensor twin = copies_.emplace_back(tensor).view();
    tensors_.emplace_back(twin, tensor);
    return twin;
  }
  std::span<const Projection> Of(std::span<const Projection> projections) {
    for (const Projection& projection : projections) {
      Projection& twin = projections_.emplace_back(projection);
      twin.weight = &Of(*projection.weight);
      twin.out = Of(projection.out);
    }
    return projections_;
  }
  // Several may write rows of the same tensor.
  std::span<const LowRankProduct> Of(std::span<const LowRankProduct> products) {
    for (const LowRankProduct& product : products) {
      LowRankProduct& twin = low_ranks_.emplace_back(product);
      const auto same = std::ranges::find_if(
          tensors_, [&](const auto& pair) { return pair.second.data == product.out.data; });
      twin.out = same == tensors_.end() ? Of(product.out) : same->first;
    }
    return low_ranks_;
  }
  const KvView& Of(const KvView& kv) {
    ScratchPages& scratch = pages_.emplace(kv.layout, kv.pages);
    spans_.assign(kv.sequences.begin(), kv.sequences.end());
    for (SequenceSpan& span : spans_) {
      const int64_t size = kv.layout.page_size;
      const int64_t end = span.first_position + span.num_rows;
      std::vector<int32_t>& table = tables_.emplace_back((end + size - 1) / size, 0);
      for (int64_t i = kv.FirstSeen(span.first_position) / size; i < std::ssize(table); ++i) {
        table[i] = scratch.Add(span.pages[i]);
      }
      span.pages = table.data();
    }
    view_ = kv;
    view_.layout = scratch.layout();
    view_.pages = scratch.data();
    view_.sequences = spans_;
    return view_;
  }
  std::span<SampleResult> Of(std::span<SampleResult> results) {
    given_samples_ = results;
    return samples_ = {results.begin(), results.end()};
  }
  std::span<ShardSample> Of(std::span<ShardSample> shards) {
    given_shards_ = shards;
    return shards_ = {shards.begin(), shards.end()};
  }

  // The tensor that `twin` stands for.
  Tensor OriginalOf(Tensor twin) const {
    const auto found =
        std::ranges::find(tensors_, twin.data, [](const auto& pair) { return pair.first.data; });
    TREADLE_CHECK(found != tensors_.end());
    return found->second;
  }
  ScratchPages& pages() { return *pages_; }
  std::span<const SequenceSpan> spans() const { return spans_; }
  // FieldsOf each result: the original's and the twin's.
  std::vector<std::pair<std::vector<float>, std::vector<float>>> Fields() const {
    std::vector<std::pair<std::vector<float>, std::vector<float>>> fields;
    for (size_t i = 0; i < samples_.size(); ++i) {
      fields.emplace_back(FieldsOf(given_samples_[i]), FieldsOf(samples_[i]));
    }
    for (size_t i = 0; i < shards_.size(); ++i) {
      fields.emplace_back(FieldsOf(given_shards_[i]), FieldsOf(shards_[i]));
    }
    return fields;
  }

 private:
  const Weights& weights_;
  std::deque<HostCopy> copies_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;  // twin, original
  std::vector<Projection> projections_;
  std::vector<LowRankProduct> low_ranks_;
  std::optional<ScratchPages> pages_;
  std::vector<SequenceSpan> spans_;
  std::deque<std::vector<int32_t>> tables_;
  KvView view_;
  std::span<SampleResult> given_samples_;
  std::vector<SampleResult> samples_;
  std::span<ShardSample> given_shards_;
  std::vector<ShardSample> shards_;
};

bool Differs(float is, float should, float tolerance) {
  if (is == should || (std::isnan(is) && std::isnan(should))) return false;
  return !(std::fabs(double{is} - should) <= tolerance);
}

class CheckingBackend final : public ForwardingBackend, public CheckedBackend {
 public:
  CheckingBackend(std::unique_ptr<Backend> below, ComputeMode compute, OpCheck& check, int stage,
                  int rank)
      : ForwardingBackend(std::move(below)),
        reference_(compute == ComputeMode::kAuto ? kCpuAuto : compute),
        check_(check),
        stage_(stage),
        rank_(rank) {}

  void AtLayer(int64_t layer) override { layer_ = layer; }

  void BeginBatch(const BatchInput& batch) override {
    ForwardingBackend::BeginBatch(batch);
    reference_.BeginBatch(batch);
    layer_ = -1;
    op_ = 0;
  }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    TREADLE_ASSIGN_OR_RETURN(auto packed, ForwardingBackend::Pack(source));
    TREADLE_ASSIGN_OR_RETURN(auto twin, reference_.Pack(source));
    weights_.insert_or_assign(packed.get(), std::move(twin));
    return packed;
  }

#define TREADLE_ARGUMENTS(...) __VA_ARGS__
#define TREADLE_CHECK_OP(name, parameters, arguments) \
  void name parameters override { RunTwice(#name, &Backend::name, TREADLE_ARGUMENTS arguments); }
  TREADLE_FEATURE_OPS(TREADLE_CHECK_OP)
  TREADLE_SAMPLE_OPS(TREADLE_CHECK_OP)
  TREADLE_COPY_OPS(TREADLE_OVERRIDE_OP)
#undef TREADLE_CHECK_OP
#undef TREADLE_ARGUMENTS

 private:
  template <typename... Parameters>
  void RunTwice(std::string_view name, void (Backend::*op)(Parameters...),
                std::type_identity_t<Parameters>... arguments) {
    if (!Next()) return (below().*op)(arguments...);
    Twins twins(weights_);
    // A parameter that is a reference has its value here, unless the twin is an object of its own.
    const std::tuple<decltype(twins.Of(arguments))...> again{twins.Of(arguments)...};
    (below().*op)(arguments...);
    TREADLE_CHECK(ForwardingBackend::Synchronize().ok());
    std::apply([&](auto&... twin) { (reference_.*op)(twin...); }, again);
    Compare(name, twins);
  }

  // Whether the op that follows is checked.
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

  void Compare(std::string_view op, Twins& twins) {
    for (const OpTolerances::Output& output : reference_.tolerances().outputs) {
      const std::string name = output.part.empty() ? Str(op) : Str(op, " (", output.part, ")");
      CompareRows(name, twins.OriginalOf(output.tensor), output.tensor, output.error);
    }
    if (!reference_.tolerances().cache.empty()) {
      CompareCache(op, twins.pages(), twins.spans());
    }
    CompareFields(op, twins);
  }

  void CompareRows(const std::string& name, Tensor out, Tensor expected,
                   std::span<const float> tolerance) {
    for (int64_t row = 0; row < out.rows; ++row) {
      for (int64_t i = 0; i < out.cols; ++i) {
        const float is = LoadElement(out.dtype, out.Rows(row, 1).data, i);
        const float should = LoadElement(expected.dtype, expected.Rows(row, 1).data, i);
        const float most = tolerance[static_cast<size_t>(row * out.cols + i)];
        if (!Differs(is, should, most)) continue;
        return Find(
            name, row,
            Str("column ", i, " is ", is, ", the reference's ", should, ", tolerance ", most));
      }
    }
  }

  // Compares the cache with the reference's. spans: of the reference's; if empty, a finding's
  // row is its page.
  void CompareCache(std::string_view op, ScratchPages& scratch,
                    std::span<const SequenceSpan> spans) {
    const KvLayout& layout = scratch.layout();
    const float* error = reference_.tolerances().cache.data();
    for (int32_t page = 0; page < layout.num_pages; ++page) {
      std::byte* const is = scratch.OriginalPage(page);
      std::byte* const should = scratch.data() + page * layout.PageBytes();
      if (layout.state.present()) {
        const int64_t floats = layout.state.Floats(layout.page_size);
        for (int64_t i = 0; i < floats; ++i) {
          const float a = LoadElement(DType::kF32, is, i), b = LoadElement(DType::kF32, should, i);
          if (!Differs(a, b, error[i])) continue;
          return Find(Str(op, " (state)"), scratch.OriginalOf(page),
                      Str("element ", i, " is ", a, ", the reference's ", b));
        }
        error += floats;
        continue;
      }
      const int64_t part = layout.kv_heads * layout.page_size * layout.head_dim;
      for (int64_t at = 0; at < layout.Parts() * part; ++at) {
        const bool value = at >= part;
        const int64_t i = at % layout.head_dim;
        const int64_t slot = at / layout.head_dim % layout.page_size;
        const int64_t head = at % part / layout.head_dim / layout.page_size;
        const int64_t element =
            value ? layout.ValueElement(head, slot, i) : KeyByFeature(layout, head, slot, i);
        const KvPart of = value ? KvPart::kValue : KvPart::kKey;
        const float a = KvRow(layout, is, of, head, slot).Load(i);
        const float b = KvRow(layout, should, of, head, slot).Load(i);
        if (!Differs(a, b, error[element])) continue;
        return Find(
            Str(op, value ? " (v)" : " (k)"),
            spans.empty() ? scratch.OriginalOf(page) : RowAt(spans, layout, page, slot),
            Str("element ", head * layout.head_dim + i, " is ", a, ", the reference's ", b));
      }
      error += layout.Parts() * layout.PartElements();
    }
  }

  // -1: none is stored there.
  static int64_t RowAt(std::span<const SequenceSpan> spans, const KvLayout& layout, int32_t page,
                       int64_t slot) {
    for (const SequenceSpan& span : spans) {
      for (int32_t i = 0; i < span.num_rows; ++i) {
        const int64_t position = span.first_position + i;
        if (span.pages[position / layout.page_size] == page &&
            position % layout.page_size == slot) {
          return span.first_row + i;
        }
      }
    }
    return -1;
  }

  void CompareFields(std::string_view op, const Twins& twins) {
    const float* error = reference_.tolerances().fields.data();
    int64_t row = 0;
    for (const auto& [is, should] : twins.Fields()) {
      for (size_t i = 0; i < std::min(is.size(), should.size()); ++i) {
        if (!Differs(is[i], should[i], error[i])) continue;
        return Find(std::string(op), row,
                    Str(FieldName(op, i), " ", is[i], ", the reference's ", should[i],
                        ", tolerance ", error[i]));
      }
      error += should.size();
      ++row;
    }
  }
  static std::string_view FieldName(std::string_view op, size_t field) {
    static constexpr std::string_view kSample[] = {
        "token", "log probability", "the target's log probability", "number of top tokens"};
    static constexpr std::string_view kShard[] = {"sum", "maximum", "the target's logit",
                                                  "number of top tokens", "number of candidates"};
    const std::span<const std::string_view> names =
        op == "Sample" ? std::span<const std::string_view>(kSample) : kShard;
    return field < names.size() ? names[field] : "top token or candidate";
  }

  TolerantReference reference_;
  OpCheck& check_;
  const int stage_;
  const int rank_;
  Weights weights_;
  int64_t layer_ = -1;
  int64_t op_ = 0;
};

void CheckingBackend::Gather(Tensor x, std::span<const int32_t> rows, Tensor out) {
  RunTwice("Gather", &Backend::Gather, x, rows, out);
}

void CheckingBackend::Copy(Tensor x, Tensor out) { RunTwice("Copy", &Backend::Copy, x, out); }

void CheckingBackend::CopyPages(const KvLayout& layout, std::byte* pages,
                                std::span<const PageCopy> copies) {
  if (!Next()) return ForwardingBackend::CopyPages(layout, pages, copies);
  ScratchPages scratch(layout, pages);
  std::vector<PageCopy> there;
  for (const PageCopy& copy : copies) {
    const int32_t from = scratch.Add(copy.from);
    there.push_back({from, scratch.Add(copy.to)});
  }
  ForwardingBackend::CopyPages(layout, pages, copies);
  reference_.CopyPages(scratch.layout(), scratch.data(), there);
  CompareCache("CopyPages", scratch, {});
}

}  // namespace

CheckedRank CheckOps(std::unique_ptr<Backend> below, ComputeMode compute, OpCheck& check, int stage,
                     int rank) {
  auto backend = std::make_unique<CheckingBackend>(std::move(below), compute, check, stage, rank);
  CheckedBackend* const checked = backend.get();
  return {std::move(backend), checked};
}

}  // namespace treadle
