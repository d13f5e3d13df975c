#include "engine/stage.h"

#include <algorithm>
#include <chrono>

#include "kernels/status.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

// The `count` best of a result; none if count is -1 or 0.
std::vector<TokenLogprob> Best(const SampleResult& sample, int32_t count) {
  const int32_t n = std::clamp(count, 0, sample.num_top);
  return {sample.top.begin(), sample.top.begin() + n};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Stage>> Stage::Create(Backend& backend, Model& model,
                                                     int64_t max_batch_tokens,
                                                     const KvCache::Options& kv) {
  if (max_batch_tokens < 1 || max_batch_tokens > INT32_MAX) {
    return InvalidArgument("max_batch_tokens is ", max_batch_tokens, ", expected 1 to ", INT32_MAX);
  }
  TREADLE_CHECK(model.first_stage() && model.last_stage());
  TREADLE_ASSIGN_OR_RETURN(KvCache cache,
                           KvCache::Create(backend, model.config(), model.layers(), kv));
  std::unique_ptr<Stage> stage(new Stage(backend, model, max_batch_tokens, std::move(cache)));
  TREADLE_RETURN_IF_ERROR(stage->AllocateActivations(max_batch_tokens));
  return stage;
}

Stage::Stage(Backend& backend, Model& model, int64_t max_batch_tokens, KvCache cache)
    : backend_(backend),
      model_(model),
      cache_(std::move(cache)),
      sequences_({.page_size = cache_.layout().page_size,
                  .num_pages = cache_.layout().num_pages,
                  .vocab = model.config().vocab,
                  .context = model.config().context,
                  .max_batch_tokens = max_batch_tokens}),
      samples_(kMaxHeadRows) {
  const size_t tokens = static_cast<size_t>(max_batch_tokens);
  token_ids_.reserve(tokens);
  positions_.reserve(tokens);
  spans_.reserve(tokens);
  live_.reserve(tokens);
  outputs_.reserve(tokens);
  tile_rows_.reserve(kMaxHeadRows);
  sample_rows_.reserve(kMaxHeadRows);
}

absl::Status Stage::AllocateActivations(int64_t max_batch_tokens) {
  const size_t row_bytes = static_cast<size_t>(model_.config().hidden) * sizeof(float);
  const size_t logits_bytes = static_cast<size_t>(model_.config().vocab) * sizeof(float);
  TREADLE_ASSIGN_OR_RETURN(hidden_, backend_.Allocate(max_batch_tokens * row_bytes));
  TREADLE_ASSIGN_OR_RETURN(head_hidden_, backend_.Allocate(kMaxHeadRows * row_bytes));
  TREADLE_ASSIGN_OR_RETURN(logits_, backend_.Allocate(kMaxHeadRows * logits_bytes));
  return absl::OkStatus();
}

absl::StatusOr<IterationResult> Stage::Run(const IterationPlan& plan) {
  TREADLE_RETURN_IF_ERROR(sequences_.Check(plan));
  for (const SequenceId sequence : plan.releases) sequences_.Release(sequence);
  cache_.CopyPages(plan.page_copies);
  for (const SequenceStart& start : plan.starts) sequences_.Start(start);

  IterationResult result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  if (plan.steps.empty()) return result;

  const auto forward_began = SteadyClock::now();
  Flatten(plan);
  const Batch batch{token_ids_, positions_, spans_};
  model_.Forward(batch, cache_.pages(),
                 DenseTensor(hidden_.data(), DType::kF32, static_cast<int64_t>(token_ids_.size()),
                             model_.config().hidden));
  backend_.Synchronize();
  result.timings.compute = SecondsSince(forward_began);

  const auto sample_began = SteadyClock::now();
  CollectOutputs(plan);
  result.steps.resize(plan.steps.size());
  for (size_t i = 0; i < plan.steps.size(); ++i) result.steps[i].sequence = plan.steps[i].sequence;
  const std::span<const OutputRow> outputs = outputs_;
  for (size_t begin = 0; begin < outputs.size(); begin += kMaxHeadRows) {
    const size_t rows = std::min<size_t>(kMaxHeadRows, outputs.size() - begin);
    RunOutputs(plan, outputs.subspan(begin, rows), result);
  }
  result.timings.sample = SecondsSince(sample_began);
  return result;
}

// Lays the tokens of all steps one after the other, in the plan's order.
void Stage::Flatten(const IterationPlan& plan) {
  token_ids_.clear();
  positions_.clear();
  spans_.clear();
  live_.clear();
  for (const Step& step : plan.steps) {
    LiveSequence& sequence = sequences_.At(step.sequence);
    const int32_t previous = sequence.previous_sample();
    sequence.Enter(step.first_position,
                   step.tokens.empty() ? std::span(&previous, 1) : std::span(step.tokens));
    spans_.push_back({.first_row = static_cast<int32_t>(token_ids_.size()),
                      .num_rows = step.num_tokens,
                      .first_position = step.first_position,
                      .pages = sequence.start().pages.data()});
    live_.push_back(&sequence);
    const std::span<const int32_t> ids = sequence.ids().subspan(step.first_position);
    token_ids_.insert(token_ids_.end(), ids.begin(), ids.end());
    for (int32_t row = 0; row < step.num_tokens; ++row) {
      positions_.push_back(step.first_position + row);
    }
  }
}

void Stage::CollectOutputs(const IterationPlan& plan) {
  outputs_.clear();
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    const int32_t last = step.num_tokens - 1;
    for (int32_t row = step.prompt_logprobs >= 0 ? 0 : last; row <= last; ++row) {
      OutputRow output{.row = spans_[i].first_row + row, .step = static_cast<int32_t>(i)};
      output.sample = step.sample && row == last;
      if (step.prompt_logprobs >= 0) {
        output.target = row == last ? step.next_token : token_ids_[output.row + 1];
      }
      if (output.sample || output.target >= 0) outputs_.push_back(output);
    }
  }
}

// The token after the row has the position that follows the sequence's entered ids.
SampleRow Stage::MakeSampleRow(const Step& step, const OutputRow& output) const {
  SampleRow row;
  row.target = output.target;
  if (output.target >= 0) row.top_logprobs = step.prompt_logprobs;
  if (!output.sample) return row;
  const LiveSequence& sequence = *live_[output.step];
  const SequenceStart& start = sequence.start();
  row.parameters = &start.sampling;
  row.counts = sequence.counts();
  row.candidate = start.candidate;
  row.position = sequence.next_position();
  row.top_logprobs = std::max(row.top_logprobs, step.top_logprobs);
  if (row.position - start.prompt_length < start.min_new_tokens) row.suppressed = start.end_tokens;
  return row;
}

void Stage::RunOutputs(const IterationPlan& plan, std::span<const OutputRow> tile,
                       IterationResult& result) {
  tile_rows_.clear();
  sample_rows_.clear();
  for (const OutputRow& output : tile) {
    tile_rows_.push_back(output.row);
    sample_rows_.push_back(MakeSampleRow(plan.steps[output.step], output));
  }
  const int64_t rows = static_cast<int64_t>(tile.size());
  const ModelConfig& config = model_.config();
  const Tensor hidden = DenseTensor(hidden_.data(), DType::kF32,
                                    static_cast<int64_t>(token_ids_.size()), config.hidden);
  const Tensor gathered = DenseTensor(head_hidden_.data(), DType::kF32, rows, config.hidden);
  const Tensor logits = DenseTensor(logits_.data(), DType::kF32, rows, config.vocab);
  backend_.Gather(hidden, tile_rows_, gathered);
  model_.Head(gathered, logits);
  backend_.Sample(logits, sample_rows_, std::span(samples_).first(tile.size()));

  for (size_t i = 0; i < tile.size(); ++i) {
    const OutputRow& output = tile[i];
    const SampleResult& sample = samples_[i];
    const Step& step = plan.steps[output.step];
    StepResult& out = result.steps[output.step];
    if (output.target >= 0) {
      out.prompt_detail.push_back({sample.target_logprob, Best(sample, step.prompt_logprobs)});
    }
    if (!output.sample) continue;
    TREADLE_CHECK(sample.token >= 0 && sample.token < config.vocab);
    live_[output.step]->SetSample(sample.token);
    out.token = sample.token;
    if (step.top_logprobs >= 0) out.detail = {sample.logprob, Best(sample, step.top_logprobs)};
  }
}

}  // namespace treadle
