// What gateways are promised: vllm.grpc.engine.VllmEngine, over a real channel. Answers are held
// against those of treadle.v1.Inference on the same server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/access/api_keys.h"
#include "server/gateway/gateway_messages.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/gateway/zip_archive.h"
#include "server/session/sampling_defaults.h"
#include "tests/server/test_certificates.h"
#include "tests/server/test_server.h"
#include "tests/server/without_xgrammar.h"

namespace treadle {
namespace {

namespace engine = ::vllm::grpc::engine;
namespace common = ::smg::grpc::common;
using testing::ElementsAre;
using testing::HasSubstr;

// The same that v1's request asks, as far as tokens, their number, seed and end go.
engine::GenerateRequest ToGateway(const v1::GenerateRequest& from, bool stream) {
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
  // Of a stream: what its chunks bring, by candidate.
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

std::vector<int32_t> Ids(const engine::GenerateComplete& complete) {
  return {complete.output_ids().begin(), complete.output_ids().end()};
}
std::vector<int32_t> Ids(const v1::Output& output) {
  return {output.token_ids().begin(), output.token_ids().end()};
}

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

TEST(GatewayMessages, WhatIsAbsentIsAsTheModelsAuthorsRecommend) {
  ServedModel model;
  model.sampling_defaults = {.temperature = 0.5f, .top_k = 3, .min_p = 0.25f};
  engine::GenerateRequest request;
  request.mutable_tokenized()->add_input_ids(1);
  const auto sampling = [&] { return EffectsJson(ToRequest(request, model)->sampling.parameters); };
  EXPECT_EQ(sampling(), R"({"temperature":0.5,"top_k":3,"min_p":0.25})");
  request.mutable_sampling_params()->set_temperature(0);
  request.mutable_sampling_params()->set_top_k(7);
  EXPECT_EQ(sampling(), R"({"temperature":0,"top_k":7,"min_p":0.25})");
}

TEST_F(Gateway, EachFieldMeansWhatItMeansInOurs) {
  struct Row {
    const char* name;
    std::function<void(engine::SamplingParams&)> theirs;
    std::function<void(v1::GenerateRequest&)> ours;
    bool changes = true;  // the answer, against one without
  };
  static constexpr int32_t kSome = 7;
  const std::vector<Row> rows = {
      {"nothing", [](auto&) {}, [](auto&) {}, false},
      {"temperature", [](auto& p) { p.set_temperature(0); },
       [](auto& r) { r.mutable_sampling()->set_temperature(0); }},
      {"top_p", [](auto& p) { p.set_top_p(0.2f); },
       [](auto& r) { r.mutable_sampling()->set_top_p(0.2f); }},
      {"top_k", [](auto& p) { p.set_top_k(2); },
       [](auto& r) { r.mutable_sampling()->set_top_k(2); }},
      {"min_p", [](auto& p) { p.set_min_p(0.8f); },
       [](auto& r) { r.mutable_sampling()->set_min_p(0.8f); }},
      {"frequency_penalty", [](auto& p) { p.set_frequency_penalty(2); },
       [](auto& r) { r.mutable_sampling()->set_frequency_penalty(2); }},
      {"presence_penalty", [](auto& p) { p.set_presence_penalty(2); },
       [](auto& r) { r.mutable_sampling()->set_presence_penalty(2); }},
      {"repetition_penalty", [](auto& p) { p.set_repetition_penalty(3); },
       [](auto& r) { r.mutable_sampling()->set_repetition_penalty(3); }},
      {"logit_bias", [](auto& p) { (*p.mutable_logit_bias())[kSome] = 50; },
       [](auto& r) {
         v1::LogitBias& bias = *r.mutable_sampling()->add_logit_bias();
         bias.set_token_id(kSome);
         bias.set_bias(50);
       }},
      {"seed", [](auto& p) { p.set_seed(-5); },
       [](auto& r) { r.mutable_sampling()->set_seed(static_cast<uint64_t>(-5)); }},
      {"max_tokens", [](auto& p) { p.set_max_tokens(3); },
       [](auto& r) { r.mutable_stopping()->set_max_new_tokens(3); }},
      {"max_tokens, absent", [](auto& p) { p.clear_max_tokens(); },
       [](auto& r) { r.mutable_stopping()->clear_max_new_tokens(); }},
      {"n", [](auto& p) { p.set_n(1); }, [](auto&) {}, false},
      {"ids only",
       [](auto& p) {
         p.set_skip_special_tokens(true);
         p.set_spaces_between_special_tokens(true);
         p.set_include_stop_str_in_output(true);
       },
       [](auto&) {}, false}};
  const v1::GenerateRequest plain = MakeRequest("a", 9, 21, 40);
  const std::vector<int32_t> before = Ids(Ours(plain).output());
  for (const Row& row : rows) {
    v1::GenerateRequest ours = plain;
    engine::GenerateRequest theirs = ToGateway(plain, false);
    row.ours(ours);
    row.theirs(*theirs.mutable_sampling_params());
    const std::vector<int32_t> ids = Ids(Whole(theirs));
    EXPECT_EQ(ids, Ids(Ours(ours).output())) << row.name;
    EXPECT_EQ(ids != before, row.changes) << row.name;
  }
  // An end token, put off.
  engine::GenerateRequest late = ToGateway(plain, false);
  engine::SamplingParams& asked = *late.mutable_sampling_params();
  for (int32_t id = 0; id < TestServer::kVocab; ++id) asked.add_stop_token_ids(id);
  EXPECT_EQ(Whole(late).output_ids_size(), 1);
  asked.set_min_tokens(9);
  asked.clear_stop_token_ids();
  asked.set_ignore_eos(false);
  (*asked.mutable_logit_bias())[TestServer::kVocab - 1] = 100;
  EXPECT_EQ(Whole(late).output_ids_size(), 10);
}

TEST_F(Gateway, TextIsTokenized) {
  engine::GenerateRequest request = ToGateway(MakeRequest("a", 1, 1, 5), false);
  request.set_text("abz");
  const engine::GenerateComplete text = Whole(request);
  EXPECT_EQ(text.prompt_tokens(), 3u);
  request.mutable_tokenized()->set_original_text("whatever");
  for (const uint32_t id : {0, 1, 25}) request.mutable_tokenized()->add_input_ids(id);
  EXPECT_EQ(Ids(Whole(request)), Ids(text));
}

TEST_F(Gateway, AStreamBringsInPiecesWhatTheWholeHas) {
  v1::GenerateRequest ours = MakeRequest("a", 3, 20, 30);
  engine::GenerateRequest request = ToGateway(ours, false);
  for (const bool logprobs : {false, true}) {
    if (logprobs) {
      request.mutable_sampling_params()->set_logprobs(3);
      request.mutable_sampling_params()->set_prompt_logprobs(2);
    }
    request.set_stream(false);
    const engine::GenerateComplete whole = Whole(request);
    EXPECT_EQ(whole.finish_reason(), "length");
    EXPECT_EQ(whole.prompt_tokens(), 20u);
    EXPECT_EQ(whole.completion_tokens(), 30u);
    EXPECT_EQ(whole.index(), 0u);
    EXPECT_EQ(whole.has_output_logprobs(), logprobs);
    EXPECT_EQ(whole.has_input_logprobs(), logprobs);
    EXPECT_EQ(whole.matched_stop_case(), engine::GenerateComplete::MATCHED_STOP_NOT_SET);

    request.set_stream(true);
    const Heard heard = Ask(request);
    ASSERT_TRUE(heard.status.ok()) << heard.status.error_message();
    ASSERT_GE(heard.messages.size(), 2u);
    engine::OutputLogProbs told;
    uint32_t tokens = 0;
    for (size_t i = 0; i + 1 < heard.messages.size(); ++i) {
      ASSERT_TRUE(heard.messages[i].has_chunk());
      const engine::GenerateStreamChunk& chunk = heard.messages[i].chunk();
      EXPECT_EQ(chunk.prompt_tokens(), 20u);
      EXPECT_EQ(chunk.completion_tokens(), static_cast<uint32_t>(chunk.token_ids_size()));
      tokens += chunk.completion_tokens();
      told.MergeFrom(chunk.output_logprobs());
      EXPECT_EQ(chunk.has_input_logprobs(), logprobs && i == 0);
      if (i == 0) {
        EXPECT_EQ(chunk.input_logprobs().SerializeAsString(),
                  whole.input_logprobs().SerializeAsString());
      }
    }
    EXPECT_EQ(heard.ids()[0], Ids(whole));
    EXPECT_EQ(tokens, 30u);
    EXPECT_EQ(told.SerializeAsString(), whole.output_logprobs().SerializeAsString());
    ASSERT_TRUE(heard.messages.back().has_complete());
    engine::GenerateComplete last = heard.messages.back().complete();
    EXPECT_EQ(last.output_ids_size(), 0);
    EXPECT_EQ(last.finish_reason(), "length");
    EXPECT_EQ(last.prompt_tokens(), 20u);
    EXPECT_EQ(last.completion_tokens(), 30u);
  }
}

TEST_F(Gateway, LogProbabilitiesAreOurs) {
  v1::GenerateRequest ours = MakeRequest("a", 2, 40, 6);
  ours.mutable_response()->set_logprobs(2);
  ours.mutable_response()->set_prompt_logprobs(1);
  engine::GenerateRequest request = ToGateway(ours, false);
  request.mutable_sampling_params()->set_logprobs(2);
  request.mutable_sampling_params()->set_prompt_logprobs(1);
  const v1::GenerateResponse expected = Ours(ours);
  const engine::GenerateComplete found = Whole(request);
  const engine::OutputLogProbs& output = found.output_logprobs();
  ASSERT_EQ(output.token_ids_size(), 6);
  ASSERT_EQ(output.token_logprobs_size(), 6);
  ASSERT_EQ(output.top_logprobs_size(), 6);
  const auto expect_top = [](const engine::TopLogProbs& top, const v1::TokenLogprob& entry) {
    ASSERT_EQ(top.token_ids_size(), entry.top_size());
    for (int k = 0; k < entry.top_size(); ++k) {
      EXPECT_EQ(top.token_ids(k), static_cast<uint32_t>(entry.top(k).token_id()));
      EXPECT_EQ(top.values(k), entry.top(k).logprob());
    }
  };
  for (int i = 0; i < 6; ++i) {
    const v1::TokenLogprob& entry = expected.output().logprobs(i);
    EXPECT_EQ(output.token_ids(i), static_cast<uint32_t>(entry.token_id()));
    EXPECT_EQ(output.token_logprobs(i), entry.logprob());
    expect_top(output.top_logprobs(i), entry);
  }
  const engine::InputLogProbs& input = found.input_logprobs();
  ASSERT_EQ(input.token_ids_size(), 40);
  ASSERT_EQ(input.token_logprobs_size(), 40);
  ASSERT_EQ(input.top_logprobs_size(), 40);
  EXPECT_FALSE(input.token_logprobs(0).has_value());
  EXPECT_EQ(input.top_logprobs(0).values_size(), 0);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(input.token_ids(i), static_cast<uint32_t>(ours.token_ids().ids(i)));
    if (i == 0) continue;
    const v1::TokenLogprob& entry = expected.prompt_info().prompt_logprobs(i - 1);
    EXPECT_EQ(input.token_logprobs(i).value(), entry.logprob());
    expect_top(input.top_logprobs(i), entry);
  }
  request.mutable_sampling_params()->set_logprobs(0);
  request.mutable_sampling_params()->set_prompt_logprobs(0);
  const engine::GenerateComplete bare = Whole(request);
  EXPECT_EQ(bare.output_logprobs().token_logprobs_size(), 6);
  EXPECT_EQ(bare.output_logprobs().top_logprobs_size(), 0);
  EXPECT_EQ(bare.input_logprobs().token_logprobs_size(), 40);
  EXPECT_EQ(bare.input_logprobs().top_logprobs_size(), 0);
}

TEST_F(Gateway, CandidatesHaveTheirIndex) {
  v1::GenerateRequest ours = MakeRequest("a", 9, 21, 12);
  engine::GenerateRequest request = ToGateway(ours, false);
  ours.mutable_sampling()->set_num_candidates(3);
  request.mutable_sampling_params()->set_n(3);
  const v1::GenerateResponse expected = Ours(ours);
  std::vector<std::vector<int32_t>> ids = {Ids(expected.output())};
  for (const v1::Output& more : expected.more_candidates()) ids.push_back(Ids(more));

  const Heard whole = Ask(request);
  ASSERT_EQ(whole.messages.size(), 3u);
  request.set_stream(true);
  const Heard stream = Ask(request);
  ASSERT_EQ(stream.completes().size(), 3u);
  auto pieces = stream.ids();
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(whole.messages[i].complete().index(), i);
    EXPECT_EQ(Ids(whole.messages[i].complete()), ids[i]);
    EXPECT_EQ(whole.messages[i].complete().completion_tokens(), 12u);
    EXPECT_EQ(pieces[i], ids[i]);
    EXPECT_EQ(stream.completes()[i].completion_tokens(), 12u);
  }
}

TEST_F(Gateway, WhatStoppedItIsTold) {
  const v1::GenerateRequest ours = MakeRequest("a", 11, 5, 60);
  engine::GenerateRequest request = ToGateway(ours, false);
  const std::vector<int32_t> ids = Ids(Whole(request));
  const std::string text = Ours(ours).output().text();

  const std::string stop = text.substr(text.size() / 2, 4);  // spans at least two tokens
  request.mutable_sampling_params()->add_stop("not there");
  request.mutable_sampling_params()->add_stop(stop);
  for (const bool stream : {false, true}) {
    request.set_stream(stream);
    const Heard heard = Ask(request);
    ASSERT_EQ(heard.completes().size(), 1u);
    const engine::GenerateComplete complete = heard.completes()[0];
    EXPECT_EQ(complete.finish_reason(), "stop");
    EXPECT_EQ(complete.matched_stop_str(), stop);
    EXPECT_LT(complete.completion_tokens(), 60u);
    EXPECT_EQ((stream ? heard.ids()[0] : Ids(complete)).size(), complete.completion_tokens());
  }

  request = ToGateway(ours, false);
  const int32_t token = ids[10];
  const size_t first = std::find(ids.begin(), ids.end(), token) - ids.begin();
  request.mutable_sampling_params()->add_stop_token_ids(token);
  engine::GenerateComplete complete = Whole(request);
  EXPECT_EQ(complete.finish_reason(), "stop");
  EXPECT_EQ(complete.matched_token_id(), static_cast<uint32_t>(token));
  EXPECT_EQ(Ids(complete), std::vector<int32_t>(ids.begin(), ids.begin() + first + 1));

  // The model's own end is no match.
  request = ToGateway(ours, false);
  request.mutable_sampling_params()->set_ignore_eos(false);
  (*request.mutable_sampling_params()->mutable_logit_bias())[TestServer::kVocab - 1] = 100;
  complete = Whole(request);
  EXPECT_EQ(complete.finish_reason(), "stop");
  EXPECT_THAT(Ids(complete), ElementsAre(TestServer::kVocab - 1));
  EXPECT_EQ(complete.matched_stop_case(), engine::GenerateComplete::MATCHED_STOP_NOT_SET);
}

TEST_F(Gateway, ConstraintsAreKept) {
  engine::GenerateRequest bad = ToGateway(MakeRequest("a", 9, 21, 40), false);
  bad.mutable_sampling_params()->set_ignore_eos(false);
  bad.mutable_sampling_params()->set_regex("(");
  const std::string refusal = Ask(bad).status.error_message();
  EXPECT_THAT(refusal, testing::StartsWith("sampling_params.regex"));
  if (IsWithoutXGrammar(refusal)) GTEST_SKIP() << kWithoutXGrammar;
  const auto answer = [this](const std::function<void(engine::SamplingParams&)>& change) {
    engine::GenerateRequest request = ToGateway(MakeRequest("a", 9, 21, 40), false);
    request.mutable_sampling_params()->set_ignore_eos(false);
    change(*request.mutable_sampling_params());
    const engine::GenerateComplete complete = Whole(request);
    EXPECT_EQ(complete.finish_reason(), "stop");
    std::string text;
    for (const int32_t id : Ids(complete)) {
      if (id != TestServer::kVocab - 1)
        text += server_->stack().model().tokenizer->TokenBytes(id, false);
    }
    return text;
  };
  EXPECT_EQ(answer([](auto& p) { p.set_regex("abc"); }), "abc");
  EXPECT_EQ(answer([](auto& p) { p.set_grammar("root ::= \"cab\""); }), "cab");
  EXPECT_THAT(answer([](auto& p) {
                p.mutable_choice()->add_choices("aaa");
                p.mutable_choice()->add_choices("zed");
              }),
              testing::AnyOf("aaa", "zed"));
}

TEST_F(Gateway, EmbeddingsAreOurs) {
  const auto embed = [this](const std::vector<uint32_t>& ids, engine::EmbedResponse& response) {
    engine::EmbedRequest request;
    request.mutable_tokenized()->mutable_input_ids()->Add(ids.begin(), ids.end());
    grpc::ClientContext context;
    return stub_->Embed(&context, request, &response);
  };
  engine::EmbedResponse theirs;
  EXPECT_THAT(embed({0, 1, 2}, theirs).error_message(), HasSubstr("--embedding-pooling none"));
  TestServerOptions options;
  options.adjust = [](ServiceOptions& service) { service.pooling = Pooling::kLast; };
  Serve(options);
  v1::EmbedRequest request;
  request.set_text("abc");
  v1::EmbedResponse ours;
  grpc::ClientContext context;
  ASSERT_TRUE(server_->stub().Embed(&context, request, &ours).ok());
  ASSERT_TRUE(embed({0, 1, 2}, theirs).ok());
  EXPECT_GT(theirs.embedding_dim(), 0u);
  EXPECT_EQ(std::vector<float>(theirs.embedding().begin(), theirs.embedding().end()),
            std::vector<float>(ours.embedding().begin(), ours.embedding().end()));
  EXPECT_EQ(theirs.prompt_tokens(), 3u);
  EXPECT_THAT(embed({0, TestServer::kVocab}, theirs).error_message(),
              testing::StartsWith("tokenized.input_ids[1]"));
}

TEST_F(Gateway, WhatWeLackIsRefusedByName) {
  using Change = std::function<void(engine::GenerateRequest&)>;
  const std::pair<const char*, Change> rows[] = {
      {"sampling_params.structural_tag",
       [](auto& r) { r.mutable_sampling_params()->set_structural_tag("{}"); }},
      {"sampling_params.truncate_prompt_tokens",
       [](auto& r) { r.mutable_sampling_params()->set_truncate_prompt_tokens(3); }},
      {"kv_transfer_params", [](auto& r) { r.mutable_kv_transfer_params(); }},
      {"kv_transfer_params_json", [](auto& r) { r.set_kv_transfer_params_json("{}"); }},
      {"data_parallel_rank", [](auto& r) { r.set_data_parallel_rank(1); }},
      {"mm_inputs", [](auto& r) { r.mutable_mm_inputs(); }},
      {"extra_mm_inputs", [](auto& r) { r.add_extra_mm_inputs(); }},
      {"media_refs", [](auto& r) { r.mutable_media_refs(); }}};
  const engine::GenerateRequest good = ToGateway(MakeRequest("a", 1, 5, 5), true);
  for (const auto& [name, change] : rows) {
    engine::GenerateRequest request = good;
    change(request);
    const Heard heard = Ask(request);
    EXPECT_EQ(heard.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << name;
    EXPECT_EQ(heard.status.error_message(),
              Str(name, " is set, which this server does not support"));
    EXPECT_TRUE(heard.messages.empty());
  }
  engine::GenerateRequest rank = good;
  rank.set_data_parallel_rank(0);
  EXPECT_TRUE(Ask(rank).status.ok());
}

TEST_F(Gateway, WhatIsOutOfRangeIsNamedAsTheProtocolDoes) {
  using Change = std::function<void(engine::GenerateRequest&)>;
  const std::pair<const char*, Change> rows[] = {
      {"input is missing, expected tokenized or text", [](auto& r) { r.clear_input(); }},
      {"tokenized.input_ids is empty, expected at least one token",
       [](auto& r) { r.mutable_tokenized()->clear_input_ids(); }},
      {"tokenized.input_ids[5] is 50, expected 0 to 49",
       [](auto& r) { r.mutable_tokenized()->add_input_ids(50); }},
      {"tokenized.input_ids[5] is 2147483647, expected 0 to 49",
       [](auto& r) { r.mutable_tokenized()->add_input_ids(4'000'000'000); }},
      {"sampling_params.top_p is 1.5, expected (0, 1]",
       [](auto& r) { r.mutable_sampling_params()->set_top_p(1.5f); }},
      {"sampling_params.n is 5, expected 1 to 4 (the server's --max-batch-size)",
       [](auto& r) { r.mutable_sampling_params()->set_n(5); }},
      {"sampling_params.logprobs is -1, expected 0 to 20",
       [](auto& r) { r.mutable_sampling_params()->set_logprobs(-1); }},
      {"sampling_params.prompt_logprobs is 21, expected 0 to 20",
       [](auto& r) { r.mutable_sampling_params()->set_prompt_logprobs(21); }},
      {"sampling_params.max_tokens is 0, expected at least 1",
       [](auto& r) { r.mutable_sampling_params()->set_max_tokens(0); }},
      {"sampling_params.min_tokens is 6, expected 0 to max_tokens (5)",
       [](auto& r) { r.mutable_sampling_params()->set_min_tokens(6); }},
      {"sampling_params.stop[0] has 0 bytes, expected 1 to 512",
       [](auto& r) { r.mutable_sampling_params()->add_stop(""); }},
      {"sampling_params.stop_token_ids[0] is 77, expected 0 to 49",
       [](auto& r) { r.mutable_sampling_params()->add_stop_token_ids(77); }}};
  for (const auto& [message, change] : rows) {
    engine::GenerateRequest request = ToGateway(MakeRequest("a", 1, 5, 5), false);
    change(request);
    const Heard heard = Ask(request);
    EXPECT_EQ(heard.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << message;
    EXPECT_EQ(heard.status.error_message(), message);
  }
  // text: "\xFF", which a proper client library would not send.
  std::string reply;
  const grpc::Status raw = RawCall(*server_, "/vllm.grpc.engine.VllmEngine/Generate",
                                   std::string("\x1A\x01\xFF", 3), reply);
  EXPECT_EQ(raw.error_message(), "text is not valid UTF-8 at byte 0, expected UTF-8 text");
}

TEST_F(Gateway, AnAbortedRequestEndsWithWhatItHas) {
  for (const bool stream : {true, false}) {
    server_->gate().Allow(8);  // the end cannot come first
    engine::GenerateRequest request = ToGateway(MakeRequest("long", 1, 10, 900), stream);
    Heard heard;
    std::thread client([&] { heard = Ask(request); });
    ASSERT_TRUE(WaitFor({.running = 1}));
    EXPECT_TRUE(Abort("long").ok());
    server_->gate().Open();
    client.join();
    EXPECT_TRUE(heard.status.ok()) << heard.status.error_message();
    ASSERT_EQ(heard.completes().size(), 1u);
    const engine::GenerateComplete complete = heard.completes()[0];
    EXPECT_EQ(complete.finish_reason(), "abort");
    EXPECT_TRUE(heard.messages.back().has_complete());
    if (stream) {
      EXPECT_EQ(heard.ids()[0].size(), complete.completion_tokens());
    } else {
      EXPECT_EQ(Ids(complete).size(), complete.completion_tokens());
    }
    EXPECT_LT(complete.completion_tokens(), 900u);
    ASSERT_TRUE(server_->WaitLoad([](const auto& load) {
      return load.running() == 0 && load.kv_pages_free() == load.kv_pages_total();
    }));
  }
  EXPECT_TRUE(Abort("long").ok());  // over already
  EXPECT_TRUE(Ask(ToGateway(MakeRequest("long", 1, 10, 3), true)).status.ok());
}

TEST_F(Gateway, AbortEndsEveryCandidateAndWhatStillWaits) {
  server_->gate().Allow(8);
  engine::GenerateRequest four = ToGateway(MakeRequest("four", 1, 10, 100), true);
  four.mutable_sampling_params()->set_n(4);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, four);
  Heard ran;
  ASSERT_TRUE(reader->Read(&ran.messages.emplace_back()));
  // Nothing came of this one, so nothing is said of its candidates.
  Heard waited;
  std::thread second([&] { waited = Ask(ToGateway(MakeRequest("late", 1, 10, 9), false)); });
  ASSERT_TRUE(WaitFor({.waiting = 1, .running = 1}));
  EXPECT_TRUE(Abort("late").ok());
  EXPECT_TRUE(Abort("four").ok());
  server_->gate().Open();
  second.join();
  ASSERT_EQ(waited.messages.size(), 1u);
  EXPECT_EQ(waited.messages[0].complete().finish_reason(), "abort");
  EXPECT_EQ(waited.messages[0].complete().output_ids_size(), 0);
  for (engine::GenerateResponse message; reader->Read(&message);) ran.messages.push_back(message);
  EXPECT_TRUE(reader->Finish().ok());
  ASSERT_EQ(ran.completes().size(), 4u);
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(ran.completes()[i].finish_reason(), "abort");
    EXPECT_EQ(ran.completes()[i].index(), i);
    EXPECT_EQ(ran.completes()[i].prompt_tokens(), 10u);
  }
}

TEST_F(Gateway, AClientThatGoesAwayEndsItsRequest) {
  server_->gate().Allow(8);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, ToGateway(MakeRequest("gone", 1, 10, 900), true));
  engine::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  context.TryCancel();
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_->gate().Open();
  const auto end = server_->EndOf("gone");
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_LT(end->output_tokens, 900);
}

TEST_F(Gateway, TheDeadlineIsTheRequests) {
  server_->gate().Close();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  const auto reader = stub_->Generate(&context, ToGateway(MakeRequest("late", 1, 10, 900), true));
  engine::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  server_->gate().Open();
  const auto end = server_->EndOf("late");
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, "deadline");
}

TEST_F(Gateway, KeysAreAskedForAndAKeyAbortsItsOwn) {
  const std::string alice = "alice-0123456789abcdef", bob = "bob-0123456789abcdefgh";
  WriteText(TestPath("gateway.keys"), alice + " alice\n" + bob + " bob\n");
  auto keys = ApiKeys::Open(TestPath("gateway.keys"), [](const LogEvent&) {});
  ASSERT_TRUE(keys.ok()) << keys.status();
  keys_ = *std::move(keys);
  Serve({.adjust = [&](ServiceOptions& service) { service.keys = keys_.get(); }});

  const auto refused = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
  };
  refused(Ask(ToGateway(MakeRequest("a", 1, 5, 5), true)).status);
  refused(Abort("a"));
  const auto unary = [](auto method) {
    grpc::ClientContext context;
    return method(&context);
  };
  engine::GetModelInfoResponse model;
  engine::GetServerInfoResponse information;
  engine::GetLoadsResponse loads;
  engine::EmbedResponse embedded;
  common::FlushCacheResponse flushed;
  engine::HealthCheckResponse health;
  refused(unary([&](auto* context) { return stub_->GetModelInfo(context, {}, &model); }));
  refused(unary([&](auto* context) { return stub_->GetServerInfo(context, {}, &information); }));
  refused(unary([&](auto* context) { return stub_->GetLoads(context, {}, &loads); }));
  refused(unary([&](auto* context) { return stub_->Embed(context, {}, &embedded); }));
  refused(unary([&](auto* context) { return stub_->FlushCache(context, {}, &flushed); }));
  refused(unary([&](auto* context) { return stub_->GetTokenizer(context, {})->Finish(); }));
  refused(unary([&](auto* context) { return stub_->SubscribeKvEvents(context, {})->Finish(); }));
  EXPECT_TRUE(unary([&](auto* context) { return stub_->HealthCheck(context, {}, &health); }).ok());

  server_->gate().Allow(8);
  Heard heard;
  std::thread client([&] { heard = Ask(ToGateway(MakeRequest("mine", 1, 10, 40), true), alice); });
  while (PoolNow().running == 0) std::this_thread::yield();
  EXPECT_TRUE(Abort("mine", bob).ok());
  server_->gate().Open();
  client.join();
  EXPECT_TRUE(heard.status.ok());
  EXPECT_EQ(heard.ids()[0].size(), 40u);
  // Or the first one could be taken for the second.
  while (PoolNow().waiting + PoolNow().running > 0) std::this_thread::yield();

  server_->gate().Allow(8);
  std::thread again([&] { heard = Ask(ToGateway(MakeRequest("mine", 1, 10, 900), true), alice); });
  while (PoolNow().running == 0) std::this_thread::yield();
  EXPECT_TRUE(Abort("mine", alice).ok());
  server_->gate().Open();
  again.join();
  ASSERT_EQ(heard.completes().size(), 1u);
  EXPECT_EQ(heard.completes()[0].finish_reason(), "abort");
}

TEST_F(Gateway, WhatItSaysOfItself) {
  const auto ask = [this](auto method, const auto& request, auto& response) {
    grpc::ClientContext context;
    return (stub_.get()->*method)(&context, request, &response);
  };
  using Stub = engine::VllmEngine::Stub;
  engine::GetModelInfoResponse model;
  ASSERT_TRUE(ask(&Stub::GetModelInfo, engine::GetModelInfoRequest(), model).ok());
  EXPECT_EQ(model.model_path(), "/prefix");
  EXPECT_EQ(model.served_model_name(), "prefix");
  EXPECT_EQ(model.model_type(), "prefix");
  EXPECT_TRUE(model.is_generation());
  EXPECT_EQ(model.vocab_size(), 50u);
  EXPECT_EQ(model.max_context_length(), 1024u);
  EXPECT_EQ(model.max_req_input_len(), 1023);
  EXPECT_THAT(model.eos_token_ids(), ElementsAre(49));

  engine::GetServerInfoResponse information;
  ASSERT_TRUE(ask(&Stub::GetServerInfo, engine::GetServerInfoRequest(), information).ok());
  EXPECT_EQ(information.server_type(), "vllm-grpc");
  EXPECT_EQ(information.block_size(), 16);
  EXPECT_EQ(information.max_num_seqs(), 4);
  EXPECT_EQ(information.data_parallel_size(), 1);
  EXPECT_EQ(information.active_requests(), 0u);
  EXPECT_FALSE(information.is_paused());
  EXPECT_GT(information.uptime_seconds(), 0);

  // Five at once: four run, each with five pages of 16 tokens, and one waits.
  server_->gate().Close();
  std::vector<std::thread> clients;
  for (int i = 0; i < 5; ++i) {
    clients.emplace_back([&, i] {
      EXPECT_TRUE(Ask(ToGateway(MakeRequest(Str("r", i), i, 10, 70), true)).status.ok());
    });
  }
  while (PoolNow().waiting + PoolNow().running < 5) std::this_thread::yield();
  server_->gate().Allow(6);
  engine::GetLoadsResponse loads;
  do {
    ASSERT_TRUE(ask(&Stub::GetLoads, engine::GetLoadsRequest(), loads).ok());
    ASSERT_EQ(loads.loads_size(), 1);
  } while (loads.loads(0).num_running_reqs() != 4 || loads.loads(0).num_used_tokens() != 320);
  const engine::SchedulerLoad& load = loads.loads(0);
  EXPECT_EQ(load.dp_rank(), 0);
  EXPECT_EQ(load.num_total_reqs(), load.num_running_reqs() + load.num_waiting_reqs());
  EXPECT_EQ(load.max_total_num_tokens(), 4096);
  EXPECT_EQ(load.token_usage(), 320.0 / 4096);
  EXPECT_EQ(load.max_running_requests(), 4);
  EXPECT_EQ(loads.dp_rank_count(), 1);
  EXPECT_THAT(loads.timestamp(), testing::ContainsRegex("^20..-..-..T..:..:.*\\+00:00$"));
  engine::GetLoadsRequest other;
  other.set_dp_rank(1);
  ASSERT_TRUE(ask(&Stub::GetLoads, other, loads).ok());
  EXPECT_EQ(loads.loads_size(), 0);
  server_->gate().Open();
  for (std::thread& client : clients) client.join();

  common::FlushCacheResponse flushed;
  ASSERT_TRUE(ask(&Stub::FlushCache, common::FlushCacheRequest(), flushed).ok());
  EXPECT_TRUE(flushed.success());
  grpc::ClientContext context;
  const grpc::Status events = stub_->SubscribeKvEvents(&context, {})->Finish();
  EXPECT_EQ(events.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(events.error_message(), HasSubstr("--kv-events on"));

  EXPECT_TRUE(server_->WaitHealth("vllm.grpc.engine.VllmEngine", true));
  engine::HealthCheckResponse health;
  ASSERT_TRUE(ask(&Stub::HealthCheck, engine::HealthCheckRequest(), health).ok());
  EXPECT_TRUE(health.healthy());
  EXPECT_EQ(health.message(), "ready");
}

TEST_F(Gateway, ADrainingServerIsNotHealthy) {
  server_->gate().Allow(8);
  std::thread client(
      [&] { EXPECT_TRUE(Ask(ToGateway(MakeRequest("last", 1, 10, 40), true)).status.ok()); });
  ASSERT_TRUE(WaitFor({.running = 1}));
  std::thread drain([&] { server_->server().DrainAndStop(std::chrono::seconds(60)); });
  engine::HealthCheckResponse health;
  do {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->HealthCheck(&context, {}, &health).ok());
  } while (health.healthy());
  EXPECT_THAT(health.message(), HasSubstr("not ready"));
  // First nobody is sent here any more, then nobody is let in.
  EXPECT_TRUE(server_->WaitLoad([](const auto& load) { return load.draining(); }));
  EXPECT_EQ(Ask(ToGateway(MakeRequest("new", 1, 10, 4), true)).status.error_code(),
            grpc::StatusCode::UNAVAILABLE);
  server_->gate().Open();
  client.join();
  drain.join();
}

TEST_F(Gateway, TheTokenizerComesInPiecesWithItsSum) {
  const auto fetch = [this](std::string& sum) {
    grpc::ClientContext context;
    const auto reader = stub_->GetTokenizer(&context, {});
    std::string archive;
    for (common::GetTokenizerChunk chunk; reader->Read(&chunk);) {
      EXPECT_EQ(sum, "");  // with the last one only
      EXPECT_LE(chunk.data().size(), 65536u);
      archive += chunk.data();
      sum = chunk.sha256();
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return archive;
  };
  const std::map<std::string, std::string> files = {{"tokenizer.json", std::string(200'000, '7')},
                                                    {"tokenizer_config.json", "{}"}};
  std::atomic<int> made = 0;
  Serve({.tokenizer_files = [&] {
    ++made;
    return files;
  }});
  std::string sum, again;
  const std::string archive = fetch(sum);
  EXPECT_EQ(archive, ZipArchive(files));
  EXPECT_EQ(sum.size(), 64u);
  EXPECT_EQ(fetch(again), archive);
  EXPECT_EQ(again, sum);
  EXPECT_EQ(made.load(), 1);

  for (const bool known : {false, true}) {
    TestServerOptions options;
    if (known) options.tokenizer_files = [] { return std::map<std::string, std::string>(); };
    Serve(options);
    grpc::ClientContext context;
    const grpc::Status status = stub_->GetTokenizer(&context, {})->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr(known ? "SentencePiece" : "no tokenizer"));
  }
}

// Those who ask for a tokenizer that is longer than what gRPC's connection holds, and do not read.
class TokenizerReaders : public Gateway {
 protected:
  void ServeAndAsk(std::chrono::milliseconds stall_timeout) {
    TestServerOptions options;
    options.stall_timeout = stall_timeout;
    options.tokenizer_files = [] {
      return std::map<std::string, std::string>{{"tokenizer.json", std::string(2 << 20, '7')}};
    };
    Serve(options);
    for (Reader& reader : readers_) reader.stream = stub_->GetTokenizer(&reader.context, {});
    // One who came before the last of them would take its place, and none would be full.
    for (Reader& reader : readers_) reader.stream->WaitForInitialMetadata();
    aside_ = engine::VllmEngine::NewStub(server_->Connect(grpc::InsecureChannelCredentials()));
  }

  // Asks for it once more, on a connection that holds nothing unread, and gives up once it comes.
  // Each piece that is read is dear under ThreadSanitizer.
  grpc::Status AskOnce() {
    grpc::ClientContext context;
    const auto stream = aside_->GetTokenizer(&context, {});
    common::GetTokenizerChunk chunk;
    if (stream->Read(&chunk)) context.TryCancel();
    return stream->Finish();
  }

  // Until there is room, or none, for one more.
  grpc::Status AskUntil(bool room) {
    while (true) {
      grpc::Status status = AskOnce();
      if ((status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) == room) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  struct Reader {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<common::GetTokenizerChunk>> stream;
  };
  std::array<Reader, 16> readers_;  // as many as there may be
  std::unique_ptr<engine::VllmEngine::Stub> aside_;
};

TEST_F(TokenizerReaders, AreSoMany) {
  ServeAndAsk(std::chrono::minutes(1));
  EXPECT_EQ(AskUntil(false).error_message(),
            "GetTokenizer: 16 calls are under way, as many as there may be");
  for (Reader& reader : readers_) reader.context.TryCancel();
  AskUntil(true);
}

TEST_F(TokenizerReaders, WhoDoNotReadAreCutOffAndLeaveRoom) {
  ServeAndAsk(std::chrono::milliseconds(300));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  AskUntil(true);
  const bool cut_off = std::ranges::any_of(readers_, [](Reader& reader) {
    for (common::GetTokenizerChunk chunk; reader.stream->Read(&chunk);) {
    }
    return reader.stream->Finish().error_code() == grpc::StatusCode::CANCELLED;
  });
  EXPECT_TRUE(cut_off);
  for (Reader& reader : readers_) reader.context.TryCancel();
}

TEST_F(Gateway, AbortTakesSoManyIds) {
  grpc::ClientContext context;
  engine::AbortRequest request;
  for (int i = 0; i < 1025; ++i) request.add_request_ids("a");
  engine::AbortResponse response;
  const grpc::Status status = stub_->Abort(&context, request, &response);
  EXPECT_EQ(status.error_message(), "request_ids has 1025 entries, expected at most 1024");
}

TEST(ZipArchive, IsWhatTheFormatSays) {
  using std::string_literals::operator""s;
  // CRC-32 of "123456789": CBF43926.
  const std::string described =
      "\x14\0\0\x08\0\0\0\0\x21\0\x26\x39\xF4\xCB\x09\0\0\0\x09\0\0\0\x01\0\0\0"s;
  EXPECT_EQ(ZipArchive({{"a", "123456789"}}),
            "PK\x03\x04"s + described + "a123456789" + "PK\x01\x02\x14\0"s + described +
                std::string(14, '\0') + "a" +
                "PK\x05\x06\0\0\0\0\x01\0\x01\0\x2F\0\0\0\x28\0\0\0\0\0"s);
}

}  // namespace
}  // namespace treadle
