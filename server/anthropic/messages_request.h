// Anthropic's requests, as JSON, become what sessions take: the bodies of /v1/messages and of
// /v1/messages/count_tokens. A field that is not known, or cannot be done, is refused by its name.
//
// Pure functions; any thread.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/openai/openai_request.h"

namespace treadle {

// `counting`: the body of count_tokens, which needs no max_tokens. InvalidArgument begins with the
// field's name; NotFound: of another model.
absl::StatusOr<OpenAiRequest> ReadMessagesRequest(std::string_view body, const ServedModel& model,
                                                  bool counting = false);

// All fields that are known.
std::vector<OpenAiField> MessagesFields();

}  // namespace treadle
