// Sizes of latent attention in a GGUF file.
#include "base/status.h"
#include "models/checkpoints/gguf/gguf_file.h"

namespace treadle {

absl::Status ReadLatentSizes(const GgufFile& file, const std::string& prefix, ModelConfig& config) {
  TREADLE_ASSIGN_OR_RETURN(const int64_t older,
                           file.Integer(prefix + "attention.value_length", config.head_dim));
  TREADLE_ASSIGN_OR_RETURN(config.value_dim,
                           file.Integer(prefix + "attention.value_length_mla", older));
  TREADLE_ASSIGN_OR_RETURN(const int64_t query,
                           file.Integer(prefix + "attention.key_length_mla", config.head_dim));
  config.unrotated_dim = query - config.rope_dim;
  return absl::OkStatus();
}

}  // namespace treadle
