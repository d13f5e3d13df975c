// Requests of many kinds, and what streams say of them, so that an answer that was disturbed can be
// compared with one that was not.
//
// Thread safety: functions without state.
#pragma once

#include <map>
#include <string>

#include "server/grpc/inference.grpc.pb.h"

namespace treadle {

// Greedy and seeded, with penalties, stop strings, a JSON schema, several candidates, and log
// probabilities of prompts and answers; prompts of 1 to 600 tokens, answers of at most 20 to 320.
inline constexpr int kRequestKinds = 24;
v1::GenerateRequest RequestOfKind(int kind);

// The same, as a streaming request of OpenAI's API.
struct OpenAiBody {
  std::string path;
  std::string json;
};
OpenAiBody OpenAiBodyOfKind(int kind);

// All that a stream said, by what it was about ("0 text", "2 tokens"), each in order. How it was
// cut into messages does not show.
using Said = std::map<std::string, std::string>;
void Hear(const v1::GenerateResponse& message, Said& said);
// `json` of an event of OpenAI's API; false if it is none, or tells of an error.
bool Hear(const std::string& json, Said& said);

// Where `said` is no beginning of `whole`, in words; "" where it is one.
std::string Beyond(const Said& said, const Said& whole);

}  // namespace treadle
