// One model reading given texts on the CPU: the logits of every position (teacher forcing), a tile
// of rows at a time, and what the benchmarks of quality make of a row of logits.
//
// Thread safety: one thread per TeacherForcedModel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

class TeacherForcedModel {
 public:
  static constexpr int64_t kTileRows = 64;

  struct Options {
    int64_t window = 0;  // most tokens of one text
    // Tokens of one forward pass: a longer text is read in chunks (the same bits: N2), so that
    // activations stay small.
    int64_t chunk = 512;
    DType kv_dtype = DType::kF16;
    // Its threads run Rows, too; its limits (max_*) follow from the above.
    LoadOptions load = {};
  };

  // `backend`'s memory is the host's.
  static absl::StatusOr<std::unique_ptr<TeacherForcedModel>> Create(
      const Checkpoint& checkpoint, std::unique_ptr<Backend> backend, const Options& options);

  // The residual stream after the last layer, for one text that begins at position 0.
  // tokens: at most `window`. hidden: [tokens, hidden_size()] f32.
  void Forward(std::span<const int32_t> tokens, Tensor hidden);

  // Logits of up to kTileRows rows of `hidden`, which stays as it is: [rows, vocab] f32, valid
  // until the next call.
  Tensor Head(Tensor hidden);

  // Calls body(row) for each row of [0, count), several at a time.
  void Rows(int64_t count, const std::function<void(int64_t)>& body);

  int64_t hidden_size() const { return model_->config().hidden; }
  int64_t vocab() const { return model_->config().vocab; }
  const Backend& backend() const { return *backend_; }

 private:
  explicit TeacherForcedModel(int threads) : pool_(threads) {}

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  ThreadPool pool_;
  int64_t chunk_ = 0;
  KvLayout layout_, window_layout_;
  std::vector<int32_t> pages_;
  Buffer cache_;                    // [layers, num_pages] pages
  std::vector<std::byte*> layers_;  // into cache_
  Buffer head_input_;               // [kTileRows, hidden] f32
  Buffer logits_;                   // [kTileRows, vocab] f32
};

// The logarithm of the sum of exponentials: log p(token) = logits[token] - it. Terms are floats,
// added in double: relative error of the sum below 1e-6.
double LogSumExp(std::span<const float> logits);

// The file's whole text as token ids, as the model's authors begin a text (BOS if the model wants
// one); text that looks like a control token stays text. Errors name `flag`, which gave the file:
// no tokenizer, no such file, not UTF-8 (with the offset), no token.
absl::StatusOr<std::vector<int32_t>> EncodeTextFile(const Checkpoint& checkpoint,
                                                    const std::string& file,
                                                    std::string_view flag = "--text");

}  // namespace treadle
