// Logits of every position of a given text: what the tests compare with transformers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

// A model on a backend with a K/V cache of its own for one sequence. Thread safety: one thread.
class TeacherForcing {
 public:
  struct Options {
    int64_t max_tokens = 0;  // of the text
    int64_t chunk = 0;       // tokens of one Forward
    DType kv_dtype = DType::kF32;
    WeightPlan weights = {};
    int threads = 1;           // that convert weights
    std::string adapter = {};  // of all rows; empty: none
  };

  static absl::StatusOr<std::unique_ptr<TeacherForcing>> Create(const Checkpoint& checkpoint,
                                                                std::unique_ptr<Backend> backend,
                                                                const Options& options);

  // Calls `row` with each position and its logits [vocab], ascending. The positions of the
  // adapter's soft prompt come before the text's.
  using Row = std::function<void(int64_t position, std::span<const float> logits)>;
  void Run(std::span<const int32_t> text, const Row& row);
  // [positions * vocab]
  std::vector<float> Logits(std::span<const int32_t> token_ids);

 private:
  TeacherForcing() = default;
  void Forward(std::span<const int32_t> token_ids, int64_t begin, int64_t end);

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<const Adapter> adapter_;
  Options options_;
  KvLayout layout_, window_layout_;
  std::vector<int32_t> pages_;
  Buffer kv_;                       // [layers, num_pages] pages
  std::vector<std::byte*> layers_;  // into kv_
  Buffer hidden_;                   // [chunk, hidden]
  Buffer logits_;                   // [head rows, vocab]
};

int64_t ArgMax(std::span<const float> values);

}  // namespace treadle
