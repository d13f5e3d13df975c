// OpenAI's requests, as JSON, become what sessions take. A field that we do not know, or cannot do,
// is refused by its name; fields without effect on the answer are passed over. OpenAiFields lists
// all that are known.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/openai/form_fields.h"
#include "server/openai/tools/reasoning.h"
#include "server/openai/tools/tool_request.h"
#include "server/session/request_validation.h"

namespace treadle {

// Each is a session and holds a place in the queue. Embeddings hold it briefly, so a call
// may have more; those begin as others end.
inline constexpr size_t kMaxPrompts = 128;
inline constexpr size_t kMaxInputs = 2048;

// The last three have files of their own; for what their fields are called in errors.
enum class OpenAiKind : uint8_t { kCompletion, kChat, kEmbedding, kMessage, kResponse, kScore };

struct OpenAiRequest {
  using Prompt = decltype(GenerateRequest::prompt);

  bool chat = false;
  GenerateRequest common = {};       // of every prompt, but for the prompt
  std::vector<Prompt> prompts = {};  // at least one
  bool base64 = false;               // of embeddings: how they are written
  bool stream = false;
  bool include_usage = false;    // of a stream: in a chunk at its end
  bool usage_in_chunks = false;  // of a stream: so far, in every chunk
  bool echo = false;             // the prompt's text comes first, with its log probabilities
  bool prompt_only = false;      // max_tokens is 0: of the one generated token nothing is told
  bool token_ids = false;        // are told, beside the text
  bool prompt_logprobs = false;  // were asked by this name
  std::vector<Tool> tools = {};
  std::string tools_as_of_chat = {};  // where the API writes them otherwise; empty: it does not
  ToolChoice tool_choice = {};
  bool knows_tools = false;  // the messages have calls
  // Marks to look for in a chat's answer.
  AnswerReader::Options reading = {};
  bool include_reasoning = true;                                 // is told
  nlohmann::json template_arguments = nlohmann::json::object();  // while fields are read
  AskedForm form = {};  // common.constraint, while fields are read
  std::optional<int32_t> best_of = {};
  // Name of the field that was given, this or max_completion_tokens; for errors.
  std::string_view max_tokens = "max_tokens";

  // Size of a prompt's text or ids.
  size_t BytesOf(size_t prompt) const {
    const auto* const text = std::get_if<std::string>(&prompts[prompt]);
    const auto* const ids = std::get_if<std::vector<int32_t>>(&prompts[prompt]);
    return text != nullptr ? text->size() : ids != nullptr ? ids->size() * sizeof(int32_t) : 0;
  }
  GenerateRequest For(size_t prompt) const {
    GenerateRequest request = common;
    request.prompt = prompts[prompt];
    return request;
  }
};

// Fields of the two bodies that generate, in OpenAI's API and vLLM's.
enum class OpenAiIn : uint8_t { kCompletions = 1, kChat = 2, kBoth = 3 };
struct OpenAiField {
  enum class Standing : uint8_t {
    kTaken,    // it has its effect
    kIgnored,  // any value is passed over: none has an effect on the answer
    kOnly,     // `only` is passed over, since it says what is so; other values are refused
    kRefused,
  };
  std::string_view name;
  OpenAiIn in;
  Standing standing;
  std::string_view only = {};  // JSON values with " or " between them
};
std::vector<OpenAiField> OpenAiFields();

// The body of /v1/chat/completions, or of /v1/completions. InvalidArgument begins with the field's
// name, or says where the JSON is broken; NotFound: of another model.
absl::StatusOr<OpenAiRequest> ReadOpenAiRequest(std::string_view body, bool chat,
                                                const ServedModel& model);

// The body of /v1/embeddings.
absl::StatusOr<OpenAiRequest> ReadEmbeddings(std::string_view body, const ServedModel& model);

// True if both bodies are the same bytes, or JSON of the same value: whitespace and the order of
// members do not matter.
bool SameRequest(std::string_view body, std::string_view other);

// {"model": ..., "prompt": TEXT, "add_special_tokens": BOOL}, or with the fields of a chat that
// make its prompt for "prompt"; and {"model": ..., "tokens": [ID]}.
struct TokenizeQuestion {
  std::string text;
  bool add_special = true;
};
absl::StatusOr<TokenizeQuestion> ReadTokenize(std::string_view body, const ServedModel& model);
absl::StatusOr<std::vector<int32_t>> ReadDetokenize(std::string_view body,
                                                    const ServedModel& model);

}  // namespace treadle
