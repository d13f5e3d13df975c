// Outlier features: dimensions of a model's activations that are far larger than the others, which
// decide whether 8-bit activations need LLM.int8()'s decomposition.
//
// Source: Dettmers et al., LLM.int8(), section 4 (thesis, section 2.3.1). A dimension counts if its
// magnitude reaches 6.0; it is systematic if it does so in at least a quarter of the layers and at
// 6 % of the positions. Looked at are the inputs of the attention's projections and of the
// feed-forward network's expansion; not those of its contraction, as there.
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// The owner of a dimension: one of the hidden state is the same feature in all layers and in both
// products that read it; what attention's output projection reads has dimensions of its own.
enum class OutlierInput : uint8_t { kHidden, kAttentionOutput };
inline constexpr std::string_view kOutlierInputNames[] = {"hidden", "attention output"};

struct OutlierFeature {
  OutlierInput input = OutlierInput::kHidden;
  int64_t dimension = 0;
  float largest = 0;     // magnitude
  double layers = 0;     // share of the layers in which it reaches the threshold anywhere
  double positions = 0;  // share of the positions, of all such inputs together

  bool systematic() const { return layers >= 0.25 && positions >= 0.06; }
};

struct OutlierReport {
  float threshold = 0;
  int64_t tokens = 0;  // read
  double share = 0;    // of all elements of these inputs, those that reach the threshold
  std::vector<OutlierFeature> features;  // that reach it anywhere, the largest first
};

struct OutlierOptions {
  float threshold = 6.0f;
  int64_t window = 512;  // tokens per text, each from position 0; less if the model allows less
  int64_t max_tokens = 2048;
  int threads = 0;
  std::function<void(double)> progress = {};  // 0 to 1; may be empty
};

// Loads the model as it is stored, on `backend` (the CPU), and reads the tokens; a last text that
// does not fill a window is read too. Errors: no token, a model that cannot be loaded.
absl::StatusOr<OutlierReport> FindOutlierFeatures(const Checkpoint& checkpoint,
                                                  std::unique_ptr<Backend> backend,
                                                  std::span<const int32_t> tokens,
                                                  const OutlierOptions& options);

nlohmann::ordered_json ToJson(const OutlierReport& report);
std::string ToTable(const OutlierReport& report);  // the largest twenty

}  // namespace treadle
