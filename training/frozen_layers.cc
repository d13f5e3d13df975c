#include "training/frozen_layers.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 64;

int64_t PagesOf(int64_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

}  // namespace

FrozenLayers::Room FrozenLayers::Room::For(int64_t sequences, int64_t max_length) {
  return {.tokens = sequences * max_length, .pages = sequences * PagesOf(max_length)};
}

FrozenLayers::Room FrozenLayers::Room::ForSlices(int64_t max_length) {
  return {.tokens = std::max(kSliceTokens, max_length),
          .pages = std::max(kSliceTokens, PagesOf(max_length))};
}

FrozenLayers::Slice FrozenLayers::Pass::SliceFrom(size_t begin) const {
  size_t end = begin + 1;
  for (int64_t tokens = lengths[begin]; end < lengths.size(); ++end) {
    tokens += lengths[end];
    if (tokens > kSliceTokens) break;
  }
  return {begin, end};
}

absl::StatusOr<std::unique_ptr<FrozenLayers>> FrozenLayers::Create(Tape& tape, Decoder& model,
                                                                   const Room& room) {
  std::unique_ptr<FrozenLayers> layers(new FrozenLayers(tape, model));
  const ModelConfig& config = model.config();
  layers->layout_ = {.kv_heads = config.kv_heads,
                     .head_dim = config.head_dim,
                     .page_size = kPageSize,
                     .num_pages = room.pages,
                     .dtype = DType::kF32,
                     .key_order = tape.key_order()};
  const std::pair<Buffer*, int64_t> buffers[] = {
      {&layers->hidden_, room.tokens * config.hidden * 4},
      {&layers->pages_, layers->layout_.num_pages * layers->layout_.PageBytes()}};
  for (const auto& [buffer, bytes] : buffers) {
    TREADLE_ASSIGN_OR_RETURN(*buffer, tape.Allocate(static_cast<size_t>(bytes)));
  }
  return layers;
}

void FrozenLayers::Begin(LayerRange layers, std::span<const int32_t> lengths, Pass& pass) const {
  pass.layers = layers;
  pass.lengths.assign(lengths.begin(), lengths.end());
  const int64_t rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  pass.gradient.resize(static_cast<size_t>(rows * model_.config().hidden));
  pass.states.resize(static_cast<size_t>(layers.end - layers.begin + 1) * pass.gradient.size());
}

void FrozenLayers::MakeBatch(const Pass& pass, Slice slice) {
  page_ids_.resize(static_cast<size_t>(layout_.num_pages));
  std::iota(page_ids_.begin(), page_ids_.end(), 0);
  positions_.clear();
  sequences_.clear();
  int64_t page = 0;
  for (const int32_t length :
       std::span(pass.lengths).subspan(slice.begin, slice.end - slice.begin)) {
    sequences_.push_back({.first_row = static_cast<int32_t>(positions_.size()),
                          .num_rows = length,
                          .first_position = 0,
                          .pages = page_ids_.data() + page});
    page += PagesOf(length);
    for (int32_t i = 0; i < length; ++i) positions_.push_back(i);
  }
  tokens_.resize(positions_.size());
}

std::span<float> FrozenLayers::RowsOf(const Pass& pass, Slice slice, std::span<float> rows) const {
  const auto before = pass.lengths.begin() + static_cast<std::ptrdiff_t>(slice.begin);
  const auto first = std::accumulate(pass.lengths.begin(), before, size_t{0});
  const auto hidden = static_cast<size_t>(model_.config().hidden);
  return rows.subspan(first * hidden, positions_.size() * hidden);
}

absl::StatusOr<Tensor> FrozenLayers::Run(int64_t layer, Slice slice, Pass& pass) {
  MakeBatch(pass, slice);
  const auto [begin, end] = model_.layers();
  const std::vector<std::byte*> all(static_cast<size_t>(end - begin), pages_.data());
  const Tensor hidden =
      DenseTensor(hidden_.data(), DType::kF32, std::ssize(positions_), model_.config().hidden);
  std::ranges::copy(RowsOf(pass, slice, pass.State(layer)), hidden.Row<float>(0));
  TREADLE_RETURN_IF_ERROR(model_.RunLayer(static_cast<size_t>(layer - begin),
                                          {tokens_, positions_, sequences_}, {layout_, all},
                                          nullptr, hidden));
  return hidden;
}

absl::Status FrozenLayers::Forward(int64_t layer, Slice slice, Pass& pass) {
  TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, Run(layer, slice, pass));
  const std::span<float> next = RowsOf(pass, slice, pass.State(layer + 1));
  std::ranges::copy_n(hidden.Row<float>(0), std::ssize(next), next.begin());
  return absl::OkStatus();
}

absl::Status FrozenLayers::Backward(int64_t layer, Slice slice, Pass& pass) {
  tape_.Record();
  TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, Run(layer, slice, pass));
  const std::span<float> rows = RowsOf(pass, slice, pass.gradient);
  float* const gradient = tape_.Gradient(hidden).Row<float>(0);
  std::ranges::copy(rows, gradient);
  tape_.Backward();
  std::ranges::copy_n(gradient, std::ssize(rows), rows.begin());
  return absl::OkStatus();
}

LocalLayers::LocalLayers(std::unique_ptr<FrozenLayers> layers, TrainedAdapter& adapter)
    : layers_(std::move(layers)), adapter_(adapter) {
  adapter.Attach(layers_->model(), layers_->model().layers(), layers_->tape());
}

absl::Status LocalLayers::BeginStep() {
  std::ranges::fill(adapter_.gradients(), 0.0f);
  return absl::OkStatus();
}

absl::Status LocalLayers::Forward(std::span<const int32_t> lengths, std::span<float> hidden) {
  const auto [begin, end] = layers_->model().layers();
  layers_->Begin({begin, end}, lengths, pass_);
  std::ranges::copy(hidden, pass_.State(begin).begin());
  for (int64_t i = begin; i < end; ++i)
    TREADLE_RETURN_IF_ERROR(layers_->Forward(i, pass_.All(), pass_));
  std::ranges::copy(pass_.State(end), hidden.begin());
  return absl::OkStatus();
}

absl::Status LocalLayers::Backward(std::span<float> gradient) {
  const auto [begin, end] = layers_->model().layers();
  std::ranges::copy(gradient, pass_.gradient.begin());
  for (int64_t i = end - 1; i >= begin; --i)
    TREADLE_RETURN_IF_ERROR(layers_->Backward(i, pass_.All(), pass_));
  std::ranges::copy(pass_.gradient, gradient.begin());
  return absl::OkStatus();
}

}  // namespace treadle
