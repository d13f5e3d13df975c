// Calls of vllm.grpc.engine.VllmEngine other than answers: what is refused, how requests are
// aborted, whose they are, and what the server says of itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/access/api_keys.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/gateway/gateway_fixture.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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
  ASSERT_OK_AND_ASSIGN(auto keys, ApiKeys::Open(TestPath("gateway.keys"), [](const LogEvent&) {}));
  keys_ = std::move(keys);
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

}  // namespace
}  // namespace treadle
