// A model of a named shape with random weights, to measure speed where no checkpoint of that shape
// is at hand. The text that it makes means nothing, and there is no tokenizer: token ids only.
//
//   random:llama-3.1-8b                       as published
//   random:llama-3.2-1b,layers=2,vocab=1000   changed: layers, hidden, heads, kv-heads, ffn, vocab,
//                                             context
//
// Weights are bf16, uniform with a standard deviation of 0.02 (GPT-2's), so that activations stay
// finite at any size, and the same wherever a model of the same sizes is opened (recipe() names
// them). They are never all in memory: every tensor is a part of one block of random numbers,
// mapped as often as the largest tensor takes. Gains of norms are 1, but for six features that are
// twenty times larger: the outliers of real models from 6.7B parameters on (Dettmers, chapter 2),
// without which LLM.int8() would have less to do.
//
// Thread safety: as Checkpoint.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "models/checkpoints/checkpoint.h"

namespace treadle {

class RandomCheckpoint : public Checkpoint {
 public:
  static constexpr std::string_view kPrefix = "random:";  // of what Checkpoint::Open takes

  // `path` begins with kPrefix. Errors name the part that is wrong, and the shapes that there are.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);
  // "llama-3.1-8b, llama-3.2-1b, ..."
  static std::string Shapes();

 private:
  absl::Status Read(const std::string& path);
  absl::Status MakeTensors();

  std::shared_ptr<const std::byte> noise_, gains_;
};

}  // namespace treadle
