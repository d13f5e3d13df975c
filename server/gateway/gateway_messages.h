// Between the engine protocol of gateways and what sessions take and give.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/session/session.h"

namespace vllm::grpc::engine {
class EmbedRequest;
class EmbedResponse;
class GenerateComplete;
class GenerateRequest;
class GenerateResponse;
class InputLogProbs;
}  // namespace vllm::grpc::engine

namespace treadle {

// `model`: whose defaults stand for what the message leaves out. InvalidArgument names what we
// lack.
absl::StatusOr<GenerateRequest> ToRequest(const vllm::grpc::engine::GenerateRequest& message,
                                          const ServedModel& model);
absl::StatusOr<GenerateRequest> ToRequest(const vllm::grpc::engine::EmbedRequest& message);

// Checks the number of entries of a repeated field of either, before they are parsed.
absl::Status ValidateGatewayEntries(std::string_view field, int64_t entries, bool embedding,
                                    const ServedModel& model);

// Adds the event's part of an embedding.
void Add(const SessionEvent& event, vllm::grpc::engine::EmbedResponse& response);

// An error of a session's, with the protocol's names of fields.
absl::Status InGatewayNames(const absl::Status& status);

// One answer in the making. A stream gets what is new of a candidate as chunks, and a
// GenerateComplete at its end; else all is kept, and told when all candidates have ended.
//
// Not thread-safe.
class GatewayAnswer {
 public:
  using Messages = std::vector<vllm::grpc::engine::GenerateResponse>;

  explicit GatewayAnswer(const vllm::grpc::engine::GenerateRequest& request);
  ~GatewayAnswer();

  // The messages to the client for the event; may be none.
  Messages Add(const SessionEvent& event);
  // The end of an aborted request: candidates that have not ended end here, with what they have.
  // One message says it all if nothing has come out yet.
  Messages Abort();

 private:
  using Complete = vllm::grpc::engine::GenerateComplete;

  void Begin(const SessionEvent::Prompt& prompt);
  void AddChunk(const OutputPart& part, Messages& out);
  void Keep(const OutputPart& part);
  void End(const OutputPart& part, Messages& out);

  const bool stream_;
  const bool prompt_logprobs_;
  const std::vector<int32_t> stop_token_ids_;  // that were asked
  std::unique_ptr<vllm::grpc::engine::InputLogProbs> input_;
  std::vector<Complete> candidates_;  // without a finish_reason: not ended
  std::vector<bool> begun_;           // [candidates] a chunk was told
};

}  // namespace treadle
