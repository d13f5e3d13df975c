#include "engine/stage.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "models/adapter.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

size_t BytesOf(const Tensor& dense) {
  return static_cast<size_t>(dense.rows * dense.cols) * SizeOf(dense.dtype);
}

// Contexts that share a graph: powers of two from here on.
constexpr int64_t kSmallestGraphContext = 256;

BackendLimits LimitsOf(const Model& model, int64_t max_batch_tokens, const KvCache::Options& kv) {
  const ModelConfig& config = model.config();
  const int ranks = model.shard().size;
  const int64_t head_dim = std::max(config.head_dim, config.local_head_dim);
  return {.max_rows = max_batch_tokens,
          .max_sequences = max_batch_tokens,
          .max_context = config.context,
          .max_output_rows = max_batch_tokens,
          .max_features =
              std::max({config.hidden, (config.wide_shared_layers + 1) * config.ffn_hidden / ranks,
                        config.shared_hidden / ranks, config.dense_hidden / ranks,
                        config.heads * head_dim, config.layers * config.layer_embedding}),
          .vocab = config.vocab,
          .page_size = kv.page_size,
          .page_tables =
              kv.num_pages[PageKind::kWhole] > 0 && kv.num_pages[PageKind::kWindow] > 0 ? 2 : 1,
          .heads = config.heads / ranks,
          .head_dim = head_dim};
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
                  .num_pages = cache_.num_pages(),
                  .window = KvPaging::WindowOf(model.config(), cache_.layout().page_size),
                  .in_order = model.config().HasStates(),
                  .vocab = model.config().vocab,
                  .context = model.config().context,
                  .max_batch_tokens = max_batch_tokens}) {
  const size_t tokens = static_cast<size_t>(max_batch_tokens);
  token_ids_.reserve(tokens);
  positions_.reserve(tokens);
  spans_.reserve(tokens);
  window_spans_.reserve(tokens);
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
  own_part_.resize(kMaxHeadRows);
  all_parts_.resize(static_cast<size_t>(ranks) * kMaxHeadRows);
  row_parts_.resize(ranks);
  return absl::OkStatus();
}

void Stage::BeginEpoch(Communicator* ranks, ActivationLink* link, MaskBoard* masks, int stage,
                       ReplayLog* log) {
  TREADLE_CHECK(log == nullptr || (link != nullptr && link->place() == StagingPlace::kHost));
  TREADLE_CHECK((ranks == nullptr ? 1 : ranks->size()) == model_.shard().size);
  EndEpoch();
  ranks_ = ranks;
  link_ = link;
  masks_ = masks;
  stage_ = stage;
  log_ = log;
  sequences_.Clear();
}

void Stage::EndEpoch() {
  backend_.Synchronize().IgnoreError();  // a failure shows again in Begin
  if (ranks_ != nullptr) backend_.ForgetGraphs();
  num_finished_ = num_begun_;
  ranks_ = nullptr;
  link_ = nullptr;
  masks_ = nullptr;
  log_ = nullptr;
}

absl::Status Stage::Announce(const IterationPlan& plan) {
  if (link_ == nullptr || plan.steps.empty()) return absl::OkStatus();
  return link_->Announce(plan.epoch, plan.iteration, RowsTo(stage_, plan));
}

bool Stage::CanBeginAhead(const IterationPlan& plan) {
  if (!DetachesWork() || num_begun_ - num_finished_ != 1) return false;
  if (link_ != nullptr && !model_.first_stage()) return false;  // its input may be long in coming
  if (begun_[num_finished_ % begun_.size()].plan->stages != StageRange()) return false;
  for (const Step& step : plan.steps) {
    const LiveSequence* const live = sequences_.Find(step.sequence);
    if (std::ranges::any_of(step.outputs, &RowOutput::masked)) return false;
    if (live == nullptr || live->previous_sample() >= -1) continue;
    if (!step.tokens.empty() || live->counting()) return false;
    // The host looks tokens up in an adapter's embedding.
    if (live->adapter() != nullptr && live->adapter()->embedding_a().rows > 0) return false;
  }
  return true;
}

absl::Status Stage::Begin(const IterationPlan& plan, const std::function<void()>& before_output) {
  TREADLE_CHECK(num_begun_ - num_finished_ < begun_.size());
  const bool runs = plan.stages.Contains(stage_);
  TREADLE_RETURN_IF_ERROR(sequences_.Check(plan));
  TREADLE_RETURN_IF_ERROR(CheckPageBytes(plan));
  TREADLE_ASSIGN_OR_RETURN(auto adapters, AdaptersOf(plan));
  for (const SequenceId sequence : plan.releases) sequences_.Release(sequence);
  std::vector<std::vector<std::byte>> stored;
  for (const PageStore& store : plan.page_stores) {
    stored.push_back(cache_.ReadWholePage(store.page, store.tag));
  }
  if (runs) cache_.CopyPages(plan.page_copies);
  TREADLE_RETURN_IF_ERROR(sequences_.Start(plan.starts));
  for (size_t i = 0; i < adapters.size(); ++i) {
    const int32_t virtual_tokens = adapters[i] ? adapters[i]->virtual_tokens() : 0;
    sequences_.At(plan.starts[i].sequence).SetAdapter(std::move(adapters[i]), virtual_tokens);
  }
  for (const PageLoad& load : plan.page_loads) LoadPage(load);

  const int mark = static_cast<int>(num_begun_ % begun_.size());
  Begun& begun = begun_[mark];
  begun.plan = &plan;
  begun.stored_pages = std::move(stored);
  begun.masks = nullptr;
  begun.to_send = false;
  begun.times = {};
  begun.times.began = Times::Clock::now();
  if (!plan.steps.empty()) {
    Flatten(plan);
    CollectOutputs(begun);
  }
  if (!plan.steps.empty() && !runs) {
    TREADLE_RETURN_IF_ERROR(PassBy(plan, begun));
  } else if (!plan.steps.empty()) {
    // Such a device is told with the batch which rows are sampled.
    if (backend_.asynchronous()) TREADLE_RETURN_IF_ERROR(AwaitMasks(begun));
    TREADLE_RETURN_IF_ERROR(CheckHeld(plan));
    Pad(plan, begun);
    backend_.BeginBatch({.token_ids = token_ids_,
                         .positions = positions_,
                         .sequences = spans_,
                         .window_sequences = window_spans_,
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

// The adapters of a plan's starts; null: none.
absl::StatusOr<std::vector<std::shared_ptr<const Adapter>>> Stage::AdaptersOf(
    const IterationPlan& plan) const {
  std::vector<std::shared_ptr<const Adapter>> adapters(plan.starts.size());
  for (size_t i = 0; i < adapters.size(); ++i) {
    const SequenceStart& start = plan.starts[i];
    if (start.adapter == 0) continue;
    if (find_adapter_) adapters[i] = find_adapter_(start.adapter);
    if (adapters[i] == nullptr) {
      return NotFound("start of sequence ", start.sequence, ": adapter ", start.adapter,
                      ", which is not loaded");
    }
  }
  return adapters;
}

// Forward pass, what goes to the next stage, and outputs.
absl::Status Stage::Launch(const IterationPlan& plan, Begun& begun,
                           const std::function<void()>& before_output) {
  TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, ReceiveHidden(plan, begun));
  begun.times.received = Times::Clock::now();
  for (const Step& step : plan.steps) {  // until NoteRows
    cache_.tags().Clear(sequences_.At(step.sequence).start().pages, step.first_position,
                        int64_t{step.first_position} + step.num_tokens);
  }
  if (DetachesWork()) return LaunchDetached(hidden, begun, before_output);
  const Batch batch = FlatBatch();
  TREADLE_RETURN_IF_ERROR(model_.Forward(batch, cache_.pages(), ranks_, hidden));
  begun.experts = model_.expert_use();
  TREADLE_RETURN_IF_ERROR(HandOver(hidden, begun));
  TREADLE_RETURN_IF_ERROR(backend_.Synchronize());
  begun.times.forwarded = Times::Clock::now();
  NoteRows(begun);
  if (before_output) before_output();
  TREADLE_RETURN_IF_ERROR(SendMessage(begun));
  begun.times.sent = Times::Clock::now();
  TREADLE_RETURN_IF_ERROR(AwaitMasks(begun));
  TREADLE_RETURN_IF_ERROR(RunOutputs(hidden, begun));
  begun.times.sampled = Times::Clock::now();
  return absl::OkStatus();
}

// As above, but nothing waits: what is to be sent by the host, Finish sends.
absl::Status Stage::LaunchDetached(Tensor hidden, Begun& begun,
                                   const std::function<void()>& before_output) {
  const auto ops = [&]() -> absl::Status {
    const Batch batch = FlatBatch();
    TREADLE_RETURN_IF_ERROR(model_.Forward(batch, cache_.pages(), ranks_, hidden));
    begun.experts = model_.expert_use();
    return RunOutputs(hidden, begun);
  };
  TREADLE_RETURN_IF_ERROR(graph_.rows > 0 ? backend_.RunGraph(graph_, std::cref(ops)) : ops());
  NoteRows(begun);  // for a plan that begins ahead: the device runs them in order
  TREADLE_RETURN_IF_ERROR(HandOver(hidden, begun));
  if (before_output) before_output();
  return absl::OkStatus();
}

// Has the forward pass' result copied to where the link sends it from, and, on the device, sent.
absl::Status Stage::HandOver(Tensor hidden, Begun& begun) {
  if (link_ == nullptr || model_.last_stage()) return absl::OkStatus();
  if (Staging* const copies = staging()) {
    copies->Download(begun.message.data, hidden.data, BytesOf(begun.message));
  }
  begun.to_send = true;
  return link_->place() == StagingPlace::kDevice ? SendMessage(begun) : absl::OkStatus();
}

absl::Status Stage::SendMessage(Begun& begun) {
  if (!std::exchange(begun.to_send, false)) return absl::OkStatus();
  const IterationPlan& plan = *begun.plan;
  const bool runs = plan.stages.Contains(stage_);
  Tensor rows = begun.message;
  rows.rows = RowsTo(stage_ + 1, plan);
  if (runs || rows.rows == 0) return link_->Send(plan.epoch, plan.iteration, rows);
  return link_->Send(plan.epoch, plan.iteration, rows, [&](std::byte* out) {
    for (const Step& step : plan.steps) {
      out = log_->Read(sequences_.At(step.sequence).start().pages[PageKind::kWhole],
                       step.first_position, step.num_tokens, out);
    }
  });
}

absl::StatusOr<IterationResult> Stage::Finish() {
  TREADLE_CHECK(num_finished_ < num_begun_);
  const int mark = static_cast<int>(num_finished_ % begun_.size());
  TREADLE_RETURN_IF_ERROR(backend_.WaitForMark(mark));
  ++num_finished_;
  Begun& begun = begun_[mark];
  if (DetachesWork()) {
    begun.times.forwarded = Times::Clock::now();
    NoteRows(begun, /*again=*/true);
  }
  TREADLE_RETURN_IF_ERROR(SendMessage(begun));
  if (backend_.asynchronous()) begun.times.sampled = Times::Clock::now();
  if (DetachesWork()) begun.times.sent = begun.times.sampled;
  return TakeResult(begun);
}

// Where the forward pass reads and leaves the residual stream; the previous stage's, if there is
// one. [num_tokens, hidden], padding included
absl::StatusOr<Tensor> Stage::ReceiveHidden(const IterationPlan& plan, Begun& begun) {
  const int64_t rows = static_cast<int64_t>(token_ids_.size());
  Tensor hidden = DenseTensor(hidden_.data(), DType::kF32, rows, model_.config().hidden);
  if (link_ != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(begun.message,
                             link_->Receive(plan.epoch, plan.iteration, RowsTo(stage_, plan)));
    if (staging() == nullptr) {
      hidden.data = begun.message.data;
    } else if (!model_.first_stage()) {
      staging()->Upload(hidden.data, begun.message.data, BytesOf(begun.message));
    }
  }
  const bool all_received = link_ != nullptr && link_->place() == StagingPlace::kDevice;
  if (!model_.first_stage() && ranks_ != nullptr && !all_received) {
    TREADLE_RETURN_IF_ERROR(ranks_->Broadcast(hidden.data, BytesOf(hidden), 0));
  }
  return hidden;
}

// Lays the tokens of all steps one after the other, in the plan's order.
void Stage::Flatten(const IterationPlan& plan) {
  token_ids_.clear();
  positions_.clear();
  spans_.clear();
  window_spans_.clear();
  live_.clear();
  row_adapters_.clear();
  bool adapted = false;
  for (const Step& step : plan.steps) {
    LiveSequence& sequence = sequences_.At(step.sequence);
    const int32_t previous = sequence.previous_sample();
    sequence.Enter(step.first_position,
                   step.tokens.empty() ? std::span(&previous, 1) : std::span(step.tokens));
    const std::vector<int32_t>& whole = sequence.start().pages[PageKind::kWhole];
    const std::vector<int32_t>& window = sequence.start().pages[PageKind::kWindow];
    spans_.push_back({.first_row = static_cast<int32_t>(token_ids_.size()),
                      .num_rows = step.num_tokens,
                      .first_position = step.first_position,
                      .pages = (whole.empty() ? window : whole).data()});
    if (!whole.empty() && !window.empty()) {
      window_spans_.push_back(spans_.back());
      window_spans_.back().pages = window.data();
    }
    live_.push_back(&sequence);
    const std::span<const int32_t> ids = sequence.ids().subspan(step.first_position);
    token_ids_.insert(token_ids_.end(), ids.begin(), ids.end());
    for (int32_t row = 0; row < step.num_tokens; ++row) {
      positions_.push_back(step.first_position + row);
    }
    row_adapters_.resize(token_ids_.size(), sequence.adapter());
    adapted = adapted || sequence.adapter() != nullptr;
  }
  if (!adapted) row_adapters_.clear();
}

// Sets graph_. Decoding rows alone are padded with rows that belong to nobody and outputs that
// nobody reads, up to one of the backend's few shapes.
void Stage::Pad(const IterationPlan& plan, Begun& begun) {
  graph_ = {};
  const int64_t rows = static_cast<int64_t>(token_ids_.size());
  const int64_t outputs = model_.last_stage() ? rows : 0;
  const int64_t padded = backend_.PaddedRows(rows);
  // A link's own buffers have another address each time.
  // Nor can a host that sorts rows by their experts, or adapters, be replayed.
  if (!DetachesWork() || model_.config().experts > 0 || !row_adapters_.empty() ||
      (link_ != nullptr && staging() == nullptr) ||
      rows != static_cast<int64_t>(plan.steps.size()) ||
      outputs != static_cast<int64_t>(begun.outputs.size()) || begun.takes_hidden ||
      padded > max_batch_tokens_) {
    return;
  }
  int64_t context = kSmallestGraphContext;
  for (const int32_t position : positions_) {
    while (context <= position) context *= 2;
  }
  token_ids_.resize(padded, -1);
  positions_.resize(padded, -1);
  const int64_t padded_outputs = model_.last_stage() ? padded : 0;
  output_rows_.resize(padded_outputs, 0);
  sample_rows_.resize(padded_outputs);
  begun.samples.resize(padded_outputs);
  graph_ = {.rows = padded, .context = context, .output_rows = padded_outputs};
}

}  // namespace treadle
