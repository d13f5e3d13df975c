// What a GGUF file says, beside the tensors' data, of a model that comes from a Hugging Face
// folder: its sizes, its tokenizer, its chat template, as llama.cpp expects them.
//
// Thread safety: pure functions.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/write/gguf_file_writer.h"

namespace treadle {

// general.*, ARCHITECTURE.* and tokenizer.*. notices: appends what could not be said. Errors: a
// tokenizer that GGUF cannot hold.
absl::Status DescribeModel(const Checkpoint& checkpoint, GgufMetadataWriter& metadata,
                           std::vector<std::string>& notices);

// tokenizer.ggml.*, the inverse of gguf_tokenizer.h. There are as many tokens as `vocab`.
absl::Status DescribeTokenizer(const TokenizerSpec& spec, int64_t vocab,
                               GgufMetadataWriter& metadata, std::vector<std::string>& notices);

// The scores of SentencePiece tokens that merges in this order say: the earlier a token is made,
// the larger. Tokens that no merge makes have the least.
std::vector<float> ScoresOfMerges(const TokenizerSpec& spec);

// By what "llama3" scaling divides the frequency of each pair: the values of rope_freqs.weight.
// [rope_dim / 2]; empty if the model has no such scaling.
std::vector<float> FrequencyFactors(const ModelConfig& config);

}  // namespace treadle
