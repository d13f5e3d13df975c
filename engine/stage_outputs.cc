// The output rows of an iteration, and what comes of them: head, sampling, results.
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
  begun.takes_hidden = false;
  begun.hidden.clear();
  output_rows_.clear();
  sample_rows_.clear();
  earlier_counts_.clear();
  if (!model_.last_stage()) return;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    begun.takes_hidden = begun.takes_hidden || live_[i]->start().mean_pooling;
    for (size_t k = 0; k < step.outputs.size(); ++k) {
      const RowOutput& asked = step.outputs[k];
      begun.takes_hidden = begun.takes_hidden || asked.hidden;
      if (!asked.sample && asked.target < 0) continue;
      if (asked.sample && asked.row == step.num_tokens - 1) {
        live_[i]->SetSample(-2 - static_cast<int32_t>(begun.outputs.size()));
      }
      output_rows_.push_back(spans_[i].first_row + asked.row);
      sample_rows_.push_back(MakeSampleRow(step, asked, *live_[i]));
      begun.outputs.push_back({static_cast<int32_t>(i), static_cast<int32_t>(k)});
    }
  }
  begun.samples.resize(begun.outputs.size());
}

SampleRow Stage::MakeSampleRow(const Step& step, const RowOutput& asked, const LiveSequence& live) {
  SampleRow row;
  row.target = asked.target;
  row.top_logprobs =
      asked.target >= 0 ? std::max(asked.top_logprobs, asked.target_logprobs) : asked.top_logprobs;
  if (!asked.sample) return row;
  const SequenceStart& start = live.start();
  row.parameters = &start.sampling;
  row.counts = live.counts();
  row.candidate = start.candidate;
  row.position = int64_t{step.first_position} + asked.row + 1;
  if (live.counting() && row.position < live.next_position()) {
    row.counts = earlier_counts_.emplace_back(live.CountsBefore(row.position));
  }
  if (!asked.masked && row.position - start.prompt_length < start.min_new_tokens) {
    row.suppressed = start.end_tokens;
  }
  return row;
}

// Takes the final hidden states that are asked for, and those that a mean adds up: sums of f32 run
// in the order of positions, on the host, so that chunks make no difference.
absl::Status Stage::TakeHidden(Tensor hidden, Begun& begun) {
  for (size_t i = 0; i < begun.plan->steps.size(); ++i) {
    const Step& step = begun.plan->steps[i];
    LiveSequence& live = *live_[i];
    const bool mean = live.start().mean_pooling;
    hidden_rows_.clear();
    const int32_t text = std::max(0, live.virtual_tokens() - step.first_position);
    for (int32_t row = text; mean && row < step.num_tokens; ++row) {
      hidden_rows_.push_back(spans_[i].first_row + row);
    }
    for (const RowOutput& asked : step.outputs) {
      if (asked.hidden && !mean) hidden_rows_.push_back(spans_[i].first_row + asked.row);
    }
    std::vector<float>& sum = live.pooled();
    if (mean && step.first_position == 0) sum.assign(static_cast<size_t>(hidden.cols), 0);
    for (size_t begin = 0; begin < hidden_rows_.size(); begin += kMaxHeadRows) {
      const size_t count = std::min<size_t>(kMaxHeadRows, hidden_rows_.size() - begin);
      const Tensor states =
          DenseTensor(head_hidden_.data(), DType::kF32, static_cast<int64_t>(count), hidden.cols);
      backend_.Gather(hidden, std::span(hidden_rows_).subspan(begin, count), states);
      model_.Normalize(states);
      TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
      host_states_.resize(static_cast<size_t>(states.rows * states.cols));
      backend_.CopyToHost(host_states_.data(), states.data, host_states_.size() * sizeof(float));
      for (auto row = host_states_.begin(); row != host_states_.end(); row += hidden.cols) {
        if (!mean) begun.hidden.emplace_back(row, row + hidden.cols);
        for (size_t k = 0; k < sum.size() && mean; ++k) sum[k] += row[static_cast<int64_t>(k)];
      }
    }
    if (!mean || step.outputs.empty()) continue;
    std::vector<float>& average = begun.hidden.emplace_back(sum);
    const int64_t count = std::max<int64_t>(1, live.next_position() - live.virtual_tokens());
    for (float& value : average) value /= static_cast<float>(count);
  }
  return absl::OkStatus();
}

// Has the rows of masked outputs point to what they may sample. Nothing if that was done already.
absl::Status Stage::AwaitMasks(Begun& begun) {
  const auto masked = [&](const OutputRow& output) { return AskedOf(begun, output).masked; };
  if (begun.masks != nullptr || std::ranges::none_of(begun.outputs, masked)) {
    return absl::OkStatus();
  }
  if (masks_ == nullptr) return InvalidArgument("a step is masked, but this epoch has no masks");
  TREADLE_ASSIGN_OR_RETURN(begun.masks, masks_->Take(*begun.plan));
  for (size_t i = 0; i < begun.outputs.size(); ++i) {
    const OutputRow& output = begun.outputs[i];
    if (!masked(output)) continue;
    sample_rows_[i].mask = begun.masks->at({output.step, output.output}).data();
  }
  return absl::OkStatus();
}

// Hidden states, head and sampling, the latter tile by tile.
absl::Status Stage::RunOutputs(Tensor hidden, Begun& begun) {
  if (begun.takes_hidden) TREADLE_RETURN_IF_ERROR(TakeHidden(hidden, begun));
  for (size_t begin = 0; begin < output_rows_.size(); begin += kMaxHeadRows) {
    const size_t count = std::min<size_t>(kMaxHeadRows, output_rows_.size() - begin);
    const int64_t rows = static_cast<int64_t>(count);
    const Tensor gathered = DenseTensor(head_hidden_.data(), DType::kF32, rows, hidden.cols);
    const Tensor logits = {logits_.data(), DType::kF32, rows, model_.vocab().size(),
                           shard_columns_};
    backend_.Gather(hidden, std::span(output_rows_).subspan(begin, count), gathered);
    head_adapters_.clear();
    for (size_t i = begin; i < begin + count && !row_adapters_.empty(); ++i) {
      head_adapters_.push_back(row_adapters_[static_cast<size_t>(output_rows_[i])]);
    }
    model_.Head(gathered, logits, head_adapters_);
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

// Samples as SampleTile does, from all ranks' logits put together: every rank, to the same result.
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

// Takes the plan's outputs as its result; sequences learn their samples.
IterationResult Stage::TakeResult(Begun& begun) {
  const IterationPlan& plan = *begun.plan;
  IterationResult result;
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  result.stored_pages = std::move(begun.stored_pages);
  if (plan.steps.empty()) return result;
  times_ = begun.times;
  if (!model_.last_stage()) return result;
  result.experts = begun.experts;
  result.steps.resize(plan.steps.size());
  size_t hidden = 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    result.steps[i].sequence = step.sequence;
    result.steps[i].outputs.resize(step.outputs.size());
    for (size_t k = 0; k < step.outputs.size(); ++k) {
      if (!step.outputs[k].hidden) continue;
      result.steps[i].outputs[k].hidden = std::move(begun.hidden[hidden++]);
    }
  }
  for (size_t i = 0; i < begun.outputs.size(); ++i) {
    const OutputRow& output = begun.outputs[i];
    const SampleResult& sample = begun.samples[i];
    const Step& step = plan.steps[output.step];
    const RowOutput& asked = AskedOf(begun, output);
    RowResult& out = result.steps[output.step].outputs[output.output];
    if (asked.target >= 0)
      out.target = {sample.target_logprob, Best(sample, asked.target_logprobs)};
    if (!asked.sample) continue;
    TREADLE_CHECK(sample.token >= 0 && sample.token < model_.config().vocab);
    LiveSequence* const live = sequences_.Find(step.sequence);  // a later plan may have released it
    if (live != nullptr && asked.row == step.num_tokens - 1) {
      live->Resolve(int64_t{step.first_position} + step.num_tokens, sample.token);
    }
    out.token = sample.token;
    if (asked.top_logprobs >= 0) out.detail = {sample.logprob, Best(sample, asked.top_logprobs)};
  }
  return result;
}

}  // namespace treadle
