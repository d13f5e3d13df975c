// Shared by tests of vllm.grpc.engine.VllmEngine: a server with a client over a real channel, and
// what calls of it said. Not thread-safe.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/access/api_keys.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "tests/server/test_server.h"

namespace treadle {

namespace engine = ::vllm::grpc::engine;
namespace common = ::smg::grpc::common;

// The same that v1's request asks, as far as tokens, their number, seed and end go.
inline engine::GenerateRequest ToGateway(const v1::GenerateRequest& from, bool stream) {
  engine::GenerateRequest request;
  request.set_request_id(from.request_id());
  for (const int32_t id : from.token_ids().ids()) request.mutable_tokenized()->add_input_ids(id);
  engine::SamplingParams& asked = *request.mutable_sampling_params();
  asked.set_seed(static_cast<int32_t>(from.sampling().seed()));
  asked.set_max_tokens(from.stopping().max_new_tokens());
  asked.set_ignore_eos(from.stopping().ignore_eos());
  request.set_stream(stream);
  return request;
}

// A call's answer, and how it ended.
struct Heard {
  grpc::Status status;
  std::vector<engine::GenerateResponse> messages;

  std::vector<engine::GenerateComplete> completes() const {
    std::vector<engine::GenerateComplete> found;
    for (const auto& message : messages) {
      if (message.has_complete()) found.push_back(message.complete());
    }
    return found;
  }
  // A stream's chunks, put together by candidate.
  std::map<uint32_t, std::vector<int32_t>> ids() const {
    std::map<uint32_t, std::vector<int32_t>> found;
    for (const auto& message : messages) {
      if (!message.has_chunk()) continue;
      const auto& ids = message.chunk().token_ids();
      std::vector<int32_t>& to = found[message.chunk().index()];
      to.insert(to.end(), ids.begin(), ids.end());
    }
    return found;
  }
};

inline std::vector<int32_t> Ids(const engine::GenerateComplete& complete) {
  return {complete.output_ids().begin(), complete.output_ids().end()};
}
inline std::vector<int32_t> Ids(const v1::Output& output) {
  return {output.token_ids().begin(), output.token_ids().end()};
}

// A server, and a client of its gateway protocol.
class Gateway : public testing::Test {
 protected:
  void Serve(const TestServerOptions& options) {
    server_ = std::make_unique<TestServer>(options);
    stub_ = engine::VllmEngine::NewStub(server_->channel());
  }
  void SetUp() override { Serve({}); }

  Heard Ask(const engine::GenerateRequest& request, const std::string& key = "") {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    Heard heard;
    const auto reader = stub_->Generate(&context, request);
    for (engine::GenerateResponse message; reader->Read(&message);) {
      heard.messages.push_back(message);
    }
    heard.status = reader->Finish();
    return heard;
  }
  engine::GenerateComplete Whole(const engine::GenerateRequest& request) {
    const Heard heard = Ask(request);
    EXPECT_TRUE(heard.status.ok()) << heard.status.error_message();
    if (heard.messages.size() != 1) {
      ADD_FAILURE() << heard.messages.size() << " messages";
      return {};
    }
    return heard.messages[0].complete();
  }
  v1::GenerateResponse Ours(const v1::GenerateRequest& request) {
    v1::GenerateResponse response;
    const grpc::Status status = Generate(*server_, request, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  grpc::Status Abort(const std::string& id, const std::string& key = "") {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    engine::AbortRequest request;
    request.add_request_ids("of nobody");
    request.add_request_ids(id);
    engine::AbortResponse response;
    return stub_->Abort(&context, request, &response);
  }

  PoolLoad PoolNow() { return server_->stack().pool().Load(); }
  bool WaitFor(const PoolLoad& load) {
    return server_->WaitLoad([&](const v1::GetLoadResponse& now) {
      return now.waiting() == load.waiting && now.running() == load.running;
    });
  }

  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<engine::VllmEngine::Stub> stub_;
};

}  // namespace treadle
