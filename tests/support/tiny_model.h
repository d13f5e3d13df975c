// A tiny model of any architecture with random weights and a byte-level BPE tokenizer, as a GGUF
// file or as a Hugging Face folder: a real checkpoint that loads in a millisecond. The same options
// give the same weights, in both containers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/support/tiny_tokenizer.h"

namespace treadle {

struct Architecture;

struct TinyModelOptions {
  std::string format = "f32";  // of matrices: f32, f16, bf16, q8_0, q4_1 (the last two: GGUF only)
  uint64_t seed = 1;
  int64_t layers = 2;
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t kv_heads = 2;  // where heads may share K and V
  int64_t ffn_hidden = 128;
  int64_t context = 256;
  int64_t window = 0;  // of all layers; where some have one in every model: of each second, 24
  int64_t shared_kv_layers = 0;  // of families that may have such layers
  bool tied_head = true;
  bool tokenizer = true;
  bool chat_template = true;
  // GGUF only: metadata besides, by what follows the architecture's name in the key.
  std::map<std::string, float> numbers = {};
};

// Each returns the path of what it wrote: `directory`/tiny-NAME.gguf, or the folder itself.
absl::StatusOr<std::string> WriteTinyGguf(const Architecture& architecture,
                                          const std::string& directory,
                                          const TinyModelOptions& options);
absl::StatusOr<std::string> WriteTinyFolder(const Architecture& architecture,
                                            const std::string& directory,
                                            const TinyModelOptions& options);
using TinyWriter = absl::StatusOr<std::string>(const std::string& directory,
                                               const TinyModelOptions& options);
TinyWriter WriteTinyLlamaGguf, WriteTinyGpt2Gguf, WriteTinyLlamaFolder, WriteTinyGpt2Folder;

// A folder's config.json with this base of rotary embedding, as "10000.0": other numbers from the
// same weights.
inline std::string WithRopeTheta(const std::string& config_json, const std::string& theta) {
  return "{\"rope_theta\": " + theta + ", " + config_json.substr(config_json.find('{') + 1);
}

}  // namespace treadle
