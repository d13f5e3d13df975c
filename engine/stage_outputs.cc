// Which rows of an iteration give output, and what comes of them: head, sampling, results.
#include <algorithm>

#include "base/status.h"
#include "engine/stage.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

// The `count` best of a result; none if count is -1 or 0.
std::vector<TokenLogprob> Best(const SampleResult& sample, int32_t count) {
  const int32_t n = std::clamp(count, 0, sample.num_top);
  return {sample.top.begin(), sample.top.begin() + n};
}

}  // namespace

void Stage::CollectOutputs(Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  begun.outputs.clear();
  begun.pools = false;
  begun.embeddings.clear();
  output_rows_.clear();
  sample_rows_.clear();
  if (!model_.last_stage()) return;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (step.pooling != Pooling::kNone) {
      begun.pools = true;
      continue;
    }
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
  if (!step.masked && row.position - start.prompt_length < start.min_new_tokens) {
    row.suppressed = start.end_tokens;
  }
  return row;
}

// Takes what pooled steps give: rows that no head reads, so they are normalized where they are.
// Sums of f32 run in the order of positions, on the host, so that chunks make no difference.
absl::Status Stage::Pool(Tensor hidden, Begun& begun) {
  for (size_t i = 0; i < begun.plan->steps.size(); ++i) {
    const Step& step = begun.plan->steps[i];
    const bool mean = step.pooling == Pooling::kMean;
    if (step.pooling == Pooling::kNone || (!mean && !step.sample)) continue;
    const int64_t rows = mean ? step.num_tokens : 1;
    const Tensor states = hidden.Rows(spans_[i].first_row + step.num_tokens - rows, rows);
    model_.Normalize(states);
    TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
    pooled_rows_.resize(static_cast<size_t>(rows * hidden.cols));
    backend_.CopyToHost(pooled_rows_.data(), states.data, pooled_rows_.size() * sizeof(float));
    std::vector<float>& sum = live_[i]->pooled();
    if (step.first_position == 0 || sum.empty() || !mean)
      sum.assign(static_cast<size_t>(hidden.cols), 0);
    for (size_t row = 0; row < pooled_rows_.size(); row += sum.size()) {
      for (size_t j = 0; j < sum.size(); ++j) sum[j] += pooled_rows_[row + j];
    }
    if (!step.sample) continue;
    const auto count = static_cast<float>(mean ? live_[i]->next_position() : 1);
    for (float& value : sum) value /= count;
    begun.embeddings.push_back(std::move(sum));
  }
  return absl::OkStatus();
}

// Has the rows of masked steps point to what they may sample. Nothing if that was done already.
absl::Status Stage::AwaitMasks(Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  const auto masked = [&](const OutputRow& output) {
    return output.sample && plan.steps[output.step].masked;
  };
  if (begun.masks != nullptr || std::ranges::none_of(begun.outputs, masked)) {
    return absl::OkStatus();
  }
  if (masks_ == nullptr) return InvalidArgument("a step is masked, but this epoch has no masks");
  TREADLE_ASSIGN_OR_RETURN(begun.masks, masks_->Take(plan));
  for (size_t i = 0; i < begun.outputs.size(); ++i) {
    const OutputRow& output = begun.outputs[i];
    if (masked(output)) sample_rows_[i].mask = begun.masks->at(output.step).data();
  }
  return absl::OkStatus();
}

// Pooling, head and sampling, the latter tile by tile.
absl::Status Stage::RunOutputs(Tensor hidden, Begun& begun) {
  if (begun.pools) TREADLE_RETURN_IF_ERROR(Pool(hidden, begun));
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
  // Row by row: a merged row's log probabilities round otherwise than those of gathered logits, and
  // a row must not depend on which way another one goes.
  const bool merges =
      !ranks_->asynchronous() && std::any_of(rows.begin(), rows.end(), CanMergeShards);
  if (!merges || !std::all_of(rows.begin(), rows.end(), CanMergeShards)) {
    TREADLE_RETURN_IF_ERROR(GatherLogits(logits, rows, samples));
  }
  if (!merges) return absl::OkStatus();
  backend_.SampleShard(logits, static_cast<int32_t>(model_.vocab().begin), rows,
                       std::span(own_part_).first(rows.size()));
  TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
  TREADLE_RETURN_IF_ERROR(
      ranks_->AllGather(own_part_.data(), rows.size() * sizeof(ShardSample), all_parts_.data()));
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!CanMergeShards(rows[row])) continue;
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
    backend_.Copy(shard, all.Cols(range.begin, range.size()));
  }
  backend_.Sample(all, rows, samples);
  return absl::OkStatus();
}

// What the plan's outputs came to; sequences learn their samples.
IterationResult Stage::TakeResult(Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  IterationResult result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  if (plan.steps.empty()) return result;
  times_ = begun.times;
  if (!model_.last_stage()) return result;
  result.experts = begun.experts;
  result.steps.resize(plan.steps.size());
  size_t embedding = 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    result.steps[i].sequence = step.sequence;
    if (step.pooling == Pooling::kNone || !step.sample) continue;
    result.steps[i].embedding = std::move(begun.embeddings[embedding++]);
  }
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
