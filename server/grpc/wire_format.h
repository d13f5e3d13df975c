// Requests as bytes: parsing with an error that says what is wrong.
//
// protobuf's own parser refuses a whole message for one invalid byte of a string and says nothing
// to the caller; here the error names the field ("chat.messages[0].content is not valid UTF-8 at
// byte 3"). Pure functions; any thread.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace treadle {

// InvalidArgument if `bytes` is no message of that type.
absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message);

}  // namespace treadle
