#include "engine/stage.h"

#include <algorithm>
#include <numeric>

#include "kernels/status.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

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
  TREADLE_ASSIGN_OR_RETURN(KvCache cache, KvCache::Create(backend, model, kv));
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
                  .max_batch_tokens = max_batch_tokens}) {
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
  const auto floats = [&](int64_t count, Buffer& buffer) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(buffer, backend_.Allocate(static_cast<size_t>(count) * sizeof(float)));
    return absl::OkStatus();
  };
  const ModelConfig& config = model_.config();
  const int ranks = model_.shard().size;
  TREADLE_RETURN_IF_ERROR(floats(max_batch_tokens * config.hidden, hidden_));
  if (!model_.last_stage()) return absl::OkStatus();
  for (int rank = 0; rank < ranks; ++rank) {
    shard_columns_ = std::max(shard_columns_, PartOf(config.vocab, 1, {rank, ranks}).size());
  }
  TREADLE_RETURN_IF_ERROR(floats(kMaxHeadRows * config.hidden, head_hidden_));
  TREADLE_RETURN_IF_ERROR(floats(kMaxHeadRows * shard_columns_, logits_));
  samples_.resize(kMaxHeadRows);
  if (ranks == 1) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(floats(ranks * kMaxHeadRows * shard_columns_, gathered_));
  TREADLE_RETURN_IF_ERROR(floats(kMaxHeadRows * config.vocab, all_logits_));
  every_row_.resize(kMaxHeadRows);
  std::iota(every_row_.begin(), every_row_.end(), 0);
  own_part_.resize(kMaxHeadRows);
  all_parts_.resize(static_cast<size_t>(ranks) * kMaxHeadRows);
  row_parts_.resize(ranks);
  return absl::OkStatus();
}

void Stage::BeginEpoch(Communicator* ranks, ActivationLink* link) {
  TREADLE_CHECK((ranks == nullptr ? 1 : ranks->size()) == model_.shard().size);
  ranks_ = ranks;
  link_ = link;
  sequences_.Clear();
}

absl::Status Stage::Announce(const IterationPlan& plan) {
  if (link_ == nullptr || plan.steps.empty()) return absl::OkStatus();
  return link_->Announce(plan.epoch, plan.iteration, plan.num_tokens());
}

absl::StatusOr<IterationResult> Stage::Run(const IterationPlan& plan,
                                           const std::function<void()>& before_output) {
  TREADLE_RETURN_IF_ERROR(sequences_.Check(plan));
  for (const SequenceId sequence : plan.releases) sequences_.Release(sequence);
  cache_.CopyPages(plan.page_copies);
  for (const SequenceStart& start : plan.starts) sequences_.Start(start);

  IterationResult result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  if (plan.steps.empty()) return result;

  times_.began = Times::Clock::now();
  Flatten(plan);
  TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, ReceiveHidden(plan));
  times_.received = Times::Clock::now();
  const Batch batch{token_ids_, positions_, spans_};
  TREADLE_RETURN_IF_ERROR(model_.Forward(batch, cache_.pages(), ranks_, hidden));
  backend_.Synchronize();
  times_.forwarded = Times::Clock::now();
  if (before_output) before_output();
  if (link_ != nullptr && !model_.last_stage()) {
    TREADLE_RETURN_IF_ERROR(link_->Send(plan.epoch, plan.iteration, hidden));
  }
  times_.sent = Times::Clock::now();
  if (model_.last_stage()) {
    CollectOutputs(plan);
    result.steps.resize(plan.steps.size());
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      result.steps[i].sequence = plan.steps[i].sequence;
    }
    const std::span<const OutputRow> outputs = outputs_;
    for (size_t begin = 0; begin < outputs.size(); begin += kMaxHeadRows) {
      const size_t rows = std::min<size_t>(kMaxHeadRows, outputs.size() - begin);
      TREADLE_RETURN_IF_ERROR(RunOutputs(plan, hidden, outputs.subspan(begin, rows), result));
    }
  }
  times_.sampled = Times::Clock::now();
  return result;
}

// Where the forward pass reads and leaves the residual stream; the previous stage's, if there is
// one. [num_tokens, hidden]
absl::StatusOr<Tensor> Stage::ReceiveHidden(const IterationPlan& plan) {
  const int64_t rows = static_cast<int64_t>(token_ids_.size());
  Tensor hidden = DenseTensor(hidden_.data(), DType::kF32, rows, model_.config().hidden);
  if (link_ != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(hidden, link_->Receive(plan.epoch, plan.iteration, rows));
  }
  if (!model_.first_stage() && ranks_ != nullptr) {
    const size_t bytes = static_cast<size_t>(rows * hidden.cols) * sizeof(float);
    TREADLE_RETURN_IF_ERROR(ranks_->Broadcast(hidden.data, bytes, 0));
  }
  return hidden;
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

absl::Status Stage::RunOutputs(const IterationPlan& plan, Tensor hidden,
                               std::span<const OutputRow> tile, IterationResult& result) {
  tile_rows_.clear();
  sample_rows_.clear();
  for (const OutputRow& output : tile) {
    tile_rows_.push_back(output.row);
    sample_rows_.push_back(MakeSampleRow(plan.steps[output.step], output));
  }
  const int64_t rows = static_cast<int64_t>(tile.size());
  const Tensor gathered = DenseTensor(head_hidden_.data(), DType::kF32, rows, hidden.cols);
  const Tensor logits = {logits_.data(), DType::kF32, rows, model_.vocab().size(), shard_columns_};
  backend_.Gather(hidden, tile_rows_, gathered);
  model_.Head(gathered, logits);
  TREADLE_RETURN_IF_ERROR(SampleTile(logits));

  for (size_t i = 0; i < tile.size(); ++i) {
    const OutputRow& output = tile[i];
    const SampleResult& sample = samples_[i];
    const Step& step = plan.steps[output.step];
    StepResult& out = result.steps[output.step];
    if (output.target >= 0) {
      out.prompt_detail.push_back({sample.target_logprob, Best(sample, step.prompt_logprobs)});
    }
    if (!output.sample) continue;
    TREADLE_CHECK(sample.token >= 0 && sample.token < model_.config().vocab);
    live_[output.step]->SetSample(sample.token);
    out.token = sample.token;
    if (step.top_logprobs >= 0) out.detail = {sample.logprob, Best(sample, step.top_logprobs)};
  }
  return absl::OkStatus();
}

// samples_ of sample_rows_. logits: [rows, this rank's part of the vocabulary]
absl::Status Stage::SampleTile(Tensor logits) {
  const size_t rows = sample_rows_.size();
  if (ranks_ == nullptr) {
    backend_.Sample(logits, sample_rows_, std::span(samples_).first(rows));
    return absl::OkStatus();
  }
  if (!std::all_of(sample_rows_.begin(), sample_rows_.end(), CanMergeShards)) {
    return GatherLogits(logits);
  }
  backend_.SampleShard(logits, static_cast<int32_t>(model_.vocab().begin), sample_rows_,
                       std::span(own_part_).first(rows));
  TREADLE_RETURN_IF_ERROR(
      ranks_->AllGather(own_part_.data(), rows * sizeof(ShardSample), all_parts_.data()));
  for (size_t row = 0; row < rows; ++row) {
    for (size_t rank = 0; rank < row_parts_.size(); ++rank) {
      row_parts_[rank] = all_parts_[rank * rows + row];
    }
    samples_[row] = MergeShards(sample_rows_[row], row_parts_);
  }
  return absl::OkStatus();
}

// As SampleTile, from all ranks' logits put together. Every rank samples, to the same result.
absl::Status Stage::GatherLogits(Tensor logits) {
  const int64_t part = logits.rows * shard_columns_;
  TREADLE_RETURN_IF_ERROR(
      ranks_->AllGather(logits.data, static_cast<size_t>(part) * sizeof(float), gathered_.data()));
  const int64_t vocab = model_.config().vocab;
  const Tensor all = DenseTensor(all_logits_.data(), DType::kF32, logits.rows, vocab);
  auto* gathered = reinterpret_cast<float*>(gathered_.data());
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const ShardRange range = PartOf(vocab, 1, {rank, ranks_->size()});
    const Tensor shard = {gathered + rank * part, DType::kF32, logits.rows, range.size(),
                          shard_columns_};
    backend_.Gather(shard, std::span(every_row_).first(logits.rows),
                    all.Cols(range.begin, range.size()));
  }
  backend_.Sample(all, sample_rows_, std::span(samples_).first(sample_rows_.size()));
  return absl::OkStatus();
}

}  // namespace treadle
