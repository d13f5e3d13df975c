#include "tests/support/prefix_model.h"

#include <cstring>

namespace treadle {
namespace {

uint32_t Fold(uint32_t hash, uint32_t value) { return (hash ^ value) * 16777619u; }

// Layer and id in one word, so that a layer's pages cannot be taken for another's.
uint32_t Stored(int64_t layer, int32_t id) {
  return (static_cast<uint32_t>(layer + 1) << 24) | static_cast<uint32_t>(id);
}

std::byte* Slot(const KvPages& kv, int64_t layer, const SequenceSpan& span, int64_t position) {
  const int64_t page = span.pages[position / kv.layout.page_size];
  return kv.layers[layer] + page * kv.layout.PageStride() +
         position % kv.layout.page_size * static_cast<int64_t>(sizeof(float));
}

uint32_t HashThroughPages(const KvPages& kv, const SequenceSpan& span, int64_t position) {
  uint32_t hash = 2166136261u;
  for (int64_t p = 0; p <= position; ++p) {
    for (int64_t layer = 0; layer < PrefixModel::kLayers; ++layer) {
      uint32_t stored = 0;
      std::memcpy(&stored, Slot(kv, layer, span, p), sizeof stored);
      hash = Fold(hash, stored);
    }
  }
  return hash;
}

}  // namespace

PrefixModel::PrefixModel(int64_t vocab, int64_t context) {
  config_.architecture = "prefix";
  config_.layers = kLayers;
  config_.hidden = 2;
  config_.heads = config_.kv_heads = config_.head_dim = 1;
  config_.vocab = vocab;
  config_.context = context;
  layers_ = {0, kLayers};
  vocab_ = {0, config_.vocab};
  kv_heads_ = config_.kv_heads;
}

absl::Status PrefixModel::Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                                  Tensor hidden) {
  TREADLE_CHECK(ranks == nullptr);
  if (before_forward) before_forward();
  TREADLE_CHECK(kv.layout.dtype == DType::kF32 && kv.layers.size() == kLayers);
  Call& call = calls.emplace_back();
  call.token_ids.assign(batch.token_ids.begin(), batch.token_ids.end());
  call.positions.assign(batch.positions.begin(), batch.positions.end());
  for (const SequenceSpan& span : batch.sequences) {
    const int64_t last = span.first_position + span.num_rows - 1;
    call.spans.push_back({span.first_row,
                          span.num_rows,
                          span.first_position,
                          {span.pages, span.pages + last / kv.layout.page_size + 1}});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t i = 0; i < span.num_rows; ++i) {
        const uint32_t stored = Stored(layer, batch.token_ids[span.first_row + i]);
        std::memcpy(Slot(kv, layer, span, span.first_position + i), &stored, sizeof stored);
      }
    }
    for (int32_t i = 0; i < span.num_rows; ++i) {
      const uint32_t hash = HashThroughPages(kv, span, span.first_position + i);
      float* row = hidden.Row<float>(span.first_row + i);
      row[0] = static_cast<float>(hash & 0xffffu);
      row[1] = static_cast<float>(hash >> 16);
    }
  }
  return absl::OkStatus();
}

void PrefixModel::Head(Tensor hidden, Tensor logits, std::span<const Adapter* const>) {
  head_rows.push_back(hidden.rows);
  for (int64_t i = 0; i < hidden.rows; ++i) {
    const float* row = hidden.Row<float>(i);
    const uint32_t hash = static_cast<uint32_t>(row[0]) | (static_cast<uint32_t>(row[1]) << 16);
    for (int64_t v = 0; v < logits.cols; ++v) {
      logits.Row<float>(i)[v] = Logit(hash, static_cast<int32_t>(v));
    }
  }
}

uint32_t PrefixModel::Hash(std::span<const int32_t> prefix) {
  uint32_t hash = 2166136261u;
  for (const int32_t id : prefix) {
    for (int64_t layer = 0; layer < kLayers; ++layer) hash = Fold(hash, Stored(layer, id));
  }
  return hash;
}

float PrefixModel::Logit(uint32_t hash, int32_t token) {
  const uint32_t mixed = Fold(Fold(hash, static_cast<uint32_t>(token) * 2654435761u), hash >> 13);
  return static_cast<float>(mixed >> 8) * 0x1p-21f - 4.0f;  // [-4, 4)
}

}  // namespace treadle
