// The same tensor's name in a GGUF file and in a Hugging Face folder.
//
// Thread safety: pure functions.
#pragma once

#include <string>
#include <string_view>

namespace treadle {

struct TensorName {
  std::string name;            // in the other container; empty: it has none
  std::string_view part = {};  // what it is, as GGUF calls it: "attn_q", "output_norm"
};

// architecture: a row of models/registry.cc.
TensorName GgufTensorName(std::string_view architecture, std::string_view hugging_face_name);
TensorName HuggingFaceTensorName(std::string_view architecture, std::string_view gguf_name);

}  // namespace treadle
