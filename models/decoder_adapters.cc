// A decoder's adapters: factors of files, cut as this rank's matrices are.
#include <cmath>

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {
namespace {

// The rows of a matrix [*, cols] that `ranges` name (none: all), as columns: [cols, rows]; row i is
// the file's row order[i] (no order: row i), times `scale`.
std::vector<float> AsColumns(std::span<const float> values, int64_t cols,
                             std::vector<ShardRange> ranges, std::span<const int32_t> order,
                             float scale) {
  if (ranges.empty()) ranges = {{0, std::ssize(values) / cols}};
  int64_t rows = 0, at = 0;
  for (const ShardRange& range : ranges) rows += range.size();
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (const ShardRange& range : ranges) {
    for (int64_t row = range.begin; row < range.end; ++row, ++at) {
      const int64_t from = order.empty() ? row : order[static_cast<size_t>(row)];
      for (int64_t i = 0; i < cols; ++i) {
        out[static_cast<size_t>(i * rows + at)] =
            values[static_cast<size_t>(from * cols + i)] * scale;
      }
    }
  }
  return out;
}

}  // namespace

const LayerWeights* Decoder::WeightsFor(const AdapterFactors& factors) const {
  if (!InLayer(factors.row->part)) {
    const bool embeds = first_stage() || config_.layer_embedding > 0;
    return (factors.row->part == Part::kHead ? last_stage() : embeds) ? &outside_ : nullptr;
  }
  if (factors.layer < layers_.begin || factors.layer >= layers_.end) return nullptr;
  return &layer_weights_[static_cast<size_t>(factors.layer - layers_.begin)];
}

absl::Status Decoder::AddFactors(const AdapterFile& file, const AdapterFactors& factors,
                                 Adapter& adapter) const {
  const LayerWeights* const weights = WeightsFor(factors);
  if (weights == nullptr) return absl::OkStatus();
  const TensorRow& row = *factors.row;
  const int64_t rank = factors.rank;
  std::vector<float> a = DecodeVector(factors.a), b = DecodeVector(factors.b);
  if (row.part == Part::kEmbedding) {
    if (rank > attended_.cols) {
      return Unimplemented(file.path(), ": the factors of the embedding have rank ", rank,
                           ", expected at most ", attended_.cols);
    }
    if (!factors.a_by_token) a = AsColumns(a, config_.vocab, {}, {}, 1);
    return adapter.AddEmbedding(backend_, rank, a, AsColumns(b, rank, {}, {}, factors.scale));
  }
  const bool in_layer = InLayer(row.part);
  const LayerShape whole = {config_, {}, {}};
  const LayerShape& shape =
      in_layer ? shapes_[static_cast<size_t>(factors.layer - layers_.begin)] : whole;
  // A is [rank, k], of which this rank may have some columns.
  const int64_t k = std::ssize(a) / rank;
  if (const auto columns = PartsOf(row.columns, shape); !columns.empty()) {
    std::vector<float> part;
    for (int64_t i = 0; i < rank; ++i) {
      const auto begin = a.begin() + i * k;
      for (const ShardRange& range : columns) {
        part.insert(part.end(), begin + range.begin, begin + range.end);
      }
    }
    a = std::move(part);
  }
  a = AsColumns(a, std::ssize(a) / rank, {}, {}, 1);
  const auto order = FileRowOrder(row, config_, file.kind());
  const auto add = [&](const Linear& linear, std::vector<ShardRange> rows) {
    const std::vector<float> own = AsColumns(b, rank, std::move(rows), order, factors.scale);
    TREADLE_CHECK(linear.loaded() && std::ssize(own) == linear.weight().n() * rank);
    TREADLE_CHECK(std::ssize(a) == linear.weight().k() * rank);
    return adapter.Add(backend_, linear, factors.LoadedType(), rank, a, own);
  };
  const std::vector<ShardRange> rows = PartsOf(row.rows, shape);
  if (row.part == Part::kHead) return add(head(), rows);
  const bool gated = row.rows == Extent::kGatedQueries && config_.gated_attention;
  if (gated || row.rows == Extent::kBetaDecay) {  // two layers in one matrix
    TREADLE_RETURN_IF_ERROR(add(gated ? weights->q_gate : weights->state_decay, {rows[1]}));
    return add(LinearOf(*weights, row.part, 0), {rows[0]});
  }
  return add(LinearOf(*weights, row.part, factors.expert), rows);
}

// transformers scales the embeddings of these families in the lookup, which `inputs_embeds` pass
// by; here an embedding stays as it is stored, or is scaled behind it. Other families' multipliers
// and norms are behind the lookup in both.
float Decoder::SoftPromptScale() const {
  const bool in_lookup = architecture_->embedding_scaled || architecture_->embedding_multiplied;
  return in_lookup ? 1 / std::sqrt(static_cast<float>(config_.hidden)) : 1;
}

absl::StatusOr<std::shared_ptr<const Adapter>> Decoder::LoadAdapter(const AdapterFile& file) const {
  if (!backend_.has_low_rank()) {
    return Unimplemented(file.path(), ": the backend ", backend_.name(),
                         " has no adapters; expected the backend cpu");
  }
  std::shared_ptr<Adapter> adapter = NewAdapter();
  for (const AdapterFactors& factors : file.factors()) {
    TREADLE_RETURN_IF_ERROR(AddFactors(file, factors, *adapter));
  }
  adapter->SetVirtualTokens(file.virtual_tokens());
  if (file.virtual_tokens() > 0 && first_stage()) {
    std::vector<float> rows = DecodeVector(file.soft_prompt());
    for (float& value : rows) value *= SoftPromptScale();
    TREADLE_RETURN_IF_ERROR(adapter->AddSoftPrompt(backend_, rows));
  }
  TREADLE_RETURN_IF_ERROR(file.CheckUnchanged());
  return std::shared_ptr<const Adapter>(std::move(adapter));
}

}  // namespace treadle
