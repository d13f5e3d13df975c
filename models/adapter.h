// An adapter's factors on a rank's device, and what they add to products, or its soft prompt, whose
// rows replace the embeddings of a sequence's first positions: for each row of a batch those of its
// own adapter, so that any mix of adapters runs in one batch.
//
// Ranks cut the factors as the model's matrices are cut: where a rank holds a part of the outputs,
// B has those columns; where it holds a part of the inputs, A has those rows, and the sum over the
// ranks is the matrix's own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "models/linear.h"

namespace treadle {

// Thread safety: constant once loaded (Model::LoadAdapter); it may go on any thread, when no batch
// that names it runs any more.
class Adapter {
 public:
  // For `linears` linear layers. bytes: about what all factors take.
  Adapter(int32_t linears, uint64_t bytes)
      : factors_(static_cast<size_t>(linears)), chunk_bytes_(std::min(bytes, kMaxChunk)) {}

  // The factors for a layer; rank 0: none.
  const LowRank& Of(const Linear& linear) const {
    return factors_[static_cast<size_t>(linear.index())];
  }
  // The embedding's A, a row for each token, and B. [vocab, rank] f32; no rows: none
  const Tensor& embedding_a() const { return embedding_a_; }
  const LowRank& embedding_b() const { return embedding_b_; }
  // The rows of its soft prompt, as the model's table of embeddings has them; none on stages but
  // the first. [virtual_tokens, hidden] f32
  const Tensor& soft_prompt() const { return soft_prompt_; }
  // The positions that its soft prompt takes, on any stage: their tokens are no text.
  int32_t virtual_tokens() const { return virtual_tokens_; }

  // While it is loaded. a: [k, rank], b: [rank, n], both dense; values are rounded to `type`. What
  // was added takes its place in memory at the end of a layer, in the order of use: all A, then all
  // B, as they were added. ResourceExhausted without memory.
  void Add(const Linear& linear, DType type, int64_t rank, std::span<const float> a,
           std::span<const float> b);
  absl::Status EndLayer(Backend& backend);
  absl::Status AddEmbedding(Backend& backend, int64_t rank, std::span<const float> a,
                            std::span<const float> b);
  void SetVirtualTokens(int32_t count) { virtual_tokens_ = count; }
  // rows: [virtual_tokens, *]
  absl::Status AddSoftPrompt(Backend& backend, std::span<const float> rows);

 private:
  static constexpr uint64_t kMaxChunk = uint64_t{32} << 20;

  // Factors that have no place yet.
  struct Added {
    LowRank* factors;
    std::vector<std::byte> a, b;
  };

  // The bytes on the device.
  absl::StatusOr<std::byte*> Place(Backend& backend, std::span<const std::byte> bytes);
  // The same for a table [rows, *], as a tensor of f32.
  absl::StatusOr<Tensor> PlaceTable(Backend& backend, int64_t rows, std::span<const float> values);

  std::vector<LowRank> factors_;  // by the layer's index
  std::vector<Added> added_;
  Tensor embedding_a_;
  LowRank embedding_b_;
  Tensor soft_prompt_;
  int32_t virtual_tokens_ = 0;
  const uint64_t chunk_bytes_;
  std::vector<Buffer> chunks_;
  size_t used_ = 0;  // of the last
};

// The rows of a batch, sorted by their adapters. Thread safety: confined to the rank's thread.
class AdapterRows {
 public:
  // adapters: of each row, null: none. Empty: no row has one. They stay until the next call.
  void Sort(std::span<const Adapter* const> adapters);
  bool empty() const { return groups_.empty(); }
  std::span<const Adapter* const> of_rows() const { return of_rows_; }

  // Products of x, and what the rows' adapters add to them. Rows are those that were sorted, of
  // which a product may have a part (Projection::first_row).
  void MatMul(Backend& backend, Tensor x, std::span<const LinearProduct> products);
  // Backend::GatedMatMul of the same.
  void GatedMatMul(Backend& backend, Tensor x, std::span<const LinearProduct> pairs,
                   Backend::Gate by, Tensor gate, Tensor up, Tensor out);
  // The same for an embedding of token `ids`; scratch: [rows, *] f32.
  void AddEmbedding(Backend& backend, std::span<const int32_t> ids, Tensor scratch, Tensor out);
  // Overwrites the embeddings at positions that soft prompts take. positions: of all rows
  void ReplaceEmbedding(Backend& backend, std::span<const int32_t> positions, Tensor out);

 private:
  struct Group {
    const Adapter* adapter;
    std::vector<int32_t> rows;  // ascending
  };
  std::span<const Adapter* const> of_rows_;
  std::vector<Group> groups_;
  std::vector<Projection> plain_;         // of one call
  std::vector<LowRankProduct> products_;  // of one call
};

}  // namespace treadle
