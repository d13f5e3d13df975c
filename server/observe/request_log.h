// One log event for each request that ended or was refused: who asked, how it ended, how many
// tokens, where the time went. Never what was asked or answered.
//
// Thread safety: all methods from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/request/request.h"
#include "server/observe/log_event.h"

namespace treadle {

inline constexpr size_t kMaxHeaderIdBytes = 256;

// Where a request came from; what is not known is empty.
struct RequestOrigin {
  std::string id;         // request_id, as in the ledger
  std::string header_id;  // the metadata x-request-id, printable
  std::string key;        // name of the API key
  std::string owner;      // of the key (ApiKey::Terms); empty: no key was asked for
  std::string client;     // address, as gRPC writes it: "ipv4:10.0.0.1:5000"
};

struct FinishedRequest {
  RequestId number = 0;  // "request" in the ledger
  int32_t prompt_tokens = 0;
  int32_t generated_tokens = 0;            // over all candidates
  std::vector<FinishReason> reasons = {};  // [candidates]
  absl::Status status = {};
  RequestTimings timings = {};
};

class RequestLog {
 public:
  // An empty sink: nothing is logged.
  RequestLog(LogSink sink, std::string model) : sink_(std::move(sink)), model_(std::move(model)) {}

  void Finished(const RequestOrigin& origin, const FinishedRequest& request) const;
  void Refused(const RequestOrigin& origin, const absl::Status& status) const;

 private:
  const LogSink sink_;
  const std::string model_;
};

// Printable ASCII of it, at most kMaxHeaderIdBytes; other bytes become '?'.
std::string PrintableId(std::string_view text);

}  // namespace treadle
