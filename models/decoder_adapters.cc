// A decoder's adapters: factors of files, cut as this rank's matrices are.
#include <algorithm>
#include <cmath>
#include <tuple>

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

float LargestOf(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// Brings A and B, which is to be multiplied by `scale`, to like magnitudes by a power of two.
// False, and nothing is changed, if F16 would lose more of them than its 11 bits say.
bool FitHalves(std::span<float> a, std::span<const float> b, float& scale) {
  constexpr float kLeast = 0x1p-10f, kMax = 0x1p15f;
  const float of_a = LargestOf(a), of_b = LargestOf(b) * std::abs(scale);
  const float both = std::sqrt(of_a) * std::sqrt(of_b);
  if (!(both >= kLeast && both <= kMax)) return false;
  const float power = std::exp2(std::round(std::log2(of_b / of_a) / 2));
  for (float& value : a) value *= power;
  scale /= power;
  return true;
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
  DType type = factors.LoadedType();
  float scale = factors.scale;
  if (type == DType::kF32 && backend_.low_rank_type() == DType::kF16 && FitHalves(a, b, scale)) {
    type = DType::kF16;
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
    const std::vector<float> own = AsColumns(b, rank, std::move(rows), order, scale);
    TREADLE_CHECK(linear.loaded() && std::ssize(own) == linear.weight().n() * rank);
    TREADLE_CHECK(std::ssize(a) == linear.weight().k() * rank);
    adapter.Add(linear, type, rank, a, own);
  };
  const std::vector<ShardRange> rows = PartsOf(row.rows, shape);
  if (row.part == Part::kHead) {
    add(head(), rows);
  } else if (InExperts(row.part)) {
    add(LinearOf(*weights, row.part, factors.expert), rows);
  } else {
    for (auto& [piece, own_rows] : PiecesOf(row, shape)) add(weights->*piece, own_rows);
  }
  return absl::OkStatus();
}

// transformers scales the embeddings of these families in the lookup, which `inputs_embeds` pass
// by; here an embedding stays as it is stored, or is scaled behind it. Other families' multipliers
// and norms are behind the lookup in both.
float Decoder::SoftPromptScale() const {
  const bool in_lookup = architecture_->embedding_scaled || architecture_->embedding_multiplied;
  return in_lookup ? 1 / std::sqrt(static_cast<float>(config_.hidden)) : 1;
}

absl::StatusOr<std::shared_ptr<const Adapter>> Decoder::LoadAdapter(const AdapterFile& file) const {
  const auto place = [](const AdapterFactors* factors) {  // in the order of use
    return std::tuple(factors->layer, factors->row, factors->expert);
  };
  std::vector<const AdapterFactors*> in_order;
  for (const AdapterFactors& factors : file.factors()) in_order.push_back(&factors);
  std::ranges::stable_sort(in_order, {}, place);
  std::shared_ptr<Adapter> adapter = NewAdapter(file.memory(backend_.low_rank_type()));
  int64_t layer = 0;
  for (const AdapterFactors* factors : in_order) {
    if (layer != factors->layer) TREADLE_RETURN_IF_ERROR(adapter->EndLayer(backend_));
    layer = factors->layer;
    TREADLE_RETURN_IF_ERROR(AddFactors(file, *factors, *adapter));
  }
  TREADLE_RETURN_IF_ERROR(adapter->EndLayer(backend_));
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
