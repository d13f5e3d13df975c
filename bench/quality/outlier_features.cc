#include "bench/quality/outlier_features.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/quality/teacher_forcing.h"
#include "kernels/forwarding_backend.h"

namespace treadle {
namespace {

// Products of a layer in the order of every architecture here: the projections of Q, K and V; the
// attention's output; expansion; contraction.
constexpr int64_t kProducts = 4;

// Statistics of the dimensions of one OutlierInput.
class Dimensions {
 public:
  Dimensions(int64_t layers, float threshold) : threshold_(threshold), in_layer_(layers) {}

  void Add(int64_t layer, const Tensor& x) {
    const auto size = static_cast<size_t>(x.cols);
    largest_.resize(size);
    positions_.resize(size);
    for (std::vector<bool>& layer : in_layer_) layer.resize(size);
    std::vector<bool>& here = in_layer_[static_cast<size_t>(layer)];
    for (int64_t row = 0; row < x.rows; ++row) {
      const float* values = x.Row<float>(row);
      for (size_t i = 0; i < largest_.size(); ++i) {
        const float magnitude = std::fabs(values[i]);
        if (magnitude < threshold_) continue;
        largest_[i] = std::fmax(largest_[i], magnitude);
        ++positions_[i];
        here[i] = true;
      }
    }
    rows_ += x.rows;
  }

  void Append(OutlierInput input, std::vector<OutlierFeature>& features) const {
    for (size_t i = 0; i < largest_.size(); ++i) {
      if (positions_[i] == 0) continue;
      const auto layers = std::ranges::count_if(
          in_layer_, [&](const std::vector<bool>& layer) { return layer[i]; });
      features.push_back(
          {.input = input,
           .dimension = static_cast<int64_t>(i),
           .largest = largest_[i],
           .layers = static_cast<double>(layers) / static_cast<double>(in_layer_.size()),
           .positions = static_cast<double>(positions_[i]) / static_cast<double>(rows_)});
    }
  }
  double outliers() const { return std::accumulate(positions_.begin(), positions_.end(), 0.0); }
  double elements() const {
    return static_cast<double>(rows_) * static_cast<double>(largest_.size());
  }

 private:
  const float threshold_;
  std::vector<std::vector<bool>> in_layer_;  // [layers, dimensions]
  std::vector<float> largest_;               // [dimensions]
  std::vector<int64_t> positions_;           // [dimensions]
  int64_t rows_ = 0;                         // of all inputs
};

// Looks at what is multiplied on its way down.
class ObservingBackend : public ForwardingBackend {
 public:
  ObservingBackend(std::unique_ptr<Backend> below, int64_t layers, float threshold)
      : ForwardingBackend(std::move(below)),
        layers_(layers),
        hidden_(layers, threshold),
        attention_output_(layers, threshold) {}

  // MatMul reads floats.
  DType InputType(std::span<const PackedMatrix* const>) const override { return DType::kF32; }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    const int64_t layer = product_ / kProducts % layers_;
    const int64_t which = product_++ % kProducts;
    if (which == 1) {
      attention_output_.Add(layer, x);
    } else if (which < kProducts - 1) {
      hidden_.Add(layer, x);
    }
    ForwardingBackend::MatMul(x, projections);
  }

  // Whole forward passes, without the head.
  bool complete() const { return product_ % (kProducts * layers_) == 0; }
  const Dimensions& hidden() const { return hidden_; }
  const Dimensions& attention_output() const { return attention_output_; }

 private:
  const int64_t layers_;
  Dimensions hidden_;
  Dimensions attention_output_;
  int64_t product_ = 0;
};

OutlierReport ReportOf(const ObservingBackend& observed, const OutlierOptions& options) {
  OutlierReport report;
  report.threshold = options.threshold;
  const Dimensions& hidden = observed.hidden();
  const Dimensions& attention = observed.attention_output();
  report.share =
      (hidden.outliers() + attention.outliers()) / (hidden.elements() + attention.elements());
  hidden.Append(OutlierInput::kHidden, report.features);
  attention.Append(OutlierInput::kAttentionOutput, report.features);
  std::ranges::stable_sort(report.features, std::greater<>(), &OutlierFeature::largest);
  return report;
}

}  // namespace

absl::StatusOr<OutlierReport> FindOutlierFeatures(const Checkpoint& checkpoint,
                                                  std::unique_ptr<Backend> backend,
                                                  std::span<const int32_t> tokens,
                                                  const OutlierOptions& options) {
  if (tokens.empty()) return InvalidArgument("no text to look for outlier features in");
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(options.max_tokens)));
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t window = std::min({options.window, checkpoint.config().context, count});
  auto observing = std::make_unique<ObservingBackend>(
      std::move(backend), checkpoint.config().layers, options.threshold);
  const ObservingBackend& observed = *observing;
  TeacherForcedModel::Options reading = {.window = window, .chunk = window};
  reading.load.threads = options.threads;
  TREADLE_ASSIGN_OR_RETURN(const auto model,
                           TeacherForcedModel::Create(checkpoint, std::move(observing), reading));
  std::vector<float> storage(static_cast<size_t>(window * model->hidden_size()));
  for (int64_t begin = 0; begin < count; begin += window) {
    const int64_t some = std::min(window, count - begin);
    model->Forward(tokens.subspan(begin, some),
                   DenseTensor(storage.data(), DType::kF32, some, model->hidden_size()));
    TREADLE_CHECK(observed.complete());
    if (options.progress) {
      options.progress(static_cast<double>(begin + some) / static_cast<double>(count));
    }
  }
  OutlierReport report = ReportOf(observed, options);
  report.tokens = count;
  return report;
}

nlohmann::ordered_json ToJson(const OutlierReport& report) {
  nlohmann::ordered_json json = {{"threshold", report.threshold},
                                 {"tokens", report.tokens},
                                 {"share_of_elements", report.share},
                                 {"features", nlohmann::ordered_json::array()}};
  for (const OutlierFeature& feature : report.features) {
    json["features"].push_back({{"input", kOutlierInputNames[static_cast<size_t>(feature.input)]},
                                {"dimension", feature.dimension},
                                {"largest", feature.largest},
                                {"layers", feature.layers},
                                {"positions", feature.positions},
                                {"systematic", feature.systematic()}});
  }
  return json;
}

std::string ToTable(const OutlierReport& report) {
  constexpr size_t kMaxRows = 20;
  const auto systematic = std::ranges::count_if(report.features, &OutlierFeature::systematic);
  std::string text = absl::StrFormat(
      "outlier features (%.4g or more, on %d tokens): %d, of which %d in at least 25 %% of layers "
      "and 6 %% of positions; %.4g %% of activations\n",
      report.threshold, report.tokens, report.features.size(), systematic, 100 * report.share);
  if (report.features.empty()) return text;
  absl::StrAppendFormat(&text, "%-16s  %9s  %8s  %8s  %9s\n", "input", "dimension", "largest",
                        "layers", "positions");
  for (size_t i = 0; i < std::min(report.features.size(), kMaxRows); ++i) {
    const OutlierFeature& feature = report.features[i];
    absl::StrAppendFormat(&text, "%-16s  %9d  %8.4g  %6.1f %%  %7.2f %%\n",
                          kOutlierInputNames[static_cast<size_t>(feature.input)], feature.dimension,
                          feature.largest, 100 * feature.layers, 100 * feature.positions);
  }
  if (report.features.size() > kMaxRows) {
    text += Str("and ", report.features.size() - kMaxRows, " more (all of them: --json)\n");
  }
  return text;
}

}  // namespace treadle
