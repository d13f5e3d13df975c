// The requests of OpenAI's Responses API, as JSON, become what sessions take. A field that is not
// known, or cannot be done, is refused by its name.
//
// Pure functions; any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/openai/openai_request.h"
#include "server/responses/response_store.h"

namespace treadle {

struct ResponsesRequest : OpenAiRequest {
  bool store = true;                 // the answer is kept
  std::vector<ChatMessage> history;  // the conversation up to here, without instructions
  std::string echo;                  // the answer's members that say what was asked, as JSON
};

// The response that was kept under an id, or null.
using FindResponse = std::function<std::shared_ptr<const KeptResponse>(const std::string& id)>;

// InvalidArgument begins with the field's name; NotFound: of another model.
absl::StatusOr<ResponsesRequest> ReadResponsesRequest(std::string_view body,
                                                      const ServedModel& model,
                                                      const FindResponse& find);

// All fields that are known.
std::vector<OpenAiField> ResponsesFields();

}  // namespace treadle
