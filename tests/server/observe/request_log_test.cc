// One event per request: it agrees with the ledger, and holds neither secrets nor texts.
#include "server/observe/request_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "server/observe/log.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

constexpr auto kPatience = std::chrono::seconds(60);
const char kAlice[] = "alice-0123456789abcdef";
const char kPoor[] = "poor-0123456789abcdef";
const char kMarker[] = "secretwords";

// Logged lines, as JSON.
class Events {
 public:
  LogSink sink() {
    return [this](LogEvent event) {
      MutexLock lock(mutex_);
      lines_.push_back(ToJson(event));
      texts_.push_back(ToText(event));
      added_.NotifyAll();
    };
  }
  // The one with number `i`, once it is there; null if it does not come.
  json Get(size_t i) {
    const auto patience = Clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (lines_.size() <= i) {
      if (!added_.WaitUntil(mutex_, patience)) return nullptr;
    }
    return json::parse(lines_[i]);
  }
  // Everything, in both formats.
  std::string All() {
    MutexLock lock(mutex_);
    std::string all;
    for (const std::string& line : lines_) all += line;
    for (const std::string& text : texts_) all += text;
    return all;
  }
  size_t size() {
    MutexLock lock(mutex_);
    return lines_.size();
  }

 private:
  Mutex mutex_;
  CondVar added_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
};

TestServerOptions Logging(Events& events, const ApiKeys* keys = nullptr) {
  TestServerOptions options;
  options.adjust = [&events, keys](ServiceOptions& service) {
    service.request_log = events.sink();
    service.keys = keys;
  };
  return options;
}

grpc::Status Ask(TestServer& server, const v1::GenerateRequest& request,
                 const std::map<std::string, std::string>& metadata = {}) {
  grpc::ClientContext context;
  for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
  v1::GenerateResponse response;
  return server.stub().Generate(&context, request, &response);
}

void ExpectSame(const json& logged, const LedgerEnd& end) {
  EXPECT_EQ(logged["request"], end.request);
  EXPECT_EQ(logged["request_id"], end.client_id);
  EXPECT_EQ(logged["finish_reason"], end.reason);
  EXPECT_EQ(logged["prompt_tokens"], end.prompt_tokens);
  EXPECT_EQ(logged["generated_tokens"], end.output_tokens);
  constexpr double kMicrosecond = 1e-6;
  EXPECT_NEAR(logged["queued_seconds"], end.timings.queued, kMicrosecond);
  EXPECT_NEAR(logged["first_token_seconds"], end.timings.first_token, kMicrosecond);
  EXPECT_NEAR(logged["total_seconds"], end.timings.total, kMicrosecond);
}

TEST(RequestLog, AFinishedRequestAgreesWithTheLedger) {
  Events events;
  TestServer server(Logging(events));
  EXPECT_TRUE(Ask(server, MakeRequest("unary", 1, 5, 7)).ok());
  EXPECT_TRUE(GenerateStream(server, MakeRequest("stream", 2, 6, 8)).status.ok());
  for (const auto& [i, id] : {std::pair(0, "unary"), std::pair(1, "stream")}) {
    const json logged = events.Get(i);
    const auto end = server.EndOf(id);
    ASSERT_TRUE(logged.is_object() && end) << id;
    EXPECT_EQ(logged["event"], "request_finished");
    EXPECT_EQ(logged["severity"], "info");
    EXPECT_EQ(logged["status"], "OK");
    EXPECT_EQ(logged["model"], "prefix");
    EXPECT_THAT(std::string(logged["client"]), HasSubstr("127.0.0.1:"));
    EXPECT_FALSE(logged.contains("api_key") || logged.contains("error"));
    ExpectSame(logged, *end);
  }
}

TEST(RequestLog, EveryCandidateHasItsReason) {
  Events events;
  TestServer server(Logging(events));
  v1::GenerateRequest request = MakeRequest("several", 1, 5, 30);
  request.mutable_sampling()->set_num_candidates(3);
  v1::GenerateResponse response;
  for (int32_t id = 0; id < TestServer::kVocab; id += 12) {
    request.mutable_stopping()->add_stop_token_ids(id);
  }
  ASSERT_TRUE(Generate(server, request, response).ok());
  const auto reason = [](const v1::Output& output) -> std::string {
    return output.finish_info().reason() == v1::FINISH_REASON_LENGTH ? "length" : "stop";
  };
  const std::string expected =
      Str(reason(response.output()), ",", reason(response.more_candidates(0)), ",",
          reason(response.more_candidates(1)));
  EXPECT_EQ(events.Get(0)["finish_reason"], expected);
}

TEST(RequestLog, AHeadersIdNamesARequestThatHasNone) {
  Events events;
  TestServer server(Logging(events));
  EXPECT_TRUE(Ask(server, MakeRequest("", 1, 5, 3), {{"x-request-id", "from-the-proxy"}}).ok());
  EXPECT_EQ(events.Get(0)["request_id"], "from-the-proxy");
  EXPECT_EQ(events.Get(0)["x_request_id"], "from-the-proxy");
  EXPECT_TRUE(server.EndOf("from-the-proxy"));
  // The request's own comes first, and the header's is there all the same.
  EXPECT_TRUE(Ask(server, MakeRequest("own", 1, 5, 3), {{"x-request-id", "other"}}).ok());
  EXPECT_EQ(events.Get(1)["request_id"], "own");
  EXPECT_EQ(events.Get(1)["x_request_id"], "other");
  // One that is too long is cut, and accepted.
  const std::string longest(1000, 'x');
  EXPECT_TRUE(Ask(server, MakeRequest("", 1, 5, 3), {{"x-request-id", longest}}).ok());
  EXPECT_EQ(events.Get(2)["request_id"], std::string(256, 'x'));
  EXPECT_TRUE(Ask(server, MakeRequest("", 1, 5, 3)).ok());
  EXPECT_FALSE(events.Get(3).contains("request_id"));
  EXPECT_TRUE(events.Get(3).contains("request"));
}

TEST(RequestLog, OnlyPrintableAsciiOfAHeadersId) {
  EXPECT_EQ(PrintableId("a\n\x1b[b\xc3\xa4~ \x7f"), "a??[b??~ ?");
  EXPECT_EQ(PrintableId(std::string(257, 'a')).size(), kMaxHeaderIdBytes);
}

TEST(RequestLog, TheClientsEndAndTheDeadlineAreReasons) {
  Events events;
  TestServer server(Logging(events));
  server.gate().Allow(3);
  {
    grpc::ClientContext context;
    const auto reader = server.stub().GenerateStream(&context, MakeRequest("left", 1, 10, 900));
    v1::GenerateResponse message;
    ASSERT_TRUE(reader->Read(&message));
    context.TryCancel();
    while (reader->Read(&message)) {
    }
    reader->Finish();
    // Some iterations are needed for the end, and all of them would outrun the news of it.
    for (int i = 0; i < 500 && events.size() == 0; ++i) {
      server.gate().Allow(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    server.gate().Open();
  }
  const json left = events.Get(0);
  EXPECT_EQ(left["status"], "CANCELLED");
  EXPECT_EQ(left["finish_reason"], "cancelled");
  EXPECT_EQ(left["severity"], "info");
  EXPECT_EQ(left["generated_tokens"], server.EndOf("left")->output_tokens);
  server.gate().Close();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::GenerateResponse response;
  server.stub().Generate(&context, MakeRequest("late", 1, 10, 900), &response);
  server.gate().Open();
  const json late = events.Get(1);
  EXPECT_EQ(late["status"], "DEADLINE_EXCEEDED");
  EXPECT_EQ(late["finish_reason"], "deadline");
}

TEST(RequestLog, AKeyIsAName) {
  WriteText(TestPath("keys"), Str(kAlice, " alice\n", kPoor, " poor 1\n"));
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(TestPath("keys"), {}));
  Events events;
  TestServer server(Logging(events, keys.get()));
  const auto ask = [&](const std::string& authorization) {
    return Ask(server, MakeRequest("a", 1, 5, 3), {{"authorization", authorization}});
  };
  EXPECT_TRUE(ask(Str("Bearer ", kAlice)).ok());
  EXPECT_EQ(events.Get(0)["api_key"], "alice");
  EXPECT_TRUE(ask(Str("Bearer ", kPoor)).ok());
  EXPECT_EQ(ask(Str("Bearer ", kPoor)).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(events.Get(2)["event"], "request_refused");
  EXPECT_EQ(events.Get(2)["status"], "RESOURCE_EXHAUSTED");
  EXPECT_EQ(events.Get(2)["api_key"], "poor");
  EXPECT_THAT(std::string(events.Get(2)["error"]), HasSubstr("1 requests per minute"));
  EXPECT_EQ(ask("Bearer unknown-0123456789abcdef").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(events.Get(3)["status"], "UNAUTHENTICATED");
  EXPECT_FALSE(events.Get(3).contains("api_key"));
  EXPECT_THAT(events.All(), Not(HasSubstr("0123456789abcdef")));
}

// Texts wherever a client can write them, in requests that are served and in all kinds of refusal.
TEST(RequestLog, NoTextOfAClientIsLogged) {
  Events events;
  TestServer server(Logging(events));
  std::vector<v1::GenerateRequest> requests;
  const auto add = [&]() -> v1::GenerateRequest& {
    v1::GenerateRequest& request = requests.emplace_back();
    request.set_request_id(Str("r", requests.size()));
    request.set_text(kMarker);
    request.mutable_stopping()->add_stop_strings(kMarker);
    request.mutable_stopping()->set_max_new_tokens(3);
    return request;
  };
  const auto add_chat = [&](const std::string& role) {
    v1::ChatMessage* message = add().mutable_chat()->add_messages();
    message->set_role(role);
    message->set_content(kMarker);
  };
  add();
  add().mutable_sampling()->set_top_p(7);
  add().mutable_stopping()->set_max_new_tokens(1'000'000);
  add().mutable_stopping()->add_stop_strings(std::string(1000, 'x') + kMarker);
  for (int i = 0; i < 20; ++i) requests.back().mutable_stopping()->add_stop_strings(kMarker);
  add_chat(kMarker);
  add_chat("user");
  add().clear_prompt();
  for (const v1::GenerateRequest& request : requests) Ask(server, request);
  std::string reply;
  RawCall(server, "/treadle.v1.Inference/Generate", Str("\x0a\xff", kMarker), reply);
  ASSERT_TRUE(events.Get(requests.size()).is_object());
  for (size_t i = 0; i < requests.size(); ++i) {
    const json logged = events.Get(i);
    EXPECT_EQ(logged["request_id"], Str("r", i + 1));
    EXPECT_EQ(logged["event"], i == 0 ? "request_finished" : "request_refused") << logged;
    if (i > 0) {
      EXPECT_EQ(logged["status"], "INVALID_ARGUMENT");
    }
  }
  EXPECT_THAT(std::string(events.Get(1)["error"]), HasSubstr("sampling.top_p is 7"));
  EXPECT_THAT(events.All(), Not(HasSubstr(kMarker)));
}

TEST(RequestLog, WhatIsOurFaultIsAWarning) {
  Events events;
  const RequestLog log(events.sink(), "m");
  log.Refused({}, absl::UnavailableError("the server is draining"));
  log.Refused({}, absl::InvalidArgumentError("chat.messages[3].role is 'x', expected system"));
  log.Finished({}, {.number = 1, .status = absl::InternalError("the engine failed")});
  EXPECT_EQ(events.Get(0)["severity"], "warning");
  EXPECT_EQ(events.Get(1)["severity"], "info");
  EXPECT_EQ(events.Get(1)["error"], "chat.messages[3].role was refused");
  EXPECT_EQ(events.Get(2)["severity"], "warning");
  EXPECT_EQ(events.Get(2)["finish_reason"], "error");
  RequestLog({}, "m").Refused({}, absl::InternalError("nobody hears it"));
}

TEST(RequestLog, DroppedLinesAreAMetric) {
  TestServer server;
  ASSERT_OK_AND_ASSIGN(const auto log, Log::Open({.file = "/dev/full", .standard = -1}));
  Metrics metrics("m", server.stack().pool());
  metrics.AddCounter("treadle:log_lines_dropped_total", "",
                     [&log] { return static_cast<double>(log->dropped()); });
  const auto says = [&](int lines) {
    return HasSubstr(Str("treadle:log_lines_dropped_total{model_name=\"m\"} ", lines, "\n"));
  };
  EXPECT_THAT(metrics.Scrape(), says(0));
  for (const int lines : {3, 4, 4}) {
    while (log->dropped() < static_cast<uint64_t>(lines)) {
      log->Write({.message = "lost"});
      ASSERT_TRUE(log->Flush(kPatience));
    }
    EXPECT_THAT(metrics.Scrape(), says(lines));
  }
  EXPECT_THAT(server.metrics().Scrape(), Not(HasSubstr("log_lines_dropped")));
}

// Its name in the ledger does not depend on the log.
TEST(RequestLog, WithoutALogTheHeadersIdIsStillInTheLedger) {
  TestServer server;
  EXPECT_TRUE(Ask(server, MakeRequest("", 1, 5, 3), {{"x-request-id", "h"}}).ok());
  EXPECT_TRUE(server.EndOf("h"));
}

}  // namespace
}  // namespace treadle
