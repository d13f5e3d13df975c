// Numbers of a GGUF file's metadata that differ from layer to layer. Behind `prefix`, the name of
// the family and a dot, are the keys. Errors name file and key.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/gguf/gguf_file.h"

namespace treadle {

inline constexpr const char* kGgufKvHeads = "attention.head_count_kv";
inline constexpr const char* kGgufInner = "feed_forward_length";

// Which layers are local: each `sliding_window_pattern`-th is not, or a list says which are.
absl::Status ReadGgufWindow(const GgufFile& file, const std::string& prefix,
                            const Architecture& architecture, ModelConfig& config);
// Numbers of layers that keep a state, besides the table of fields. These layers are listed, or
// have no K/V heads; or all but those at regular distances keep one.
absl::Status ReadGgufStates(const GgufFile& file, const std::string& prefix,
                            const Architecture& architecture, ModelConfig& config);
// Sizes that a file lists for each layer, or says once of all: heads of K and V, and inner
// features, with experts those of the one for all rows; and sizes of local layers' heads. A layer
// without its own V (`has_values`) takes its keys' products.
absl::Status ReadGgufLayerSizes(const GgufFile& file, const std::string& prefix,
                                const std::function<bool(int64_t layer)>& has_values,
                                ModelConfig& config);

}  // namespace treadle
