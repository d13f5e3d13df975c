#include "bench/quality/perplexity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr int64_t kUsualContext[] = {2048, 512};  // by protocol

// Mean and variance of the losses so far (Welford's recurrence).
class LossStatistics {
 public:
  void Add(double loss) {
    ++count_;
    const double delta = loss - mean_;
    mean_ += delta / static_cast<double>(count_);
    squares_ += delta * (loss - mean_);
  }
  double mean() const { return mean_; }
  double standard_error() const {
    const auto count = static_cast<double>(count_);
    return count_ < 2 ? 0 : std::sqrt(squares_ / count / (count - 1));
  }

 private:
  int64_t count_ = 0;
  double mean_ = 0;
  double squares_ = 0;
};

}  // namespace

absl::StatusOr<PerplexityPlan> PlanPerplexity(PerplexityProtocol protocol, int64_t context,
                                              int64_t model_context, int64_t tokens,
                                              int64_t max_tokens) {
  const bool llama_cpp = protocol == PerplexityProtocol::kLlamaCpp;
  PerplexityPlan plan;
  plan.protocol = protocol;
  plan.context =
      context > 0 ? context : std::min(kUsualContext[static_cast<size_t>(protocol)], model_context);
  const int64_t least = llama_cpp ? 4 : 2;
  if (plan.context < least || plan.context > model_context) {
    return InvalidArgument("--context is ", plan.context, ", expected ", least, " to ",
                           model_context, ", what the model allows");
  }
  plan.first_predicted = llama_cpp ? plan.context / 2 + 1 : 1;
  const int64_t used = max_tokens > 0 ? std::min(tokens, max_tokens) : tokens;
  plan.windows = used / plan.context;
  const int64_t least_windows = llama_cpp ? 2 : 1;
  if (plan.windows < least_windows) {
    return InvalidArgument("the text is too short: ", used, " tokens, expected at least ",
                           least_windows * plan.context, " (", least_windows, " x --context ",
                           plan.context, ")");
  }
  return plan;
}

double PerplexityReport::perplexity() const { return std::exp(mean_loss); }
double PerplexityReport::low() const { return std::exp(mean_loss - 1.96 * standard_error); }
double PerplexityReport::high() const { return std::exp(mean_loss + 1.96 * standard_error); }

PerplexityReport MeasurePerplexity(TeacherForcedModel& model, std::span<const int32_t> tokens,
                                   const PerplexityPlan& plan, int32_t bos,
                                   const PerplexityCallbacks& callbacks) {
  const auto start = std::chrono::steady_clock::now();
  constexpr int64_t kTile = TeacherForcedModel::kTileRows;
  std::vector<float> storage(static_cast<size_t>(plan.context * model.hidden_size()));
  const Tensor hidden = DenseTensor(storage.data(), DType::kF32, plan.context, model.hidden_size());
  LossStatistics losses;
  for (int64_t window = 0; window < plan.windows; ++window) {
    const std::span<const int32_t> text = tokens.subspan(window * plan.context, plan.context);
    std::vector<int32_t> input(text.begin(), text.end());
    if (plan.protocol == PerplexityProtocol::kLlamaCpp && bos >= 0) input[0] = bos;
    model.Forward(input, hidden);
    double log_probabilities[kTile];
    for (int64_t at = plan.first_predicted; at < plan.context; at += kTile) {
      const int64_t count = std::min(kTile, plan.context - at);
      const Tensor logits = model.Head(hidden.Rows(at - 1, count));
      model.Rows(count, [&](int64_t row) {
        const std::span<const float> values(logits.Row<float>(row), model.vocab());
        log_probabilities[row] = values[text[at + row]] - LogSumExp(values);
      });
      for (int64_t row = 0; row < count; ++row) {
        losses.Add(-log_probabilities[row]);
        if (callbacks.scored) {
          callbacks.scored({window, at + row, text[at + row], log_probabilities[row]});
        }
      }
      if (callbacks.progress) {
        const auto done = static_cast<double>(window * plan.context + at + count);
        callbacks.progress(done / static_cast<double>(plan.windows * plan.context));
      }
    }
  }
  return {
      .plan = plan,
      .mean_loss = losses.mean(),
      .standard_error = losses.standard_error(),
      .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

nlohmann::ordered_json ToJson(const PerplexityReport& report) {
  const PerplexityPlan& plan = report.plan;
  return {{"protocol", WordOf(kPerplexityProtocols, plan.protocol)},
          {"context", plan.context},
          {"windows", plan.windows},
          {"scored_tokens", plan.scored()},
          {"perplexity", report.perplexity()},
          {"perplexity_error", report.perplexity_error()},
          {"confidence_95", {report.low(), report.high()}},
          {"mean_loss", report.mean_loss},
          {"standard_error", report.standard_error},
          {"seconds", report.seconds}};
}

std::string ToTable(const PerplexityReport& report) {
  const PerplexityPlan& plan = report.plan;
  return absl::StrFormat(
      "perplexity %.4f +/- %.4f (95 %% confidence: %.4f to %.4f)\n"
      "protocol %s: %d windows of %d tokens, %d tokens scored, %.4f nats each; %.1f s\n",
      report.perplexity(), report.perplexity_error(), report.low(), report.high(),
      WordOf(kPerplexityProtocols, plan.protocol), plan.windows, plan.context, plan.scored(),
      report.mean_loss, report.seconds);
}

}  // namespace treadle
