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

// Contexts that share a graph: powers of two from here on.
constexpr int64_t kSmallestGraphContext = 256;

BackendLimits LimitsOf(const Model& model, int64_t max_batch_tokens, const KvCache::Options& kv) {
  const ModelConfig& config = model.config();
  const int ranks = model.shard().size;
  return {.max_rows = max_batch_tokens,
          .max_sequences = max_batch_tokens,
          .max_context = config.context,
          .max_output_rows = max_batch_tokens,
          .max_features = std::max(
              {config.hidden, config.ffn_hidden / ranks, config.heads / ranks * config.head_dim}),
          .vocab = config.vocab,
          .page_size = kv.page_size,
          .heads = config.heads / ranks,
          .head_dim = config.head_dim};
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
  TREADLE_RETURN_IF_ERROR(backend.Reserve(LimitsOf(model, max_batch_tokens, kv)));
  return stage;
}

Stage::Stage(Backend& backend, Model& model, int64_t max_batch_tokens, KvCache cache)
    : backend_(backend),
      model_(model),
      max_batch_tokens_(max_batch_tokens),
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
  output_rows_.reserve(tokens);
  sample_rows_.reserve(tokens);
  for (Begun& begun : begun_) {
    begun.outputs.reserve(tokens);
    begun.samples.reserve(tokens);
  }
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
  if (ranks == 1) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(floats(ranks * kMaxHeadRows * shard_columns_, gathered_));
  TREADLE_RETURN_IF_ERROR(floats(kMaxHeadRows * config.vocab, all_logits_));
  every_row_.resize(kMaxHeadRows);
  std::iota(every_row_.begin(), every_row_.end(), 0);
  own_part_.resize(kMaxHeadRows);
  all_parts_.resize(static_cast<size_t>(ranks) * kMaxHeadRows);
  row_parts_.resize(ranks);
  const size_t own_bytes = own_part_.size() * sizeof(ShardSample);
  TREADLE_ASSIGN_OR_RETURN(own_on_device_, backend_.Allocate(own_bytes));
  TREADLE_ASSIGN_OR_RETURN(all_on_device_, backend_.Allocate(ranks * own_bytes));
  return absl::OkStatus();
}

void Stage::BeginEpoch(Communicator* ranks, ActivationLink* link) {
  TREADLE_CHECK((ranks == nullptr ? 1 : ranks->size()) == model_.shard().size);
  ranks_ = ranks;
  link_ = link;
  sequences_.Clear();
  // What the old epoch left on the device still uses the buffers; a failure shows again in Begin.
  if (num_finished_ != num_begun_) backend_.Synchronize().IgnoreError();
  num_finished_ = num_begun_;
}

absl::Status Stage::Announce(const IterationPlan& plan) {
  if (link_ == nullptr || plan.steps.empty()) return absl::OkStatus();
  return link_->Announce(plan.epoch, plan.iteration, plan.num_tokens());
}

absl::StatusOr<IterationResult> Stage::Run(const IterationPlan& plan,
                                           const std::function<void()>& before_output) {
  TREADLE_CHECK(num_begun_ == num_finished_);
  TREADLE_RETURN_IF_ERROR(Begin(plan, before_output));
  return Finish();
}

bool Stage::CanBeginAhead(const IterationPlan& plan) {
  if (!backend_.asynchronous() || joined() || num_begun_ - num_finished_ != 1) return false;
  for (const Step& step : plan.steps) {
    const LiveSequence* const live = sequences_.Find(step.sequence);
    if (live == nullptr || live->previous_sample() >= -1) continue;
    if (!step.tokens.empty() || live->counting() || step.prompt_logprobs >= 0) return false;
  }
  return true;
}

absl::Status Stage::Begin(const IterationPlan& plan, const std::function<void()>& before_output) {
  TREADLE_CHECK(num_begun_ - num_finished_ < begun_.size());
  TREADLE_RETURN_IF_ERROR(sequences_.Check(plan));
  for (const SequenceId sequence : plan.releases) sequences_.Release(sequence);
  cache_.CopyPages(plan.page_copies);
  for (const SequenceStart& start : plan.starts) sequences_.Start(start);

  const int mark = static_cast<int>(num_begun_ % begun_.size());
  Begun& begun = begun_[mark];
  begun.plan = &plan;
  begun.times = {};
  begun.times.began = Times::Clock::now();
  if (!plan.steps.empty()) {
    Flatten(plan);
    CollectOutputs(begun);
    Pad(plan, begun);
    backend_.BeginBatch({.token_ids = token_ids_,
                         .positions = positions_,
                         .sequences = spans_,
                         .output_rows = output_rows_,
                         .samples = sample_rows_,
                         .results = begun.samples,
                         .max_context = graph_.context});
    TREADLE_RETURN_IF_ERROR(Launch(plan, begun, before_output));
  }
  backend_.SetMark(mark);
  ++num_begun_;
  return absl::OkStatus();
}

// Forward pass, what goes to the next stage, and outputs.
absl::Status Stage::Launch(const IterationPlan& plan, Begun& begun,
                           const std::function<void()>& before_output) {
  TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, ReceiveHidden(plan));
  begun.times.received = Times::Clock::now();
  const Batch batch{token_ids_, positions_, spans_};
  if (!joined()) {
    absl::Status status;  // there is no communicator to fail, nor, in a replay, anything to run
    const auto ops = [&] {
      status = model_.Forward(batch, cache_.pages(), nullptr, hidden);
      begun.times.forwarded = begun.times.sent = Times::Clock::now();
      if (status.ok()) status = RunOutputs(hidden, begun);
    };
    graph_.rows > 0 ? backend_.RunGraph(graph_, std::cref(ops)) : ops();
    begun.times.sampled = Times::Clock::now();
    return status;
  }
  TREADLE_RETURN_IF_ERROR(model_.Forward(batch, cache_.pages(), ranks_, hidden));
  TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
  begun.times.forwarded = Times::Clock::now();
  if (before_output) before_output();
  if (link_ != nullptr && !model_.last_stage()) {
    TREADLE_RETURN_IF_ERROR(link_->Send(plan.epoch, plan.iteration, hidden));
  }
  begun.times.sent = Times::Clock::now();
  TREADLE_RETURN_IF_ERROR(RunOutputs(hidden, begun));
  begun.times.sampled = Times::Clock::now();
  return absl::OkStatus();
}

absl::StatusOr<IterationResult> Stage::Finish() {
  TREADLE_CHECK(num_finished_ < num_begun_);
  const int mark = static_cast<int>(num_finished_ % begun_.size());
  TREADLE_RETURN_IF_ERROR(backend_.WaitForMark(mark));
  ++num_finished_;
  return TakeResult(begun_[mark]);
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

void Stage::CollectOutputs(Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  begun.outputs.clear();
  output_rows_.clear();
  sample_rows_.clear();
  if (!model_.last_stage()) return;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    const int32_t last = step.num_tokens - 1;
    for (int32_t row = step.prompt_logprobs >= 0 ? 0 : last; row <= last; ++row) {
      OutputRow output{.row = spans_[i].first_row + row, .step = static_cast<int32_t>(i)};
      output.sample = step.sample && row == last;
      if (step.prompt_logprobs >= 0) {
        output.target = row == last ? step.next_token : token_ids_[output.row + 1];
      }
      if (!output.sample && output.target < 0) continue;
      if (output.sample) {
        live_[i]->SetSample(-2 - static_cast<int32_t>(begun.outputs.size()));
      }
      output_rows_.push_back(output.row);
      sample_rows_.push_back(MakeSampleRow(step, output));
      begun.outputs.push_back(output);
    }
  }
  begun.samples.resize(begun.outputs.size());
}

// The token after the row has the position that follows the sequence's entered ids.
SampleRow Stage::MakeSampleRow(const Step& step, OutputRow& output) const {
  SampleRow row;
  row.target = output.target;
  if (output.target >= 0) row.top_logprobs = step.prompt_logprobs;
  if (!output.sample) return row;
  const LiveSequence& sequence = *live_[output.step];
  const SequenceStart& start = sequence.start();
  row.parameters = &start.sampling;
  row.counts = sequence.counts();
  row.candidate = start.candidate;
  row.position = output.position = sequence.next_position();
  row.top_logprobs = std::max(row.top_logprobs, step.top_logprobs);
  if (row.position - start.prompt_length < start.min_new_tokens) row.suppressed = start.end_tokens;
  return row;
}

// Sets graph_. Decoding rows alone are padded with rows that belong to nobody and outputs that
// nobody reads, up to one of the backend's few shapes.
void Stage::Pad(const IterationPlan& plan, Begun& begun) {
  graph_ = {};
  const int64_t rows = static_cast<int64_t>(token_ids_.size());
  const int64_t padded = backend_.PaddedRows(rows);
  if (joined() || rows != static_cast<int64_t>(plan.steps.size()) ||
      rows != static_cast<int64_t>(begun.outputs.size()) || padded > max_batch_tokens_) {
    return;
  }
  int64_t context = kSmallestGraphContext;
  for (const int32_t position : positions_) {
    while (context <= position) context *= 2;
  }
  token_ids_.resize(padded, -1);
  positions_.resize(padded, -1);
  output_rows_.resize(padded, 0);
  sample_rows_.resize(padded);
  begun.samples.resize(padded);
  graph_ = {.rows = padded, .context = context, .output_rows = padded};
}

// Head and sampling, tile by tile.
absl::Status Stage::RunOutputs(Tensor hidden, Begun& begun) {
  for (size_t begin = 0; begin < output_rows_.size(); begin += kMaxHeadRows) {
    const size_t count = std::min<size_t>(kMaxHeadRows, output_rows_.size() - begin);
    const int64_t rows = static_cast<int64_t>(count);
    const Tensor gathered = DenseTensor(head_hidden_.data(), DType::kF32, rows, hidden.cols);
    const Tensor logits = {logits_.data(), DType::kF32, rows, model_.vocab().size(),
                           shard_columns_};
    backend_.Gather(hidden, std::span(output_rows_).subspan(begin, count), gathered);
    model_.Head(gathered, logits);
    TREADLE_RETURN_IF_ERROR(SampleTile(logits, std::span(sample_rows_).subspan(begin, count),
                                       std::span(begun.samples).subspan(begin, count)));
  }
  return absl::OkStatus();
}

// logits: [rows, this rank's part of the vocabulary]
absl::Status Stage::SampleTile(Tensor logits, std::span<const SampleRow> rows,
                               std::span<SampleResult> samples) {
  if (ranks_ == nullptr) {
    backend_.Sample(logits, rows, samples);
    return absl::OkStatus();
  }
  if (!std::all_of(rows.begin(), rows.end(), CanMergeShards)) {
    return GatherLogits(logits, rows, samples);
  }
  backend_.SampleShard(logits, static_cast<int32_t>(model_.vocab().begin), rows,
                       std::span(own_part_).first(rows.size()));
  TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
  TREADLE_RETURN_IF_ERROR(
      ranks_->AllGather(own_part_.data(), rows.size() * sizeof(ShardSample), all_parts_.data()));
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t rank = 0; rank < row_parts_.size(); ++rank) {
      row_parts_[rank] = all_parts_[rank * rows.size() + row];
    }
    samples[row] = MergeShards(rows[row], row_parts_);
  }
  return absl::OkStatus();
}

// As SampleTile, from all ranks' logits put together. Every rank samples, to the same result.
absl::Status Stage::GatherLogits(Tensor logits, std::span<const SampleRow> rows,
                                 std::span<SampleResult> samples) {
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
  backend_.Sample(all, rows, samples);
  return absl::OkStatus();
}

// What the plan's outputs came to; sequences learn their samples.
IterationResult Stage::TakeResult(const Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  IterationResult result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  if (plan.steps.empty()) return result;
  times_ = begun.times;
  if (backend_.asynchronous()) {
    times_.sampled = Times::Clock::now();
    if (!joined()) times_.forwarded = times_.sent = times_.sampled;
  }
  if (!model_.last_stage()) return result;
  result.steps.resize(plan.steps.size());
  for (size_t i = 0; i < plan.steps.size(); ++i) result.steps[i].sequence = plan.steps[i].sequence;
  for (size_t i = 0; i < begun.outputs.size(); ++i) {
    const OutputRow& output = begun.outputs[i];
    const SampleResult& sample = begun.samples[i];
    const Step& step = plan.steps[output.step];
    StepResult& out = result.steps[output.step];
    if (output.target >= 0) {
      out.prompt_detail.push_back({sample.target_logprob, Best(sample, step.prompt_logprobs)});
    }
    if (!output.sample) continue;
    TREADLE_CHECK(sample.token >= 0 && sample.token < model_.config().vocab);
    LiveSequence* const live = sequences_.Find(step.sequence);  // a later plan may have released it
    if (live != nullptr) live->Resolve(output.position, sample.token);
    out.token = sample.token;
    if (step.top_logprobs >= 0) out.detail = {sample.logprob, Best(sample, step.top_logprobs)};
  }
  return result;
}

}  // namespace treadle
