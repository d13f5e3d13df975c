// A report of a checkpoint's contents, and of the memory that serving it costs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "models/checkpoints/checkpoint.h"

namespace treadle {

struct ModelReport {
  struct FormatUse {
    std::string format;
    int64_t tensors = 0;
    int64_t parameters = 0;
    uint64_t bytes = 0;  // with constants
    double Bits() const {
      return 8.0 * static_cast<double>(bytes) /
             static_cast<double>(std::max<int64_t>(parameters, 1));
    }
  };
  std::string name;
  std::string path;
  std::string kind;  // "GGUF", "Hugging Face", "random weights"
  ModelConfig config;
  uint64_t file_bytes = 0;
  int64_t parameters = 0;
  int64_t parameters_per_token = 0;  // that a token is multiplied with, or looked up in
  uint64_t weight_bytes = 0;         // as stored
  std::vector<FormatUse> formats;    // most bytes first

  std::string tokenizer;  // "byte-level BPE", "SentencePiece"; empty: none
  std::string pre_tokenizer;
  int64_t tokens = 0;
  int32_t bos = -1;
  int32_t eos = -1;
  std::vector<int32_t> end_ids;
  std::vector<std::string> left_aside;  // Checkpoint::left_aside
  bool chat_template = false;
  uint64_t kv_bytes_per_token = 0;  // f16, all layers
};

ModelReport Inspect(const Checkpoint& checkpoint);

struct ServingCost {
  uint64_t weights = 0;      // as stored; packing adds padding
  uint64_t kv = 0;           // `batch` requests of `context` tokens
  uint64_t activations = 0;  // of an iteration of `batch_tokens`
  uint64_t total() const { return weights + kv + activations; }
};
ServingCost EstimateServingCost(const ModelReport& report, int64_t context, int64_t batch,
                                int64_t batch_tokens);

// Options of what is printed beside the report.
struct ServingPlan {
  int64_t context = 0;  // 0: the model's
  int64_t batch = 8;
  int64_t batch_tokens = 0;  // in one iteration
};
// For a model that Checkpoint::Open does not know: the family most like it, and which of the two's
// tensors and fields the other has not, on one line. Empty if the file cannot be read at all.
std::string NearestFamily(const std::string& path);

std::string ReportText(const ModelReport& report, const ServingPlan& plan);
std::string ReportJson(const ModelReport& report, const ServingPlan& plan);

}  // namespace treadle
