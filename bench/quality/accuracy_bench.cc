#include "bench/quality/accuracy_bench.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/formats/quantize.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

constexpr int64_t kTile = TeacherForcedModel::kTileRows;

struct RowComparison {
  double kl = 0;
  bool argmax_equal = false;
  double loss_reference = 0, loss = 0;  // of the next token
};

// `next` is the token after the row, or -1. With S and T the sums of exponentials, the divergence
// sum p (log p - log q) is sum p (a - b) - (log S - log T).
RowComparison CompareRows(std::span<const float> reference, std::span<const float> other,
                          int32_t next) {
  const auto top_a = std::max_element(reference.begin(), reference.end());
  const auto top_b = std::max_element(other.begin(), other.end());
  double sum_a = 0, sum_b = 0, weighted = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const float a = std::exp(reference[i] - *top_a);
    sum_a += a;
    sum_b += std::exp(other[i] - *top_b);
    weighted += static_cast<double>(a) * (static_cast<double>(reference[i]) - other[i]);
  }
  const double norm_a = *top_a + std::log(sum_a), norm_b = *top_b + std::log(sum_b);
  RowComparison row;
  row.kl = weighted / sum_a - (norm_a - norm_b);
  row.argmax_equal = top_a - reference.begin() == top_b - other.begin();
  if (next >= 0) {
    row.loss_reference = norm_a - reference[next];
    row.loss = norm_b - other[next];
  }
  return row;
}

AccuracyReport Summarize(std::span<const RowComparison> rows, int64_t windows) {
  AccuracyReport report;
  report.positions = static_cast<int64_t>(rows.size());
  const auto positions = static_cast<double>(rows.size());
  std::vector<double> divergences;
  double equal = 0, loss_reference = 0, loss = 0;
  for (const RowComparison& row : rows) {
    divergences.push_back(row.kl);
    report.mean_kl += row.kl / positions;
    equal += row.argmax_equal;
    loss_reference += row.loss_reference;
    loss += row.loss;
  }
  double squares = 0;
  for (const double kl : divergences) squares += (kl - report.mean_kl) * (kl - report.mean_kl);
  report.kl_error = std::sqrt(squares / positions / std::max(positions - 1, 1.0));
  std::sort(divergences.begin(), divergences.end());
  report.p99_kl = divergences[divergences.size() * 99 / 100];
  report.max_kl = divergences.back();
  report.argmax_equal = equal / positions;
  // The last position of a window predicts nothing that we know.
  const double scored = positions - static_cast<double>(windows);
  report.perplexity_reference = std::exp(loss_reference / scored);
  report.perplexity = std::exp(loss / scored);
  return report;
}

absl::StatusOr<double> BitsPerWeight(const QuantizeSpec& spec, int64_t n, int64_t k) {
  // Any values do; these have no block of zeros.
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) - 125;
  const ParallelFor here = [](int64_t count, const auto& body) { body(0, count); };
  TREADLE_ASSIGN_OR_RETURN(const QuantizedMatrix matrix, Quantize(spec, values, n, k, here));
  return matrix.BitsPerWeight();
}

absl::StatusOr<double> StoredBits(const StoredTensor& tensor) {
  double bits = 8.0 * static_cast<double>(tensor.bytes);
  if (!tensor.constants) return bits;
  TREADLE_ASSIGN_OR_RETURN(const MatrixConstants constants, tensor.constants());
  return bits + 32.0 * static_cast<double>(constants.scales.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<AccuracyReference>> AccuracyReference::Create(
    const Checkpoint& checkpoint, std::span<const int32_t> tokens, const AccuracyOptions& options,
    const ProgressCallback& progress) {
  const int64_t used = std::min<int64_t>(static_cast<int64_t>(tokens.size()), options.max_tokens);
  const int64_t context = checkpoint.config().context;
  if (options.window < 2 || options.window > context || used < options.window) {
    return InvalidArgument("window ", options.window, " over ", used, " tokens: expected 2 to ",
                           context, " and at least one whole window of text");
  }
  std::unique_ptr<AccuracyReference> out(new AccuracyReference());
  out->window_ = options.window;
  out->tokens_.assign(tokens.begin(), tokens.begin() + used / options.window * options.window);
  CpuBackendOptions cpu;
  cpu.compute = ComputeMode::kExact;
  cpu.threads = options.threads;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  TeacherForcedModel::Options exact = {.window = options.window, .kv_dtype = DType::kF32};
  exact.load.threads = options.threads;
  TREADLE_ASSIGN_OR_RETURN(out->model_,
                           TeacherForcedModel::Create(checkpoint, std::move(backend), exact));
  out->hidden_.resize(out->tokens_.size() * static_cast<size_t>(out->model_->hidden_size()));
  const std::span<const int32_t> text = out->tokens_;
  for (int64_t w = 0; w < out->windows(); ++w) {
    out->model_->Forward(text.subspan(w * out->window_, out->window_), out->Hidden(w));
    if (progress) progress(static_cast<double>(w + 1) / static_cast<double>(out->windows()));
  }
  return out;
}

Tensor AccuracyReference::Hidden(int64_t w) {
  const int64_t cols = model_->hidden_size();
  return DenseTensor(hidden_.data() + w * window_ * cols, DType::kF32, window_, cols);
}

AccuracyReport AccuracyReference::Compare(TeacherForcedModel& variant,
                                          const ProgressCallback& progress) {
  TREADLE_CHECK(variant.vocab() == model_->vocab());
  const auto vocab = static_cast<size_t>(model_->vocab());
  const std::span<const int32_t> text = tokens_;
  std::vector<float> storage(static_cast<size_t>(window_ * variant.hidden_size()));
  const Tensor hidden = DenseTensor(storage.data(), DType::kF32, window_, variant.hidden_size());
  std::vector<RowComparison> rows(tokens_.size());
  for (int64_t w = 0; w < windows(); ++w) {
    variant.Forward(text.subspan(w * window_, window_), hidden);
    for (int64_t begin = 0; begin < window_; begin += kTile) {
      const int64_t count = std::min(kTile, window_ - begin);
      const Tensor a = model_->Head(Hidden(w).Rows(begin, count));
      const Tensor b = variant.Head(hidden.Rows(begin, count));
      variant.Rows(count, [&](int64_t row) {
        const int64_t at = w * window_ + begin + row;
        const int32_t next = begin + row + 1 < window_ ? text[at + 1] : -1;
        rows[at] = CompareRows({a.Row<float>(row), vocab}, {b.Row<float>(row), vocab}, next);
      });
    }
    if (progress) progress(static_cast<double>(w + 1) / static_cast<double>(windows()));
  }
  return Summarize(rows, windows());
}

absl::StatusOr<WeightBits> CountWeightBits(const Checkpoint& checkpoint, const WeightPlan& plan) {
  const ModelConfig& config = checkpoint.config();
  std::map<std::tuple<std::string, int64_t, int64_t>, double> known;
  WeightBits sum;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    int64_t count = 1;
    for (const int64_t extent : tensor.shape) count *= extent;
    const bool matrix = tensor.shape.size() == 2;
    const QuantizeSpec* spec = matrix ? plan.For(tensor, checkpoint) : nullptr;
    if (spec == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(const double bits, StoredBits(tensor));
      sum.kept += count;
      sum.kept_bits += bits;
      continue;
    }
    int64_t n = tensor.shape[0], k = tensor.shape[1];
    const bool transposed = checkpoint.kind() == Checkpoint::Kind::kHuggingFace &&
                            TransposedInFolder(config, tensor) && !tensor.constants;
    if (transposed) std::swap(n, k);
    const auto key = std::make_tuple(spec->name, n, k);
    if (!known.contains(key)) {
      TREADLE_ASSIGN_OR_RETURN(known[key], BitsPerWeight(*spec, n, k));
    }
    sum.converted += count;
    sum.converted_bits += known[key] * static_cast<double>(count);
  }
  return sum;
}

nlohmann::ordered_json ToJson(const AccuracyReport& report) {
  return {{"positions", report.positions},
          {"mean_kl", report.mean_kl},
          {"kl_error", report.kl_error},
          {"p99_kl", report.p99_kl},
          {"max_kl", report.max_kl},
          {"argmax_equal", report.argmax_equal},
          {"perplexity_exact", report.perplexity_reference},
          {"perplexity", report.perplexity}};
}

std::string ToTable(const AccuracyReport& report) {
  return absl::StrFormat(
      "positions %d\nKL divergence from exact: mean %.2e +/- %.1e, 99th percentile %.2e, worst "
      "%.2e\nargmax equal %.2f %%\nperplexity %.4f (exact %.4f)\n",
      report.positions, report.mean_kl, report.kl_error, report.p99_kl, report.max_kl,
      report.argmax_equal * 100, report.perplexity, report.perplexity_reference);
}

}  // namespace treadle
