// A small transformer straight on a backend's ops, with random weights of one format: two layers of
// grouped-query attention with rotary embeddings and SwiGLU, no checkpoint. For tests that need
// real attention through real pages, in any weight format, on any backend.
//
// Thread safety: as Model.
#pragma once

#include <memory>
#include <vector>

#include "models/model.h"

namespace treadle {

class RandomModel : public Model {
 public:
  static constexpr int64_t kContext = 256;

  // The same seed gives the same weights, on every backend. `backend` outlives the model.
  RandomModel(Backend& backend, const WeightFormat& format, int64_t max_batch_tokens,
              uint64_t seed);

  absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                       Tensor hidden) override;
  void Normalize(Tensor hidden) override;
  using Model::Head;
  void Head(Tensor hidden, Tensor logits, std::span<const Adapter* const> adapters) override;

 private:
  struct Layer {
    std::unique_ptr<PackedMatrix> q, k, v, out, gate, up, down;
  };

  Tensor Activation(int index, int64_t rows, int64_t cols);

  Backend& backend_;
  const int64_t max_batch_tokens_;
  std::unique_ptr<PackedMatrix> embedding_;  // [vocab, hidden], and the head
  std::vector<Layer> layers_packed_;
  Buffer norm_;                      // [hidden], all ones
  Buffer rotary_;                    // cos, then sin: [kContext, head_dim / 2] each
  std::vector<Buffer> activations_;  // [max_batch_tokens, hidden] each
};

}  // namespace treadle
