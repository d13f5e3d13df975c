#include "bench/quality/teacher_forcing.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/status.h"
#include "engine/plan/defaults.h"
#include "models/text/tokenizer.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<TeacherForcedModel>> TeacherForcedModel::Create(
    const Checkpoint& checkpoint, std::unique_ptr<Backend> backend, const Options& options) {
  std::unique_ptr<TeacherForcedModel> out(
      new TeacherForcedModel(options.load.threads > 0 ? options.load.threads : UsableCpus()));
  out->backend_ = std::move(backend);
  out->chunk_ = std::min(options.window, options.chunk);
  LoadOptions load = options.load;
  load.max_batch_tokens = out->chunk_;
  load.max_head_rows = kTileRows;
  load.max_context = options.window;
  TREADLE_ASSIGN_OR_RETURN(out->model_, Model::Load(checkpoint, *out->backend_, load));
  const ModelConfig& config = out->model_->config();
  out->layout_ = {config.kv_heads, config.head_dim, kDefaultPageSize,
                  (options.window + kDefaultPageSize - 1) / kDefaultPageSize, options.kv_dtype};
  out->layout_.latent_dim = config.latent_dim;
  out->window_layout_ = out->layout_;
  out->window_layout_.kv_heads = config.KvHeads(/*local=*/true);
  out->window_layout_.head_dim = config.HeadDim(/*local=*/true);
  out->window_layout_.state = out->model_->state_layout();
  out->pages_.resize(static_cast<size_t>(out->layout_.num_pages));
  std::iota(out->pages_.begin(), out->pages_.end(), 0);
  const auto allocate = [&](Buffer& buffer, int64_t bytes) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(buffer, out->backend_->Allocate(static_cast<size_t>(bytes)));
    return absl::OkStatus();
  };
  const int64_t layer_bytes =
      out->layout_.num_pages * std::max(out->layout_.PageBytes(), out->window_layout_.PageBytes());
  const auto float_bytes = static_cast<int64_t>(sizeof(float));
  TREADLE_RETURN_IF_ERROR(allocate(out->cache_, layer_bytes * config.layers));
  TREADLE_RETURN_IF_ERROR(allocate(out->head_input_, kTileRows * config.hidden * float_bytes));
  TREADLE_RETURN_IF_ERROR(allocate(out->logits_, kTileRows * config.vocab * float_bytes));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    out->layers_.push_back(out->cache_.data() + config.KvSource(layer) * layer_bytes);
  }
  return out;
}

void TeacherForcedModel::Forward(std::span<const int32_t> tokens, Tensor hidden) {
  const auto length = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < length; begin += chunk_) {
    const int64_t count = std::min(chunk_, length - begin);
    std::vector<int32_t> positions(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(begin));
    const SequenceSpan span = {.first_row = 0,
                               .num_rows = static_cast<int32_t>(count),
                               .first_position = static_cast<int32_t>(begin),
                               .pages = pages_.data()};
    const Batch batch = {tokens.subspan(begin, count), positions, {&span, 1}};
    TREADLE_CHECK(
        model_
            ->Forward(batch, {layout_, layers_, window_layout_}, nullptr, hidden.Rows(begin, count))
            .ok());
  }
  TREADLE_CHECK(backend_->Synchronize().ok());
}

Tensor TeacherForcedModel::Head(Tensor hidden) {
  TREADLE_CHECK(hidden.rows <= kTileRows);
  // The model's head overwrites its input.
  const Tensor input = DenseTensor(head_input_.data(), DType::kF32, hidden.rows, hidden.cols);
  for (int64_t row = 0; row < hidden.rows; ++row) {
    std::copy_n(hidden.Row<float>(row), hidden.cols, input.Row<float>(row));
  }
  const Tensor logits = DenseTensor(logits_.data(), DType::kF32, hidden.rows, vocab());
  model_->Head(input, logits);
  TREADLE_CHECK(backend_->Synchronize().ok());
  return logits;
}

void TeacherForcedModel::Rows(int64_t count, const std::function<void(int64_t)>& body) {
  pool_.ParallelFor(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

double LogSumExp(std::span<const float> logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

absl::StatusOr<std::vector<int32_t>> EncodeTextFile(const Checkpoint& checkpoint,
                                                    const std::string& file,
                                                    std::string_view flag) {
  if (checkpoint.tokenizer() == nullptr) {
    return InvalidArgument(checkpoint.path(), " has no tokenizer, which ", flag, " needs");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (!stream || !(text << stream.rdbuf())) {
    return NotFound(flag, " ", file, ": cannot be read, or is empty");
  }
  auto tokens = tokenizer->Encode(text.str(), {.add_special = true, .parse_special = false});
  if (!tokens.ok()) return InvalidArgument(flag, " ", file, ": ", tokens.status().message());
  return tokens;
}

}  // namespace treadle
