// Examples to train on, from a file of JSON lines: tokens, and which of them count.
//
// A line is one of
//   {"messages": [{"role": "user", "content": "..."}, ...]}  through the model's chat template;
//     the answers of the role "assistant" count, with what the template ends them by
//   {"prompt": "...", "completion": "..."}                   the completion counts, and the end
//   {"text": "..."}                                          all counts
// Prompts are tokenized apart from what follows them, as they are when the model serves.
//
// Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

struct Example {
  std::vector<int32_t> tokens;
  std::vector<bool> counts;  // [tokens]: whether the prediction of this token is part of the loss
  int64_t Counted() const { return std::count(counts.begin() + 1, counts.end(), true); }
};

struct ExampleOptions {
  int64_t max_length = 512;      // longer examples are cut at their end
  bool train_on_prompt = false;  // prompts and the other roles' messages count too
};

struct Examples {
  std::vector<Example> examples;
  int64_t cut = 0;  // examples that were longer
  std::string sum;  // SHA-256 of the file, 64 hexadecimal digits
};

// Errors: the file cannot be read or has no lines, the model lacks a tokenizer or the chat template
// that a line asks for, or a line, by its number, that is broken or in which nothing counts.
absl::StatusOr<Examples> ReadExamples(const std::string& path, const Checkpoint& checkpoint,
                                      const ExampleOptions& options);

}  // namespace treadle
