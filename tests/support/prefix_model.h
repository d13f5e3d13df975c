// A model whose output says exactly which tokens it saw, and where it found them.
//
// Each "layer" writes a row's token id into the sequence's page; a row's hidden state is a hash of
// the ids of positions 0 to its own, read back through the pages of every layer. A wrong page,
// slot, position, row or copy, or a neighbour's token, gives another hash and so other logits.
// Arithmetic is on integers: results are equal or wrong. Needs an f32 cache (an id takes the place
// of an element).
//
// Thread safety: as Model; `before_forward` runs on the rank's thread.
#pragma once

#include <functional>
#include <vector>

#include "models/model.h"

namespace treadle {

class PrefixModel : public Model {
 public:
  // Inputs of one Forward.
  struct Call {
    struct Span {
      int32_t first_row = 0;
      int32_t num_rows = 0;
      int32_t first_position = 0;
      std::vector<int32_t> pages;  // those that hold positions up to the span's last
      bool operator==(const Span&) const = default;
    };
    std::vector<int32_t> token_ids;
    std::vector<int32_t> positions;
    std::vector<Span> spans;
  };

  static constexpr int64_t kLayers = 2;

  explicit PrefixModel(int64_t vocab = 50, int64_t context = 4096);

  absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                       Tensor hidden) override;
  void Normalize(Tensor) override {}
  using Model::Head;
  void Head(Tensor hidden, Tensor logits, std::span<const Adapter* const> adapters) override;

  // The hash of a prefix, and the logit that Head gives `token` after it.
  static uint32_t Hash(std::span<const int32_t> prefix);
  static float Logit(uint32_t hash, int32_t token);

  std::vector<Call> calls;
  std::vector<int64_t> head_rows;  // of each Head
  std::function<void()> before_forward;
};

}  // namespace treadle
