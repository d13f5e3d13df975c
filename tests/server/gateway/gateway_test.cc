// Promises to gateways about answers: vllm.grpc.engine.VllmEngine, over a real channel. They are
// held against those of treadle.v1.Inference on the same server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "server/gateway/gateway_messages.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/session/sampling_defaults.h"
#include "tests/server/gateway/gateway_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/without_xgrammar.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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

}  // namespace
}  // namespace treadle
