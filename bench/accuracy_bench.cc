#include "bench/accuracy_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/status.h"
#include "models/model.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 64;
constexpr int64_t kHeadRows = 64;

// One model with room for one window, whose logits are taken tile by tile.
class Runner {
 public:
  static absl::StatusOr<std::unique_ptr<Runner>> Create(const Checkpoint& checkpoint,
                                                        ComputeMode compute, DType kv_dtype,
                                                        const AccuracyOptions& options) {
    auto runner = std::make_unique<Runner>();
    CpuBackendOptions backend;
    backend.compute = compute;
    backend.threads = options.threads;
    TREADLE_ASSIGN_OR_RETURN(runner->backend_, CreateCpuBackend(backend));
    LoadOptions load;
    load.max_batch_tokens = options.window;
    load.max_head_rows = kHeadRows;
    load.max_context = options.window;
    TREADLE_ASSIGN_OR_RETURN(runner->model_, Model::Load(checkpoint, *runner->backend_, load));
    const ModelConfig& config = runner->model_->config();
    runner->layout_ = {config.kv_heads, config.head_dim, kPageSize,
                       (options.window + kPageSize - 1) / kPageSize, kv_dtype};
    const size_t layer_bytes = runner->layout_.PageBytes() * runner->layout_.num_pages;
    TREADLE_ASSIGN_OR_RETURN(runner->cache_,
                             runner->backend_->Allocate(layer_bytes * config.layers));
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      runner->layers_.push_back(runner->cache_.data() + layer * layer_bytes);
    }
    TREADLE_ASSIGN_OR_RETURN(runner->hidden_, runner->backend_->Allocate(
                                                  options.window * config.hidden * sizeof(float)));
    TREADLE_ASSIGN_OR_RETURN(runner->logits_,
                             runner->backend_->Allocate(kHeadRows * config.vocab * sizeof(float)));
    return runner;
  }

  void Forward(std::span<const int32_t> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    std::vector<int32_t> positions(count), pages(layout_.num_pages);
    std::iota(positions.begin(), positions.end(), 0);
    std::iota(pages.begin(), pages.end(), 0);
    const SequenceSpan span{0, static_cast<int32_t>(count), 0, pages.data()};
    hidden_rows_ = DenseTensor(hidden_.data(), DType::kF32, count, model_->config().hidden);
    model_->Forward({tokens, positions, {&span, 1}}, {layout_, layers_}, hidden_rows_);
  }

  // Logits of rows [begin, begin + count).
  Tensor Head(int64_t begin, int64_t count) {
    const Tensor logits = DenseTensor(logits_.data(), DType::kF32, count, model_->config().vocab);
    model_->Head(hidden_rows_.Rows(begin, count), logits);
    backend_->Synchronize();
    return logits;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer cache_, hidden_, logits_;
  std::vector<std::byte*> layers_;
  Tensor hidden_rows_;
};

double LogSumExp(std::span<const float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

struct Sums {
  std::vector<double> kl;
  int64_t argmax_equal = 0;
  int64_t scored = 0;
  double loss_exact = 0, loss = 0;
};

// Adds one row; `next` is the token after it, or -1.
void Compare(std::span<const float> exact, std::span<const float> other, int32_t next, Sums& sums) {
  const double norm_exact = LogSumExp(exact), norm_other = LogSumExp(other);
  double kl = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double p = exact[i] - norm_exact, q = other[i] - norm_other;
    kl += std::exp(p) * (p - q);
  }
  sums.kl.push_back(kl);
  sums.argmax_equal += std::max_element(exact.begin(), exact.end()) - exact.begin() ==
                       std::max_element(other.begin(), other.end()) - other.begin();
  if (next < 0) return;
  ++sums.scored;
  sums.loss_exact += norm_exact - exact[next];
  sums.loss += norm_other - other[next];
}

}  // namespace

absl::StatusOr<AccuracyReport> CompareCompute(const Checkpoint& checkpoint,
                                              std::span<const int32_t> tokens,
                                              const AccuracyOptions& options) {
  const int64_t window = options.window;
  const int64_t windows =
      std::min<int64_t>(tokens.size(), options.max_tokens) / std::max<int64_t>(window, 1);
  if (window < 2 || window > checkpoint.config().context || windows < 1) {
    return InvalidArgument("window ", window, " over ", tokens.size(), " tokens: expected 2 to ",
                           checkpoint.config().context, " and at least one whole window of text");
  }
  TREADLE_ASSIGN_OR_RETURN(auto exact,
                           Runner::Create(checkpoint, ComputeMode::kExact, DType::kF32, options));
  TREADLE_ASSIGN_OR_RETURN(auto other,
                           Runner::Create(checkpoint, options.compute, options.kv_dtype, options));
  Sums sums;
  for (int64_t w = 0; w < windows; ++w) {
    const std::span<const int32_t> text = tokens.subspan(w * window, window);
    exact->Forward(text);
    other->Forward(text);
    for (int64_t begin = 0; begin < window; begin += kHeadRows) {
      const int64_t count = std::min(kHeadRows, window - begin);
      const Tensor a = exact->Head(begin, count), b = other->Head(begin, count);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t position = begin + row;
        Compare({a.Row<float>(row), static_cast<size_t>(a.cols)},
                {b.Row<float>(row), static_cast<size_t>(b.cols)},
                position + 1 < window ? text[position + 1] : -1, sums);
      }
    }
    if (options.progress) options.progress((w + 1) * window, windows * window);
  }
  AccuracyReport report;
  report.positions = static_cast<int64_t>(sums.kl.size());
  for (double kl : sums.kl) report.mean_kl += kl / static_cast<double>(report.positions);
  std::sort(sums.kl.begin(), sums.kl.end());
  report.p99_kl = sums.kl[sums.kl.size() * 99 / 100];
  report.max_kl = sums.kl.back();
  report.argmax_equal =
      static_cast<double>(sums.argmax_equal) / static_cast<double>(report.positions);
  report.perplexity_exact = std::exp(sums.loss_exact / static_cast<double>(sums.scored));
  report.perplexity = std::exp(sums.loss / static_cast<double>(sums.scored));
  return report;
}

std::string ToJson(const AccuracyReport& report) {
  return nlohmann::ordered_json{{"positions", report.positions},
                                {"mean_kl", report.mean_kl},
                                {"p99_kl", report.p99_kl},
                                {"max_kl", report.max_kl},
                                {"argmax_equal", report.argmax_equal},
                                {"perplexity_exact", report.perplexity_exact},
                                {"perplexity", report.perplexity}}
      .dump();
}

std::string ToTable(const AccuracyReport& report) {
  char text[400];
  std::snprintf(text, sizeof text,
                "positions %lld\nKL divergence from exact: mean %.2e, 99th percentile %.2e, worst "
                "%.2e\nargmax equal %.2f %%\nperplexity %.4f (exact %.4f)\n",
                static_cast<long long>(report.positions), report.mean_kl, report.p99_kl,
                report.max_kl, report.argmax_equal * 100, report.perplexity,
                report.perplexity_exact);
  return text;
}

}  // namespace treadle
