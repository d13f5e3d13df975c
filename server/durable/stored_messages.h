// Stored requests and pieces of their answers <-> bytes (stored.proto). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/request/token_stream.h"

namespace treadle {

// The kept form of an accepted request, so that it can go on: the client's own words, and what was
// decided when it was accepted.
struct StoredRequest {
  std::string id = {};
  std::string owner = {};        // name of the API key that asked; empty: none was asked for
  std::string kind = {};         // which front end reads the body
  std::string body = {};         // as the client sent it
  int64_t created = 0;           // seconds since 1970
  std::string fingerprint = {};  // ServedModel's
  std::vector<int32_t> prompt = {};
  uint64_t seed = 0;
  int32_t max_new_tokens = 0;
  std::string adapter = {};  // AdapterFile::hash; empty: none
};

std::string ToBytes(const StoredRequest& request);  // without id and owner
// The end is kept only of an answer that ended well, and what is known of the prompt only beside a
// token: an answer that has none begins anew.
std::string ToBytes(const StreamBatch& piece);
// DataLoss if the bytes are none of ours. The piece is added to what `answer` has.
absl::StatusOr<StoredRequest> RequestFromBytes(std::string_view bytes);
absl::Status AddPiece(std::string_view bytes, StreamBatch& answer);

}  // namespace treadle
