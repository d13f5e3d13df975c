// What a client asks, before anything of it was checked; the same for every front end. A value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "models/text/chat_template.h"
#include "scheduler/request.h"

namespace treadle {

struct GenerateRequest {
  std::string request_id = {};  // empty: the caller's (session.h)

  // Text that is tokenized, token ids, or messages for the model's chat template.
  std::variant<std::monostate, std::string, std::vector<int32_t>, std::vector<ChatMessage>> prompt =
      {};

  struct Sampling {
    // As asked; what was not has its default here. All but top_k and the seed, which follow.
    SamplingParameters parameters = {};
    std::optional<int32_t> top_k = {};  // absent: off
    std::optional<uint64_t> seed = {};  // absent: a random one
    int32_t num_candidates = 1;
  } sampling = {};

  struct Stopping {
    std::optional<int32_t> max_new_tokens = {};  // absent: the server's default, clipped
    int32_t min_new_tokens = 0;
    std::vector<std::string> stop_strings = {};
    std::vector<int32_t> stop_token_ids = {};
    bool ignore_eos = false;  // the model's end tokens do not stop
  } stopping = {};

  std::optional<int32_t> logprobs = {};  // alternatives per generated token; absent: none are told
  std::optional<int32_t> prompt_logprobs = {};  // the same for prompt tokens
};

}  // namespace treadle
