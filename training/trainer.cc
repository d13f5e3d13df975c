#include "training/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/status.h"
#include "kernels/sampling.h"
#include "training/ops/cpu_gradients.h"

namespace treadle {
namespace {

constexpr int64_t kLogitBytes = 32 << 20;  // of one pass through the head
constexpr int64_t kMaxHeadRows = 512;
// Words of CounterBits beside those that A is drawn with.
constexpr uint32_t kShuffleStream = 0xffff'ffff;
constexpr int kMaxAttempts = 8;  // of a step

void CopyFloats(const float* from, int64_t count, float* to) { std::copy_n(from, count, to); }

}  // namespace

int64_t StepsOf(double epochs, size_t examples, const TrainingOptions& options) {
  const auto of_step = static_cast<double>(options.batch_size * options.accumulation);
  return std::max<int64_t>(
      1, std::llround(std::ceil(epochs * static_cast<double>(examples) / of_step)));
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const Checkpoint& checkpoint,
                                                         std::vector<Example> examples,
                                                         const TrainingOptions& options,
                                                         const std::string& folder) {
  TREADLE_RETURN_IF_ERROR(CheckTrainable(checkpoint, options.lora));
  const ModelConfig& config = checkpoint.config();
  const int64_t virtual_tokens = options.soft_prompt.virtual_tokens;
  TREADLE_CHECK((virtual_tokens > 0) == (options.lora.rank == 0));
  if (options.max_length > config.context - virtual_tokens) {
    return InvalidArgument("--max-length is ", options.max_length, ", expected at most ",
                           config.context - virtual_tokens, ", the model's context",
                           virtual_tokens > 0 ? " without --soft-prompt" : "");
  }
  std::unique_ptr<Trainer> trainer(new Trainer(options));
  trainer->examples_ = std::move(examples);
  for (Example& example : trainer->examples_) {
    example.tokens.insert(example.tokens.begin(), static_cast<size_t>(virtual_tokens), 0);
    example.counts.insert(example.counts.begin(), static_cast<size_t>(virtual_tokens), false);
  }
  TREADLE_ASSIGN_OR_RETURN(const CpuIsa isa, ChooseIsa());
  auto cpu = std::make_unique<CpuOps>(options.threads > 0 ? options.threads : UsableCpus(),
                                      /*pin=*/false, 0, isa, ComputeMode::kExact);
  ThreadPool& pool = cpu->pool();
  auto gradients = CreateCpuGradients(*cpu);
  trainer->tape_ = std::make_unique<Tape>(std::move(cpu), std::move(gradients));
  trainer->head_rows_ = std::clamp<int64_t>(kLogitBytes / (4 * config.vocab), 16, kMaxHeadRows);
  LoadOptions load;
  load.max_batch_tokens = options.batch_size * trainer->MaxPositions();
  load.max_head_rows = trainer->head_rows_;
  load.max_context = trainer->MaxPositions();
  load.without_layers = static_cast<bool>(options.connect);
  load.weights = options.weights;
  load.threads = options.threads;
  load.progress = options.loading;
  TREADLE_ASSIGN_OR_RETURN(trainer->model_, Model::Load(checkpoint, *trainer->tape_, load));
  trainer->decoder_ = static_cast<Decoder*>(trainer->model_.get());
  if (virtual_tokens > 0) {
    TREADLE_ASSIGN_OR_RETURN(trainer->adapter_,
                             TrainedAdapter::CreateSoftPrompt(*trainer->decoder_, *trainer->tape_,
                                                              options.soft_prompt, options.seed));
  } else {
    trainer->adapter_ =
        TrainedAdapter::Create(config, {0, config.layers}, options.lora, options.seed);
  }
  TREADLE_ASSIGN_OR_RETURN(
      trainer->optimizer_,
      AdamW::Create(options.optimizer, trainer->adapter_->Tensors(), folder, pool));
  TREADLE_RETURN_IF_ERROR(trainer->Allocate());
  return trainer;
}

absl::Status Trainer::Allocate() {
  const ModelConfig& config = decoder_->config();
  const int64_t tokens = options_.batch_size * MaxPositions();
  const std::pair<Buffer*, int64_t> buffers[] = {{&hidden_, tokens * config.hidden * 4},
                                                 {&head_in_, head_rows_ * config.hidden * 4},
                                                 {&logits_, head_rows_ * config.vocab * 4}};
  for (const auto& [buffer, bytes] : buffers) {
    TREADLE_ASSIGN_OR_RETURN(*buffer, tape_->Allocate(static_cast<size_t>(bytes)));
  }
  if (options_.connect) {
    TREADLE_ASSIGN_OR_RETURN(layers_, options_.connect(*adapter_));
    return absl::OkStatus();
  }
  const auto room = FrozenLayers::Room::For(options_.batch_size, MaxPositions());
  TREADLE_ASSIGN_OR_RETURN(auto layers, FrozenLayers::Create(*tape_, *decoder_, room));
  layers_ = std::make_unique<LocalLayers>(std::move(layers), *adapter_);
  return absl::OkStatus();
}

const Example& Trainer::ExampleAt(int64_t number) {
  const auto count = static_cast<int64_t>(examples_.size());
  if (const int64_t epoch = number / count; epoch != epoch_) {
    epoch_ = epoch;
    order_.resize(examples_.size());
    std::iota(order_.begin(), order_.end(), 0);
    for (int64_t i = options_.keep_order ? 0 : count - 1; i > 0; --i) {  // Fisher and Yates
      const double uniform = CounterUniform(options_.seed, kShuffleStream, epoch * count + i);
      std::swap(order_[i], order_[static_cast<int64_t>(uniform * static_cast<double>(i + 1))]);
    }
  }
  return examples_[order_[number % count]];
}

absl::StatusOr<StepReport> Trainer::Step() {
  const int64_t of_step = options_.batch_size * options_.accumulation;
  std::vector<const Example*> chosen;
  StepReport report;
  int64_t counted = 0;
  for (int64_t i = 0; i < of_step; ++i) {
    chosen.push_back(&ExampleAt(step_ * of_step + i));
    counted += chosen.back()->Counted();
    report.tokens += std::ssize(chosen.back()->tokens);
  }
  const float scale = 1.0f / static_cast<float>(counted);
  absl::StatusOr<double> loss = RunBatches(chosen, scale);
  for (int i = 1; absl::IsUnavailable(loss.status()) && i < kMaxAttempts; ++i) {
    loss = RunBatches(chosen, scale);
  }
  TREADLE_RETURN_IF_ERROR(loss.status());
  report.loss = *loss / static_cast<double>(counted);
  if (!std::isfinite(report.loss)) {
    return Internal("step ", step_ + 1, ": the loss is no number any longer; a smaller ",
                    "--learning-rate may help");
  }
  report.learning_rate = LearningRateAt(options_.optimizer, step_);
  report.gradient_norm = optimizer_->Step(step_, adapter_->values(), adapter_->gradients());
  report.step = ++step_;
  return report;
}

absl::StatusOr<double> Trainer::RunBatches(std::span<const Example* const> examples, float scale) {
  adapter_->Refresh();
  TREADLE_RETURN_IF_ERROR(layers_->BeginStep());
  const auto size = static_cast<size_t>(options_.batch_size);
  double sum = 0;
  for (size_t i = 0; i < examples.size(); i += size) {
    TREADLE_ASSIGN_OR_RETURN(const double loss, RunBatch(examples.subspan(i, size), scale));
    sum += loss;
  }
  TREADLE_RETURN_IF_ERROR(layers_->EndStep());
  return sum;
}

absl::StatusOr<double> Trainer::RunBatch(std::span<const Example* const> batch, float scale) {
  std::vector<int32_t> tokens, positions, lengths;
  for (const Example* example : batch) {
    lengths.push_back(static_cast<int32_t>(example->tokens.size()));
    tokens.insert(tokens.end(), example->tokens.begin(), example->tokens.end());
    for (int32_t i = 0; i < lengths.back(); ++i) positions.push_back(i);
  }
  const Adapter* const soft_prompt = adapter_->soft_prompt();
  const std::vector<const Adapter*> adapters(soft_prompt == nullptr ? 0 : tokens.size(),
                                             soft_prompt);
  const Tensor hidden =
      DenseTensor(hidden_.data(), DType::kF32, std::ssize(tokens), decoder_->config().hidden);
  const auto all = [](const Tensor& rows) {
    return std::span(rows.Row<float>(0), static_cast<size_t>(rows.rows * rows.cols));
  };
  TREADLE_RETURN_IF_ERROR(decoder_->Embed({tokens, positions, {}, {}, adapters}, nullptr, hidden));
  TREADLE_RETURN_IF_ERROR(layers_->Forward(lengths, all(hidden)));
  const double loss = RunHead(batch, hidden, scale);
  TREADLE_RETURN_IF_ERROR(layers_->Backward(all(tape_->Gradient(hidden))));
  adapter_->AddGradient(tape_->Gradient(hidden), lengths);
  return loss;
}

double Trainer::RunHead(std::span<const Example* const> batch, Tensor hidden, float scale) {
  std::vector<int64_t> rows;  // rows with a next token that counts
  std::vector<int32_t> targets;
  int64_t first = 0;
  for (const Example* example : batch) {
    for (size_t i = 1; i < example->tokens.size(); ++i) {
      if (!example->counts[i]) continue;
      rows.push_back(first + static_cast<int64_t>(i) - 1);
      targets.push_back(example->tokens[i]);
    }
    first += std::ssize(example->tokens);
  }
  const int64_t cols = hidden.cols;
  const Tensor dhidden = tape_->Gradient(hidden);
  std::fill_n(dhidden.Row<float>(0), hidden.rows * cols, 0.0f);
  double loss = 0;
  for (int64_t begin = 0; begin < std::ssize(rows); begin += head_rows_) {
    const int64_t count = std::min(head_rows_, std::ssize(rows) - begin);
    const Tensor in = DenseTensor(head_in_.data(), DType::kF32, count, cols);
    const Tensor logits = DenseTensor(logits_.data(), DType::kF32, count, decoder_->config().vocab);
    for (int64_t i = 0; i < count; ++i) {
      CopyFloats(hidden.Row<float>(rows[begin + i]), cols, in.Row<float>(i));
    }
    tape_->Record();
    model_->Head(in, logits);
    loss += tape_->gradients().CrossEntropy(
        logits, std::span(targets).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
        scale);
    CopyFloats(logits.Row<float>(0), count * logits.cols, tape_->Gradient(logits).Row<float>(0));
    tape_->Backward();
    const Tensor din = tape_->Gradient(in);
    for (int64_t i = 0; i < count; ++i) {
      CopyFloats(din.Row<float>(i), cols, dhidden.Row<float>(rows[begin + i]));
      std::fill_n(din.Row<float>(i), cols, 0.0f);
    }
  }
  return loss;
}

}  // namespace treadle
