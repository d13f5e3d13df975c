// Promises of the API, over a real channel. Things that go wrong:
// service_fault_test.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "base/status.h"
#include "server/grpc/rpc_details.pb.h"
#include "tests/attacks/hostile_client.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using testing::HasSubstr;

std::vector<int32_t> Ids(const v1::Output& output) {
  return {output.token_ids().begin(), output.token_ids().end()};
}

TEST(Service, UnaryAndStreamGiveTheSameAnswer) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 3, 20, 30);
  request.mutable_response()->set_logprobs(3);
  request.mutable_response()->set_prompt_logprobs(2);
  v1::GenerateResponse unary;
  ASSERT_TRUE(Generate(server, request, unary).ok());
  StreamOutcome stream = GenerateStream(server, request);
  ASSERT_TRUE(stream.status.ok());
  EXPECT_TRUE(stream.prompt_info_first);
  EXPECT_TRUE(stream.usage_last);
  EXPECT_EQ(unary.output().token_ids_size(), 30);
  EXPECT_EQ(unary.output().finish_info().reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(unary.usage().prompt_tokens(), 20);
  EXPECT_EQ(unary.usage().completion_tokens(), 30);
  EXPECT_GT(unary.timing().total(), 0);
  EXPECT_GE(unary.timing().total(), unary.timing().first_token());
  for (v1::GenerateResponse* each : {&unary, &stream.all}) {
    each->clear_timing();
    // How much is guessed depends on the machine's speed.
    each->mutable_usage()->clear_draft_tokens();
    each->mutable_usage()->clear_accepted_draft_tokens();
  }
  EXPECT_EQ(unary.SerializeAsString(), stream.all.SerializeAsString());
}

TEST(Service, ConcurrentStreamsEqualSingleRuns) {
  TestServer server;
  constexpr int kStreams = 16;
  std::vector<v1::GenerateRequest> requests;
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < kStreams; ++i) {
    requests.push_back(MakeRequest("r" + std::to_string(i), i, 1 + 5 * i, 20 + i));
    if (i % 3 == 0) requests.back().mutable_sampling()->set_frequency_penalty(0.5f);
    v1::GenerateResponse response;
    ASSERT_TRUE(Generate(server, requests.back(), response).ok());
    alone.push_back(Ids(response.output()));
  }
  std::vector<StreamOutcome> together(kStreams);
  std::vector<std::thread> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.emplace_back([&, i] { together[i] = GenerateStream(server, requests[i]); });
  }
  for (std::thread& client : clients) client.join();
  for (int i = 0; i < kStreams; ++i) {
    ASSERT_TRUE(together[i].status.ok()) << together[i].status.error_message();
    EXPECT_EQ(Ids(together[i].all.output()), alone[i]) << "request " << i;
  }
  EXPECT_NE(alone[0], alone[1]);
}

TEST(Service, StopStringAcrossTokensEndsTheAnswer) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 11, 5, 60);
  v1::GenerateResponse whole;
  ASSERT_TRUE(Generate(server, request, whole).ok());
  const std::string& text = whole.output().text();
  const size_t cut = text.size() / 2;
  const std::string stop = text.substr(cut, 4);  // spans at least two tokens
  request.mutable_stopping()->add_stop_strings("not there");
  request.mutable_stopping()->add_stop_strings(stop);
  const StreamOutcome outcome = GenerateStream(server, request);
  ASSERT_TRUE(outcome.status.ok());
  const v1::Output& output = outcome.all.output();
  EXPECT_EQ(output.text(), text.substr(0, text.find(stop)));
  EXPECT_EQ(output.finish_info().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(output.finish_info().stop_string(), stop);
  EXPECT_LT(output.token_ids_size(), 60);
  EXPECT_EQ(outcome.all.usage().completion_tokens(), output.token_ids_size());
}

TEST(Service, StopTokenEndsTheAnswer) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 5, 5, 40);
  v1::GenerateResponse whole;
  ASSERT_TRUE(Generate(server, request, whole).ok());
  const std::vector<int32_t> ids = Ids(whole.output());
  const int32_t stop = ids[10];
  const size_t first = std::find(ids.begin(), ids.end(), stop) - ids.begin();
  request.mutable_stopping()->add_stop_token_ids(stop);
  v1::GenerateResponse stopped;
  ASSERT_TRUE(Generate(server, request, stopped).ok());
  EXPECT_EQ(Ids(stopped.output()), std::vector<int32_t>(ids.begin(), ids.begin() + first + 1));
  EXPECT_EQ(stopped.output().finish_info().stop_token_id(), stop);
  EXPECT_EQ(stopped.output().finish_info().reason(), v1::FINISH_REASON_STOP);
}

TEST(Service, CandidatesShareAPromptAndDiffer) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 9, 21, 12);
  v1::GenerateResponse one;
  ASSERT_TRUE(Generate(server, request, one).ok());
  request.mutable_sampling()->set_num_candidates(4);
  v1::GenerateResponse four;
  ASSERT_TRUE(Generate(server, request, four).ok());
  ASSERT_EQ(four.more_candidates_size(), 3);
  EXPECT_EQ(Ids(four.output()), Ids(one.output()));
  std::set<std::vector<int32_t>> distinct = {Ids(four.output())};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(four.more_candidates(i).candidate(), i + 1);
    EXPECT_EQ(four.more_candidates(i).token_ids_size(), 12);
    distinct.insert(Ids(four.more_candidates(i)));
  }
  EXPECT_EQ(distinct.size(), 4u);
  EXPECT_EQ(four.usage().completion_tokens(), 48);
  const StreamOutcome stream = GenerateStream(server, request);
  ASSERT_TRUE(stream.status.ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Ids(stream.all.more_candidates(i)), Ids(four.more_candidates(i)));
  }
}

TEST(Service, LogprobsAreOfTheTokensThatTheyNameAndBestFirst) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 2, 40, 6);  // a prompt of several chunks
  request.mutable_sampling()->set_temperature(0);
  request.mutable_response()->set_logprobs(4);
  request.mutable_response()->set_prompt_logprobs(0);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, request, response).ok());
  ASSERT_EQ(response.output().logprobs_size(), 6);
  for (int i = 0; i < 6; ++i) {
    const v1::TokenLogprob& entry = response.output().logprobs(i);
    EXPECT_EQ(entry.token_id(), response.output().token_ids(i));
    ASSERT_EQ(entry.top_size(), 4);
    EXPECT_EQ(entry.top(0).token_id(), entry.token_id());  // greedy takes the best
    EXPECT_EQ(entry.top(0).logprob(), entry.logprob());
    for (int k = 1; k < 4; ++k) EXPECT_LE(entry.top(k).logprob(), entry.top(k - 1).logprob());
  }
  const auto& prompt = response.prompt_info().prompt_logprobs();
  ASSERT_EQ(prompt.size(), 39);
  for (int i = 0; i < 39; ++i) {
    EXPECT_EQ(prompt[i].token_id(), request.token_ids().ids(i + 1));
    EXPECT_LE(prompt[i].logprob(), 0);
    EXPECT_EQ(prompt[i].top_size(), 0);
  }
}

TEST(Service, ARandomSeedIsReturnedAndRepeatsTheAnswer) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 2, 10, 20);
  request.mutable_sampling()->clear_seed();
  v1::GenerateResponse first, second, again;
  ASSERT_TRUE(Generate(server, request, first).ok());
  ASSERT_TRUE(Generate(server, request, second).ok());
  EXPECT_NE(first.prompt_info().seed(), second.prompt_info().seed());
  request.mutable_sampling()->set_seed(first.prompt_info().seed());
  ASSERT_TRUE(Generate(server, request, again).ok());
  EXPECT_EQ(Ids(again.output()), Ids(first.output()));
}

TEST(Service, TokenizeDetokenizeAndInformation) {
  TestServer server;
  {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    request.set_text("abz");
    v1::TokenizeResponse response;
    ASSERT_TRUE(server.stub().Tokenize(&context, request, &response).ok());
    EXPECT_THAT(response.token_ids().ids(), testing::ElementsAre(0, 1, 25));
  }
  {
    grpc::ClientContext context;
    v1::DetokenizeRequest request;
    for (int id : {0, 27, 1}) request.mutable_token_ids()->add_ids(id);
    v1::DetokenizeResponse response;
    ASSERT_TRUE(server.stub().Detokenize(&context, request, &response).ok());
    EXPECT_EQ(response.text(), "abbb");
  }
  {
    grpc::ClientContext context;
    v1::DetokenizeRequest request;
    request.mutable_token_ids()->add_ids(TestServer::kVocab);
    v1::DetokenizeResponse response;
    const grpc::Status status = server.stub().Detokenize(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("token_ids.ids[0] is 50, expected 0 to 49"));
  }
  {
    grpc::ClientContext context;
    v1::GetModelInfoResponse info;
    ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
    EXPECT_EQ(info.name(), "prefix");
    EXPECT_EQ(info.vocab_size(), TestServer::kVocab);
    EXPECT_EQ(info.max_context(), 1024);
    EXPECT_TRUE(info.has_tokenizer());
    EXPECT_FALSE(info.has_chat_template());
    EXPECT_EQ(info.bos_token_id(), -1);
    EXPECT_THAT(info.end_token_ids(), testing::ElementsAre(TestServer::kVocab - 1));
  }
  const v1::GetLoadResponse load = server.Load();
  EXPECT_EQ(load.queue_limit(), 64);
  EXPECT_GT(load.running_limit(), 0);
  EXPECT_GT(load.uptime(), 0);
  EXPECT_EQ(load.kv_pages_total(), 256);
  EXPECT_EQ(load.kv_pages_free(), 256);
  EXPECT_FALSE(load.draining());
}

// Templates as those of DeepSeek R1, Qwen 3, and models that do not think.
TEST(Service, ModelInfoSaysWhatChatsPromptsOpen) {
  const std::string says = "{{ messages[0].content.split('</think>')[-1] }}";
  for (const auto& [chat_template, opened] : {std::pair(says + "<think>\n", "<think>"),
                                              {says + "<think>\n\n</think>\n\n", ""},
                                              {"{{ messages[0].content }}<think>", ""},
                                              {std::string("{{ messages }}"), ""}}) {
    TestServer server({.chat_template = chat_template});
    grpc::ClientContext context;
    v1::GetModelInfoResponse info;
    ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
    EXPECT_EQ(info.reasoning_opened(), opened) << chat_template;
  }
}

TEST(Service, InvalidRequestsAreAnsweredAndDisturbNothing) {
  TestServer server;
  v1::GenerateRequest bad = MakeRequest("bad", 1, 3, 5);
  bad.mutable_sampling()->set_top_p(1.5f);
  v1::GenerateResponse response;
  const grpc::Status unary = Generate(server, bad, response);
  EXPECT_EQ(unary.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(unary.error_message(), "sampling.top_p is 1.5, expected (0, 1]");
  const StreamOutcome stream = GenerateStream(server, bad);
  EXPECT_EQ(stream.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(stream.messages, 0);

  // text: "\xFF", which a proper client library would not send.
  std::string reply;
  const grpc::Status raw =
      RawCall(server, "/treadle.v1.Inference/Generate", std::string("\x12\x01\xFF", 3), reply);
  EXPECT_EQ(raw.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(raw.error_message(), "text is not valid UTF-8 at byte 0, expected UTF-8 text");
  const grpc::Status garbage =
      RawCall(server, "/treadle.v1.Inference/Generate", "\xFF\xFF\xFF", reply);
  EXPECT_EQ(garbage.error_code(), grpc::StatusCode::INVALID_ARGUMENT);

  EXPECT_TRUE(Generate(server, MakeRequest("good", 1, 3, 5), response).ok());
}

TEST(Service, HealthAndReflectionAreThere) {
  TestServer server;
  EXPECT_TRUE(server.WaitHealth("", true));
  EXPECT_TRUE(server.WaitHealth("treadle.v1.Inference", true));

  // list_services; the method is a bidirectional stream, and one message each way looks like this.
  grpc::GenericStub stub(server.channel());
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  const auto await = [&] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  ASSERT_TRUE(await());
  const grpc::Slice slice(std::string("\x3A\x00", 2));
  call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  ASSERT_TRUE(await());
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  ASSERT_TRUE(await());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(answer.Dump(&slices).ok());
  std::string services;
  for (const grpc::Slice& part : slices) {
    services.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  EXPECT_THAT(services, HasSubstr("treadle.v1.Inference"));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(await());
  queue.Shutdown();
}

TEST(Service, TheLedgerCanBeWatched) {
  TestServer server;
  grpc::ClientContext context;
  v1::WatchLedgerRequest request;
  request.set_from_start(true);
  const auto reader = server.stub().WatchLedger(&context, request);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, MakeRequest("watched", 1, 40, 5), response).ok());
  int64_t prompt = 0;
  bool ended = false;
  v1::LedgerRecord record;
  while (!ended && reader->Read(&record)) {
    EXPECT_EQ(record.lost(), 0u);
    EXPECT_EQ(record.total_pages(), 256);
    EXPECT_EQ(record.stages(), 1);
    for (const v1::LedgerMember& member : record.members()) {
      if (member.initiation()) prompt += member.tokens();
    }
    for (const v1::LedgerEnd& end : record.ends()) {
      ended = true;
      EXPECT_EQ(end.request_id(), "");  // without keys nobody's are shown
      EXPECT_EQ(end.reason(), "length");
      EXPECT_EQ(end.output_tokens(), 5);
    }
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(prompt, 40);
  context.TryCancel();
}

TEST(Service, MetricsHaveTheAgreedNames) {
  TestServer server;
  ASSERT_OK_AND_ASSIGN(const auto port, server.metrics().Listen("127.0.0.1:0"));
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, MakeRequest("m", 1, 10, 5), response).ok());
  ASSERT_TRUE(server.EndOf("m").has_value());
  server.server().DrainAndStop(std::chrono::seconds(10));
  server.follower().Stop();  // everything recorded
  const std::string page = HttpGet(port, "/metrics");
  const std::string label = "{model_name=\"prefix\"} ";
  for (const char* line :
       {"treadle:num_requests_running{L} 0", "treadle:num_requests_waiting{L} 0",
        "treadle:kv_cache_usage_perc{L} 0", "treadle:prompt_tokens_total{L} 10",
        "treadle:prefix_cache_queries_total{L} 10", "treadle:prefix_cache_hits_total{L} 0",
        "treadle:generation_tokens_total{L} 5", "treadle:request_prompt_tokens_count{L} 1",
        "treadle:request_prompt_tokens_sum{L} 10", "treadle:request_generation_tokens_sum{L} 5",
        "treadle:iteration_tokens_total_sum{L} 14",
        "treadle:time_to_first_token_seconds_count{L} 1",
        "treadle:inter_token_latency_seconds_count{L} 4",
        "treadle:e2e_request_latency_seconds_count{L} 1",
        "treadle:request_queue_time_seconds_count{L} 1",
        "treadle:request_prefill_time_seconds_count{L} 1",
        "treadle:request_decode_time_seconds_count{L} 1"}) {
    std::string expected = line;
    expected.replace(expected.find("{L} "), 4, label);
    EXPECT_THAT(page, HasSubstr("\n" + expected + "\n"));
  }
  EXPECT_THAT(page, HasSubstr("treadle:request_success_total{finished_reason=\"length\","
                              "model_name=\"prefix\"} 1\n"));
  EXPECT_THAT(page, HasSubstr("# TYPE treadle:time_to_first_token_seconds histogram"));
}

TEST(Service, MetricsOfThePortAndOfTheReaders) {
  TestServer server({.adjust = [](ServiceOptions& options) { options.limits.connections = 3; }});
  server.server().AddTo(server.metrics());
  ASSERT_OK_AND_ASSIGN(const auto port, server.metrics().Listen("127.0.0.1:0"));
  const auto wait_for = [&](const std::string& name, int value) {
    const std::string wanted = Str("\ntreadle:", name, "{model_name=\"prefix\"} ", value, "\n");
    std::string page;
    ComesTrue([&] {
      page = HttpGet(port, "/metrics");
      return page.find(wanted) != std::string::npos;
    });
    EXPECT_THAT(page, HasSubstr(wanted));
  };
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, MakeRequest("m", 1, 10, 5), response).ok());
  wait_for("connections", 1);
  for (const char* name : {"receive_memory_bytes", "num_requests_being_read", "num_requests_unread",
                           "connections_turned_away_total", "connection_violations_total"}) {
    wait_for(name, 0);
  }
  const int own = server.server().address().port;
  {
    HostileClient client(own);
    EXPECT_TRUE(client.Send("GET / HTTP/1.1\r\n\r\n"));
    wait_for("connection_violations_total", 1);
  }
  HostileClient slow(own);
  ASSERT_TRUE(slow.Greet() && slow.Call(1, "/treadle.v1.Inference/Generate"));
  ASSERT_TRUE(slow.SendData(1, MessagePrefix(false, 1000) + "abc"));
  wait_for("connections", 2);
  wait_for("receive_memory_bytes", 3);
  HostileClient third(own), fourth(own);  // for whom the one without a call makes room
  wait_for("connections_turned_away_total", 1);
  wait_for("connections", 3);
}

TEST(Service, EnginesThatWereLostAreCounted) {
  TestServer server;
  server.follower().Stop();  // from here on the records are ours
  const auto expect = [&](const char* value) {
    EXPECT_THAT(
        server.metrics().Scrape(),
        HasSubstr(Str("\ntreadle:engine_losses_total{model_name=\"prefix\"} ", value, "\n")));
  };
  expect("0");
  LedgerRecord record;
  for (const auto& [epoch, value] : {std::pair(1, "0"), {4, "3"}, {2, "3"}, {5, "4"}}) {
    record.epoch = static_cast<uint64_t>(epoch);
    server.metrics().Record(record);
    expect(value);
  }
}

// Counts the iterations in the window, whoever ran in them; heartbeats are none.
TEST(Service, BubbleRatioIsTheirShareOfTheLastIterations) {
  TestServer server;
  ASSERT_OK_AND_ASSIGN(const auto port, server.metrics().Listen("127.0.0.1:0"));
  server.follower().Stop();  // from here on the records are ours
  const auto ratio = [&] {
    const std::string page = HttpGet(port, "/metrics");
    const std::string name = "\ntreadle:pipeline_bubble_ratio{model_name=\"prefix\"} ";
    const size_t at = page.find(name);
    return at == std::string::npos ? -1.0 : std::stod(page.substr(at + name.size()));
  };
  EXPECT_EQ(ratio(), 0);
  LedgerRecord record;
  record.members = {{.request = 1, .tokens = 1, .initiation = false}};
  record.compute = 2;
  record.sample = 1;
  server.metrics().Record(record);
  EXPECT_EQ(ratio(), 0);
  record.bubble = 1;
  server.metrics().Record(record);
  EXPECT_NEAR(ratio(), 1.0 / 7, 1e-12);
  LedgerRecord heartbeat;
  heartbeat.bubble = 1000;
  server.metrics().Record(heartbeat);
  EXPECT_NEAR(ratio(), 1.0 / 7, 1e-12);
  record.bubble = 0;
  for (int i = 0; i < 255; ++i) server.metrics().Record(record);
  EXPECT_NEAR(ratio(), 1.0 / (256 * 3 + 1), 1e-12);
  server.metrics().Record(record);  // the bubble leaves the window
  EXPECT_EQ(ratio(), 0);
}

TEST(Service, AnOccupiedPortIsNamed) {
  TestServer server;
  ServiceOptions options;
  options.listen = ToString(server.server().address());
  const auto second = InferenceServer::Start(server.stack(), server.follower(), options);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("cannot listen on " + options.listen + ": Address already in use"));
}

}  // namespace
}  // namespace treadle
