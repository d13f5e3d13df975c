#include "tests/models/teacher_forcing.h"

#include <algorithm>
#include <cstdlib>

#include "base/status.h"
#include "models/adapter.h"
#include "models/adapters/adapter_file.h"

namespace treadle {
namespace {

constexpr int64_t kPageSize = 16;
constexpr int64_t kHeadRows = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<TeacherForcing>> TeacherForcing::Create(
    const Checkpoint& checkpoint, std::unique_ptr<Backend> backend, const Options& options) {
  std::unique_ptr<TeacherForcing> out(new TeacherForcing());
  out->backend_ = std::move(backend);
  out->options_ = options;
  std::shared_ptr<const AdapterFile> adapter;
  if (!options.adapter.empty()) {
    TREADLE_ASSIGN_OR_RETURN(adapter, AdapterFile::Open(options.adapter, checkpoint.config()));
    out->options_.max_tokens += adapter->virtual_tokens();
  }
  const int64_t max_tokens = out->options_.max_tokens;
  LoadOptions load;
  load.max_batch_tokens = options.chunk;
  load.max_head_rows = kHeadRows;
  load.max_context = max_tokens;
  load.weights = options.weights;
  load.threads = options.threads;
  TREADLE_ASSIGN_OR_RETURN(out->model_, Model::Load(checkpoint, *out->backend_, load));
  const ModelConfig& config = out->model_->config();
  if (adapter) {
    TREADLE_ASSIGN_OR_RETURN(out->adapter_, out->model_->LoadAdapter(*adapter));
  }
  out->layout_ = {.kv_heads = config.kv_heads,
                  .head_dim = config.head_dim,
                  .page_size = kPageSize,
                  .num_pages = (max_tokens + kPageSize - 1) / kPageSize,
                  .dtype = options.kv_dtype,
                  .key_order = out->backend_->key_order()};
  out->layout_.latent_dim = config.latent_dim;
  out->window_layout_ = out->layout_;
  out->window_layout_.kv_heads = config.KvHeads(/*local=*/true);
  out->window_layout_.head_dim = config.HeadDim(/*local=*/true);
  // Any order of pages will do: the last comes first here.
  for (int64_t page = out->layout_.num_pages; page-- > 0;) {
    out->pages_.push_back(static_cast<int32_t>(page));
  }
  out->window_layout_.state = out->model_->state_layout();
  const int64_t layer_bytes =
      out->layout_.num_pages * std::max(out->layout_.PageBytes(), out->window_layout_.PageBytes());
  const auto allocate = [&](Buffer& buffer, int64_t bytes) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(buffer, out->backend_->Allocate(static_cast<size_t>(bytes)));
    return absl::OkStatus();
  };
  TREADLE_RETURN_IF_ERROR(allocate(out->kv_, config.layers * layer_bytes));
  TREADLE_RETURN_IF_ERROR(allocate(out->hidden_, options.chunk * config.hidden * 4));
  TREADLE_RETURN_IF_ERROR(allocate(out->logits_, kHeadRows * config.vocab * 4));
  for (int64_t i = 0; i < config.layers; ++i) {
    out->layers_.push_back(out->kv_.data() + config.KvSource(i) * layer_bytes);
  }
  return out;
}

void TeacherForcing::Forward(std::span<const int32_t> token_ids, int64_t begin, int64_t end) {
  std::vector<int32_t> positions;
  for (int64_t p = begin; p < end; ++p) positions.push_back(static_cast<int32_t>(p));
  const SequenceSpan sequence = {.first_row = 0,
                                 .num_rows = static_cast<int32_t>(end - begin),
                                 .first_position = static_cast<int32_t>(begin),
                                 .pages = pages_.data()};
  const std::vector<const Adapter*> adapters(adapter_ ? positions.size() : 0, adapter_.get());
  const Batch batch = {
      token_ids.subspan(begin, end - begin), positions, {&sequence, 1}, {}, adapters};
  const Tensor hidden =
      DenseTensor(hidden_.data(), DType::kF32, end - begin, model_->config().hidden);
  TREADLE_CHECK(model_->Forward(batch, {layout_, layers_, window_layout_}, nullptr, hidden).ok());
}

void TeacherForcing::Run(std::span<const int32_t> text, const Row& row) {
  std::vector<int32_t> token_ids(adapter_ ? static_cast<size_t>(adapter_->virtual_tokens()) : 0);
  token_ids.insert(token_ids.end(), text.begin(), text.end());
  const ModelConfig& config = model_->config();
  const auto length = static_cast<int64_t>(token_ids.size());
  TREADLE_CHECK(length <= options_.max_tokens);
  std::vector<float> host(static_cast<size_t>(config.vocab));
  for (int64_t begin = 0; begin < length; begin += options_.chunk) {
    const int64_t end = std::min(begin + options_.chunk, length);
    Forward(token_ids, begin, end);
    const Tensor hidden = DenseTensor(hidden_.data(), DType::kF32, end - begin, config.hidden);
    for (int64_t at = begin; at < end; at += kHeadRows) {
      const int64_t rows = std::min(kHeadRows, end - at);
      const Tensor logits = DenseTensor(logits_.data(), DType::kF32, rows, config.vocab);
      const std::vector<const Adapter*> adapters(adapter_ ? rows : 0, adapter_.get());
      model_->Head(hidden.Rows(at - begin, rows), logits, adapters);
      for (int64_t i = 0; i < rows; ++i) {
        TREADLE_CHECK(backend_->Synchronize().ok());
        backend_->CopyToHost(host.data(), logits.Row<float>(i), host.size() * sizeof(float));
        row(at + i, host);
      }
    }
  }
}

std::vector<float> TeacherForcing::Logits(std::span<const int32_t> token_ids) {
  std::vector<float> all;
  Run(token_ids, [&](int64_t, std::span<const float> logits) {
    all.insert(all.end(), logits.begin(), logits.end());
  });
  return all;
}

int64_t ArgMax(std::span<const float> values) {
  return std::ranges::max_element(values) - values.begin();
}

}  // namespace treadle
