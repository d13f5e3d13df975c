#include "training/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/status.h"
#include "kernels/sampling.h"
#include "training/ops/cpu_gradients.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 64;
constexpr int64_t kLogitBytes = 32 << 20;  // of one pass through the head
constexpr int64_t kMaxHeadRows = 512;
// Words of CounterBits beside those that A is drawn with.
constexpr uint32_t kShuffleStream = 0xffff'ffff;

int64_t PagesOf(int64_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

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
    trainer->adapter_ = TrainedAdapter::Create(checkpoint, *trainer->decoder_, *trainer->tape_,
                                               options.lora, options.seed);
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
  layout_ = {.kv_heads = config.kv_heads,
             .head_dim = config.head_dim,
             .page_size = kPageSize,
             .num_pages = options_.batch_size * PagesOf(MaxPositions()),
             .dtype = DType::kF32,
             .key_order = tape_->key_order()};
  const std::pair<Buffer*, int64_t> buffers[] = {{&hidden_, tokens * config.hidden * 4},
                                                 {&pages_, layout_.num_pages * layout_.PageBytes()},
                                                 {&head_in_, head_rows_ * config.hidden * 4},
                                                 {&logits_, head_rows_ * config.vocab * 4}};
  for (const auto& [buffer, bytes] : buffers) {
    TREADLE_ASSIGN_OR_RETURN(*buffer, tape_->Allocate(static_cast<size_t>(bytes)));
  }
  decoder_->ObserveLayers([this](int64_t layer) {
    const int64_t layers = decoder_->config().layers;
    if (layer == layers) return;  // the head
    const int64_t floats = static_cast<int64_t>(inputs_.size()) / layers;
    CopyFloats(reinterpret_cast<const float*>(hidden_.data()), floats,
               inputs_.data() + layer * floats);
  });
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
  std::ranges::fill(adapter_->gradients(), 0.0f);
  for (int64_t i = 0; i < of_step; i += options_.batch_size) {
    TREADLE_ASSIGN_OR_RETURN(
        const double loss,
        RunBatch(std::span(chosen).subspan(static_cast<size_t>(i),
                                           static_cast<size_t>(options_.batch_size)),
                 1.0f / static_cast<float>(counted)));
    report.loss += loss / static_cast<double>(counted);
  }
  if (!std::isfinite(report.loss)) {
    return Internal("step ", step_ + 1, ": the loss is no number any longer; a smaller ",
                    "--learning-rate may help");
  }
  report.learning_rate = LearningRateAt(options_.optimizer, step_);
  report.gradient_norm = optimizer_->Step(step_, adapter_->values(), adapter_->gradients());
  adapter_->Refresh();
  report.step = ++step_;
  return report;
}

absl::StatusOr<double> Trainer::RunBatch(std::span<const Example* const> batch, float scale) {
  const ModelConfig& config = decoder_->config();
  std::vector<int32_t> tokens, positions, pages(static_cast<size_t>(layout_.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<SequenceSpan> sequences;
  int64_t page = 0;
  for (const Example* example : batch) {
    const auto length = static_cast<int32_t>(example->tokens.size());
    sequences.push_back({.first_row = static_cast<int32_t>(tokens.size()),
                         .num_rows = length,
                         .first_position = 0,
                         .pages = pages.data() + page});
    page += PagesOf(length);
    tokens.insert(tokens.end(), example->tokens.begin(), example->tokens.end());
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  const Adapter* const soft_prompt = adapter_->soft_prompt();
  const std::vector<const Adapter*> adapters(soft_prompt == nullptr ? 0 : tokens.size(),
                                             soft_prompt);
  const Batch flat = {tokens, positions, sequences, {}, adapters};
  const std::vector<std::byte*> layers(static_cast<size_t>(config.layers), pages_.data());
  const KvPages kv = {layout_, layers};
  const auto rows = static_cast<int64_t>(tokens.size());
  const Tensor hidden = DenseTensor(hidden_.data(), DType::kF32, rows, config.hidden);
  const int64_t floats = rows * config.hidden;
  inputs_.resize(static_cast<size_t>(config.layers * floats));
  TREADLE_RETURN_IF_ERROR(decoder_->Forward(flat, kv, nullptr, hidden));
  const double loss = RunHead(batch, hidden, scale);
  for (int64_t layer = config.layers - 1; layer >= 0; --layer) {
    CopyFloats(inputs_.data() + layer * floats, floats, hidden.Row<float>(0));
    tape_->Record();
    TREADLE_RETURN_IF_ERROR(
        decoder_->RunLayer(static_cast<size_t>(layer), flat, kv, nullptr, hidden));
    tape_->Backward();
  }
  adapter_->AddGradient(tape_->Gradient(hidden), sequences);
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
