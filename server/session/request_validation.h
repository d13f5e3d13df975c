// The door: a GenerateRequest becomes a RequestSpec, or an error that names the field, the value
// and what was expected ("sampling.top_p is 1.5, expected (0, 1]").
//
// Pure functions without state; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/defaults.h"
#include "models/text/jinja/chat_template.h"
#include "scheduler/request/request.h"
#include "server/constraint/constraint.h"
#include "server/session/generation.h"
#include "server/session/served_model.h"

namespace treadle {

// A client's request before anything of it was checked; the same for every front end. A value.
struct GenerateRequest {
  std::string request_id = {};  // empty: the caller's (session.h)

  // Text that is tokenized, token ids, or messages for the model's chat template.
  std::variant<std::monostate, std::string, std::vector<int32_t>, std::vector<ChatMessage>> prompt =
      {};
  bool add_special_tokens = true;  // to text: BOS and EOS as the model wants them
  std::string tools = {};          // beside messages: ChatOptions::tools
  // Beside messages: ChatOptions::arguments, and text that follows what the template wrote.
  std::string template_arguments = {};
  std::string prompt_end = {};
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the answer goes on where the last message ends
  // At most so many tokens of the prompt, the last ones; -1: what the context has room for.
  std::optional<int32_t> truncate_prompt_tokens = {};
  int32_t dimensions = 0;       // GenerationOptions::dimensions
  bool special_tokens = false;  // control tokens are in the answer's text
  bool embedding = false;       // is asked, and nothing of what follows

  struct Sampling {
    // As asked; what was not has the model's default (ServedModel::sampling). All but the seed.
    SamplingParameters parameters = {};
    std::optional<uint64_t> seed = {};  // absent: a random one
    int32_t num_candidates = 1;
  } sampling = {};

  struct Stopping {
    std::optional<int32_t> max_new_tokens = {};  // absent: the server's default, clipped
    // The absent one is all that fits in the context and the cache, and so is one that is more.
    bool without_limit = false;
    int32_t min_new_tokens = 0;
    std::vector<std::string> stop_strings = {};
    std::vector<int32_t> stop_token_ids = {};
    bool include_stop_string = false;
    bool ignore_eos = false;  // the model's end tokens do not stop
  } stopping = {};

  std::optional<int32_t> logprobs = {};  // alternatives per generated token; absent: none are told
  std::optional<int32_t> prompt_logprobs = {};  // the same for prompt tokens
  std::optional<Constraint> constraint = {};    // what the answer must look like
  std::string adapter = {};                     // by name; empty: the model as it is
  int32_t virtual_tokens = 0;                   // the adapter's: positions before the prompt's
  std::string cache_salt = {};  // only requests of the same one share what is cached of prompts
  std::string speculate = {};   // a word of kSpeculate; empty: the server's
  int32_t priority = 0;         // as in RequestSpec

  // The part --durable keeps (StoredRequest): by whom it is read again, and the client's words.
  std::string kind = {};  // empty: it is not kept
  std::string body = {};
};

inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopStringBytes = 512;
inline constexpr int kMaxStopTokens = 256;
inline constexpr int kMaxLogitBias = 1024;
inline constexpr int kMaxRequestIdBytes = 256;
inline constexpr int kMaxCacheSaltBytes = 256;
inline constexpr int kMaxChatMessages = 4096;

struct RequestLimits {
  int64_t max_batch_size = kDefaultBatchSize;  // bounds num_candidates
  int32_t default_max_new_tokens = 512;        // clipped to the context and to the cache
  Pooling pooling = Pooling::kNone;            // of embeddings; none: they are refused
  Speculate speculate = Speculate::kNgram;     // of requests that do not say it
};

struct ValidatedRequest {
  RequestSpec spec;  // all but its deadline
  std::vector<std::string> stop_strings;
  GenerationOptions generation;
};

// The text of a prompt that is messages, up to `prompt_end`. InvalidArgument; DeadlineExceeded.
absl::StatusOr<std::string> RenderChat(const std::vector<ChatMessage>& messages,
                                       const GenerateRequest& request, const ServedModel& model,
                                       Clock::time_point deadline = Clock::time_point::max());

// `random_seed` is used when the request has no seed. Errors: InvalidArgument; DeadlineExceeded.
absl::StatusOr<ValidatedRequest> ValidateRequest(
    GenerateRequest request, const ServedModel& model, const RequestLimits& limits,
    uint64_t random_seed, Clock::time_point deadline = Clock::time_point::max());

// The prompt's token ids, however long it is; ValidateRequest's errors.
absl::StatusOr<std::vector<int32_t>> PromptIds(GenerateRequest& request, const ServedModel& model,
                                               Clock::time_point deadline);

// ValidateRequest's verdict on a repeated field with so many entries, for a front end that counts
// them before it parses them; ok for up to 4096, which cost little. `field`: as in the gRPC API
// ("chat.messages").
absl::Status ValidateEntries(std::string_view field, int64_t entries, bool embedding,
                             const ServedModel& model);

// Ids in [0, vocab), or InvalidArgument with the first offender's index.
absl::Status ValidateTokenIds(const std::string& field, std::span<const int32_t> ids,
                              int32_t vocab);

}  // namespace treadle
