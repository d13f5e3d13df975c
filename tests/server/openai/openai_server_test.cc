// OpenAI's API over real sockets, beside gRPC's: the same answers, the same limits.
#include "server/openai/openai_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "absl/strings/escaping.h"
#include "base/status.h"
#include "server/access/tls_files.h"
#include "server/grpc/messages.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/http_exchange.h"
#include "tests/server/http/tls_client.h"
#include "tests/server/test_server.h"
#include "tests/server/without_xgrammar.h"
#include "tests/support/assert_ok.h"
#include "tests/support/prefix_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const char kCompletions[] = "/v1/completions";
const char kChat[] = "/v1/chat/completions";
const char kTemplate[] = "{% for m in messages %}{{ m.content }}{% endfor %}";

using Answer = HttpExchange;

std::string PostText(const std::string& path, const std::string& body,
                     const std::string& headers = "") {
  return HttpRequestText("POST " + path, body, headers);
}
Answer Post(const TestServer& server, const std::string& path, const std::string& body,
            const std::string& headers = "") {
  return Exchange(server.http_port(), "POST " + path, body, headers);
}
Answer Get(const TestServer& server, const std::string& path) {
  return Exchange(server.http_port(), "GET " + path);
}

// Events of a stream; one that is no JSON ("[DONE]") is a string.
std::vector<Json> EventsIn(const std::string& stream) {
  std::vector<Json> events;
  const std::string before = "data: ";
  for (size_t at = 0; (at = stream.find(before, at)) != std::string::npos;) {
    at += before.size();
    const std::string data = stream.substr(at, stream.find("\n\n", at) - at);
    Json event = Json::parse(data, nullptr, /*allow_exceptions=*/false);
    events.push_back(event.is_discarded() ? Json(data) : event);
  }
  return events;
}
std::vector<Json> Stream(const TestServer& server, const std::string& path,
                         const std::string& body) {
  return EventsIn(Post(server, path, body).text);
}

std::vector<int32_t> Ids(const Json& array) { return array.get<std::vector<int32_t>>(); }
std::vector<int32_t> Ids(const v1::Output& output) {
  return {output.token_ids().begin(), output.token_ids().end()};
}

TEST(OpenAiServer, SaysWhatItServes) {
  TestServer server;
  const Json models = Get(server, "/v1/models").body;
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "prefix");
  EXPECT_EQ(models["data"][0]["max_model_len"], 1024);
  EXPECT_EQ(models["data"][0]["vocab_size"], TestServer::kVocab);
  EXPECT_EQ(models["data"][0]["sampling_defaults"], nullptr);
  EXPECT_EQ(Get(server, "/v1/models/prefix").body, models["data"][0]);
  EXPECT_EQ(Get(server, "/version").body["version"], TREADLE_VERSION);
  EXPECT_EQ(Get(server, "/health").code, 200);
  EXPECT_TRUE(server.WaitHealth("ready", true));
  EXPECT_EQ(Get(server, "/ready").code, 200);
  const Answer none = Get(server, "/v1/none");
  EXPECT_EQ(none.code, 404);
  EXPECT_EQ(none.body["error"]["message"], "there is no /v1/none");
  const Answer wrong = Get(server, kChat);
  EXPECT_EQ(wrong.code, 405);
  EXPECT_THAT(wrong.head, HasSubstr("Allow: POST\r\n"));
  server.server().DrainAndStop(milliseconds(0));
  EXPECT_EQ(Get(server, "/ready").code, 503);
}

TEST(OpenAiServer, AModelMayHaveSeveralNames) {
  TestServer server({.names = {"org/first", "second"}});
  const Json models = Get(server, "/v1/models").body["data"];
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0]["id"], "org/first");
  EXPECT_EQ(models[1]["id"], "second");
  for (const char* path : {"org/first", "org%2Ffirst", "second"}) {
    EXPECT_EQ(Get(server, Str("/v1/models/", path)).code, 200) << path;
  }
  for (const char* name : {"org/first", "second"}) {
    const Answer answer =
        Post(server, "/v1/completions",
             Str(R"({"model": ")", name, R"(", "prompt": [1], "max_tokens": 1})"));
    EXPECT_EQ(answer.code, 200) << answer.body;
    EXPECT_EQ(answer.body["model"], "org/first");
  }
  const Answer other = Post(server, "/v1/completions", R"({"model": "prefix", "prompt": [1]})");
  EXPECT_EQ(other.code, 404);
  EXPECT_THAT(other.body["error"]["message"].get<std::string>(),
              HasSubstr(R"("prefix" does not exist, expected "org/first" or "second")"));
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.name(), "org/first");
  EXPECT_THAT(info.names(), testing::ElementsAre("org/first", "second"));
}

// The same answer to a request that leaves out what the model recommends and to one that says it,
// over each front end.
TEST(OpenAiServer, RequestsThatSayNothingSampleAsTheModelRecommends) {
  TestServer server({.sampling_defaults = SamplingParameters{.temperature = 0.5f, .top_k = 3}});
  const Json shown = {{"temperature", 0.5}, {"top_k", 3}};
  EXPECT_EQ(Get(server, "/v1/models").body["data"][0]["sampling_defaults"], shown);
  grpc::ClientContext context;
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(server.stub().GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.sampling_defaults().temperature(), 0.5f);
  EXPECT_EQ(info.sampling_defaults().top_k(), 3);
  EXPECT_FALSE(info.sampling_defaults().has_top_p());

  v1::GenerateRequest request = MakeRequest("r", 1, 10, 20);
  request.mutable_sampling()->Clear();
  request.mutable_sampling()->set_seed(7);
  const auto grpc_answer = [&] {
    v1::GenerateResponse response;
    EXPECT_TRUE(Generate(server, request, response).ok());
    return Ids(response.output());
  };
  const std::vector<int32_t> ids(request.token_ids().ids().begin(),
                                 request.token_ids().ids().end());
  const auto http_answer = [&](const Json& more) {
    Json body = {{"prompt", ids},
                 {"max_tokens", 20},
                 {"seed", 7},
                 {"return_token_ids", true},
                 {"ignore_eos", true}};
    body.update(more);
    return Ids(Post(server, kCompletions, body.dump()).body["choices"][0]["token_ids"]);
  };
  const std::vector<int32_t> absent = grpc_answer();
  EXPECT_EQ(http_answer(Json::object()), absent);
  EXPECT_EQ(http_answer(shown), absent);
  EXPECT_NE(http_answer({{"temperature", 1}, {"top_k", 0}}), absent);
  request.mutable_sampling()->set_temperature(0);
  const std::vector<int32_t> greedy = grpc_answer();
  EXPECT_EQ(http_answer({{"temperature", 0}, {"top_k", 0}}), greedy);
  EXPECT_NE(greedy, absent);
}

// One page of 16 of a prompt of 20: for who asks with the same key and salt.
TEST(OpenAiServer, CachedPromptsAreOfOneKeyAndOneSalt) {
  const std::string path = TestPath("salted-keys");
  WriteText(path, "key-1-0123456789abc ann\nkey-2-0123456789abc bob\nkey-3-0123456789abc ann\n");
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(path, {}));
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys.get(); };
  TestServer server(options);
  const auto header = [](const std::string& key) {
    return "Authorization: Bearer " + key + "-0123456789abc\r\n";
  };
  Json body = {{"prompt", std::vector<int>(20, 7)}, {"max_tokens", 1}};
  const auto cached = [&](const std::string& key, const std::string& salt) {
    body["cache_salt"] = salt;
    const Answer answer = Post(server, kCompletions, body.dump(), header(key));
    EXPECT_EQ(answer.code, 200) << answer.body;
    return answer.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached("key-1", ""), 0);
  EXPECT_EQ(cached("key-1", ""), 16);
  EXPECT_EQ(cached("key-2", ""), 0) << "another owner's";
  EXPECT_EQ(cached("key-3", ""), 16) << "another key of the first owner";
  EXPECT_EQ(cached("key-1", "salt"), 0);
  EXPECT_EQ(cached("key-1", "salt"), 16);
  EXPECT_EQ(cached("key-2", std::string("\0name ann\0", 10)), 0);
  body["cache_salt"] = std::string(257, 'x');
  const Answer refused = Post(server, kCompletions, body.dump(), header("key-1"));
  EXPECT_EQ(refused.code, 400);
  EXPECT_EQ(refused.body["error"]["message"], "cache_salt has 257 bytes, expected at most 256");
}

TEST(OpenAiServer, AnswersAreThoseOfGrpc) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 3, 20, 12);
  request.mutable_sampling()->set_num_candidates(3);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_top_k(20);
  request.mutable_response()->set_logprobs(2);
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  Json body = {{"prompt", request.token_ids().ids()},
               {"seed", 3},
               {"n", 3},
               {"temperature", 1.5},
               {"top_k", 20},
               {"logprobs", 2},
               {"max_tokens", 12},
               {"ignore_eos", true},
               {"return_token_ids", true}};
  const auto check = [&](const Json& choices) {
    ASSERT_EQ(choices.size(), 3u);
    for (uint32_t c = 0; c < 3; ++c) {
      const v1::Output& output = CandidateIn(c, expected);
      EXPECT_EQ(choices[c]["index"], c);
      EXPECT_EQ(Ids(choices[c]["token_ids"]), Ids(output));
      EXPECT_EQ(choices[c]["text"], output.text());
      EXPECT_EQ(choices[c]["finish_reason"], "length");
      const Json& logprobs = choices[c]["logprobs"]["token_logprobs"];
      ASSERT_EQ(logprobs.size(), 12u);
      for (int i = 0; i < 12; ++i) {
        EXPECT_EQ(logprobs[static_cast<size_t>(i)].get<float>(), output.logprobs(i).logprob());
      }
    }
  };
  const Answer whole = Post(server, kCompletions, body.dump());
  ASSERT_EQ(whole.code, 200) << whole.body;
  check(whole.body["choices"]);
  EXPECT_EQ(whole.body["system_fingerprint"], "fp_0123456789");
  EXPECT_EQ(whole.body["usage"], Json({{"prompt_tokens", 20},
                                       {"completion_tokens", 36},
                                       {"total_tokens", 56},
                                       {"prompt_tokens_details", {{"cached_tokens", 16}}}}))
      << "a page of them, which gRPC's request left";

  // In pieces, put together.
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const std::vector<Json> events = Stream(server, kCompletions, body.dump());
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_EQ(events[events.size() - 2]["usage"], whole.body["usage"]);
  Json choices = Json::array();
  for (const Json& event : events) {
    if (!event.is_object() || event["choices"].empty()) continue;
    const Json& piece = event["choices"][0];
    Json& choice = choices[piece["index"].get<size_t>()];
    if (choice.is_null()) {
      choice = {{"index", piece["index"]}, {"text", ""}, {"token_ids", Json::array()}};
      choice["logprobs"]["token_logprobs"] = Json::array();
    }
    choice["text"] = choice["text"].get<std::string>() + piece["text"].get<std::string>();
    for (const Json& id : piece["token_ids"]) choice["token_ids"].push_back(id);
    if (!piece["logprobs"].is_null()) {
      for (const Json& value : piece["logprobs"]["token_logprobs"]) {
        choice["logprobs"]["token_logprobs"].push_back(value);
      }
    }
    choice["finish_reason"] = piece["finish_reason"];
  }
  check(choices);
}

// Whatever the seed, at a temperature that makes a draw of it, and with others in the batch.
TEST(OpenAiServer, AnswersLookAsTheyMust) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 1, 5, 12);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_num_candidates(4);
  request.mutable_stopping()->set_ignore_eos(false);
  request.mutable_constraint()->set_regex("(ab|b{2}){1,3}c?");
  Json body = {{"prompt", request.token_ids().ids()},
               {"temperature", 1.5},
               {"n", 4},
               {"max_tokens", 12},
               {"structured_outputs", {{"regex", "(ab|b{2}){1,3}c?"}}}};
  std::set<std::string> texts;
  for (uint64_t seed = 1; seed < 20; ++seed) {
    request.mutable_sampling()->set_seed(seed);
    body["seed"] = seed;
    v1::GenerateResponse expected;
    const grpc::Status status = Generate(server, request, expected);
    if (IsWithoutXGrammar(status.error_message())) GTEST_SKIP() << kWithoutXGrammar;
    ASSERT_TRUE(status.ok()) << status.error_message();
    const Answer answer = Post(server, kCompletions, body.dump());
    ASSERT_EQ(answer.code, 200) << answer.body;
    for (uint32_t c = 0; c < 4; ++c) {
      const v1::Output& output = CandidateIn(c, expected);
      EXPECT_EQ(output.finish_info().reason(), v1::FINISH_REASON_STOP);
      EXPECT_TRUE(std::regex_match(output.text(), std::regex("(ab|bb){1,3}c?"))) << output.text();
      EXPECT_EQ(answer.body["choices"][c]["text"], output.text());
      texts.insert(output.text());
    }
  }
  EXPECT_GT(texts.size(), 5u);
}

TEST(OpenAiServer, AChatStreamsItsRoleItsTextAndItsEnd) {
  TestServer server({.chat_template = kTemplate});
  v1::GenerateRequest request = MakeRequest("a", 5, 1, 9);
  *request.mutable_chat()->add_messages()->mutable_content() = "hello";
  request.mutable_chat()->mutable_messages(0)->set_role("user");
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  const std::string body =
      R"({"model": "prefix", "messages": [{"role": "user", "content": "hello"}],
      "seed": 5, "max_completion_tokens": 9, "ignore_eos": true, "stream": )";
  const std::vector<Json> events = Stream(server, kChat, body + "true}");
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events[0]["choices"][0]["delta"], Json({{"role", "assistant"}, {"content", ""}}));
  std::string text;
  for (size_t i = 1; i + 2 < events.size(); ++i) {
    text += events[i]["choices"][0]["delta"]["content"].get<std::string>();
  }
  EXPECT_EQ(text, expected.output().text());
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(events.back(), "[DONE]");
  const Answer whole = Post(server, kChat, body + "false}");
  EXPECT_EQ(whole.body["choices"][0]["message"]["content"], expected.output().text());
}

TEST(OpenAiServer, SeveralPromptsAreOneAnswer) {
  TestServer server;
  const auto body = [](const char* prompt, const char* more) {
    return Str(R"({"temperature": 0, "max_tokens": 4, "ignore_eos": true, "prompt": )", prompt,
               more, "}");
  };
  const Json both = Post(server, kCompletions, body(R"(["abc", "xyz"])", "")).body;
  ASSERT_EQ(both["choices"].size(), 2u) << both;
  for (int i = 0; i < 2; ++i) {
    const Json one = Post(server, kCompletions, body(i == 0 ? R"("abc")" : R"("xyz")", "")).body;
    EXPECT_EQ(both["choices"][i]["text"], one["choices"][0]["text"]);
  }
  EXPECT_EQ(both["usage"]["prompt_tokens"], 6);
  EXPECT_EQ(both["usage"]["completion_tokens"], 8);
  const std::vector<Json> events =
      Stream(server, kCompletions, body(R"(["abc", "xyz"])", R"(, "stream": true)"));
  std::string texts[2];
  for (const Json& event : events) {
    if (!event.is_object()) continue;
    const Json& choice = event["choices"][0];
    texts[choice["index"].get<int>()] += choice["text"].get<std::string>();
  }
  EXPECT_EQ(both["choices"][0]["text"], texts[0]);
  EXPECT_EQ(both["choices"][1]["text"], texts[1]);
  // One that is wrong is the call's error, and holds nothing.
  const Answer bad = Post(server, kCompletions, body(R"(["abc", "x1"])", ""));
  EXPECT_EQ(bad.code, 400);
  EXPECT_EQ(bad.body["error"]["message"], "prompt: '1' is no letter, expected a to z");
  EXPECT_TRUE(
      server.WaitLoad([](const auto& load) { return load.running() == 0 && load.waiting() == 0; }));
}

TEST(OpenAiServer, AScoredPromptHasItsLogProbabilities) {
  TestServer server;
  v1::GenerateRequest request = MakeRequest("a", 3, 10, 1);
  request.mutable_response()->set_prompt_logprobs(1);
  v1::GenerateResponse expected;
  ASSERT_TRUE(Generate(server, request, expected).ok());
  for (const int most : {0, 1}) {
    const Json body = {{"prompt", {request.token_ids().ids()}},
                       {"temperature", 0},
                       {"max_tokens", most},
                       {"logprobs", 1},
                       {"echo", true}};
    const Json logprobs = Post(server, kCompletions, body.dump()).body["choices"][0]["logprobs"];
    ASSERT_EQ(logprobs["token_logprobs"].size(), static_cast<size_t>(10 + most)) << logprobs;
    EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
    for (size_t i = 0; i < 9; ++i) {
      EXPECT_EQ(logprobs["token_logprobs"][i + 1].get<float>(),
                expected.prompt_info().prompt_logprobs(static_cast<int>(i)).logprob());
    }
  }
}

TEST(OpenAiServer, AClientThatGoesAwayFreesItsPlace) {
  TestServer server({.gate_closed = true});
  const std::string body = R"({"prompt": "abc", "max_tokens": 900, "ignore_eos": true, "n": 2)";
  for (const char* stream : {R"(, "stream": true})", "}"}) {
    const std::string id = Str("gone", stream[0]);
    auto client = std::make_unique<HttpClient>(server.http_port());
    client->Send(PostText(kCompletions, body + stream, "X-Request-Id: " + id + "\r\n"));
    server.gate().Allow(4);
    if (*stream == ',') {
      EXPECT_THAT(client->ReadUntil("\n\n"), HasSubstr("X-Request-Id: " + id));
    }
    EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
    client.reset();
    std::this_thread::sleep_for(milliseconds(200));
    server.gate().Allow(2);
    EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 0; }));
  }
  server.gate().Open();
}

TEST(OpenAiServer, WhoDoesNotReadIsCancelled) {
  TestServer server({.stall_timeout = milliseconds(200), .gate_closed = true});
  HttpClient client(server.http_port(), /*receive_buffer=*/4096);
  client.Send(PostText(kCompletions,
                       R"({"prompt": "abc", "max_tokens": 1000, "ignore_eos": true, "n": 4,
                           "logprobs": 20, "stream": true})",
                       "X-Request-Id: slow\r\n"));
  server.gate().Allow(600);  // more than buffers hold, and not the end
  EXPECT_EQ(client.ReadUntil("\r\n"), "HTTP/1.1 200 OK\r\n");
  std::this_thread::sleep_for(milliseconds(500));
  server.gate().Open();
  const std::optional<LedgerEnd> end = server.EndOf("slow");
  ASSERT_TRUE(end);
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_LT(end->output_tokens, 4000);
  EXPECT_EQ(client.ReadAll().find("[DONE]"), std::string::npos);
}

TEST(OpenAiServer, PipelinedCallsAreAnsweredInTurn) {
  TestServer server;
  HttpClient client(server.http_port());
  const auto call = [](int tokens) {
    return PostText(kCompletions,
                    Str(R"({"prompt": "abc", "ignore_eos": true, "max_tokens": )", tokens, "}"));
  };
  client.Send(call(40) + call(1) + call(2));
  for (const int tokens : {40, 1, 2}) {
    EXPECT_EQ(ReadExchange(client.ReadAnswer()).body["usage"]["completion_tokens"], tokens);
  }
}

TEST(OpenAiServer, ErrorsHaveTheirStatus) {
  TestServerOptions options;
  options.gate_closed = true;
  options.scheduling.max_queue = 1;
  options.http.body_bytes = 4096;
  TestServer server(options);
  const std::string good = R"({"prompt": "abc", "max_tokens": 400, "ignore_eos": true})";
  const auto message = [](const Answer& answer) {
    return answer.body["error"]["message"].get<std::string>();
  };
  const Answer broken = Post(server, kCompletions, "{\"prompt\": }");
  EXPECT_EQ(broken.code, 400);
  EXPECT_EQ(message(broken), "the body: is not valid JSON at byte 12");
  EXPECT_THAT(broken.head, HasSubstr("X-Request-Id: cmpl-"));
  EXPECT_EQ(Post(server, kCompletions, R"({"prompt": "a", "model": "gpt"})").code, 404);
  EXPECT_EQ(Post(server, kCompletions, std::string(5000, ' ')).code, 413);
  const Answer odd = Post(server, kCompletions, good, "X-Request-Timeout: -1\r\n");
  EXPECT_EQ(odd.code, 400);
  EXPECT_THAT(message(odd), StartsWith("the header X-Request-Timeout is '-1', expected seconds"));
  EXPECT_EQ(Post(server, kCompletions, good, "X-Request-Timeout: 0.05\r\n").code, 504);

  HttpClient held(server.http_port());  // its place in the queue, or a batch of its own
  held.Send(PostText(kCompletions, good));
  EXPECT_TRUE(
      server.WaitLoad([](const auto& load) { return load.running() + load.waiting() > 0; }));
  std::vector<std::unique_ptr<HttpClient>> more;
  Answer full;
  for (int i = 0; i < 20 && full.code != 429; ++i) {
    more.push_back(std::make_unique<HttpClient>(server.http_port()));
    more.back()->Send(PostText(kCompletions, good));
    full = Post(server, kCompletions, good, "X-Request-Timeout: 0.2\r\n");
  }
  EXPECT_EQ(full.code, 429) << full.body;
  EXPECT_THAT(full.head, HasSubstr("Retry-After: 1\r\n"));
  EXPECT_EQ(full.body["error"]["code"], "rate_limit_exceeded");
  server.gate().Open();
  EXPECT_EQ(ReadExchange(held.ReadAnswer()).code, 200);
  more.clear();
  server.server().DrainAndStop(milliseconds(0));
  const Answer draining = Post(server, kCompletions, good);
  EXPECT_EQ(draining.code, 503) << draining.body;
  EXPECT_THAT(draining.head, HasSubstr("Retry-After: 1\r\n"));
}

TEST(OpenAiServer, AnErrorAfterTheBeginningEndsTheStream) {
  TestServer server({.gate_closed = true});
  HttpClient client(server.http_port());
  client.Send(PostText(kCompletions, R"({"prompt": "abc", "max_tokens": 900, "ignore_eos": true,
                                         "stream": true})"));
  server.gate().Allow(3);
  EXPECT_THAT(client.ReadUntil("\n\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  server.gate().Open();
  server.server().DrainAndStop(milliseconds(0));
  const std::vector<Json> events = EventsIn(client.ReadUntil("0\r\n\r\n"));
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back()["error"]["message"], "the server is shutting down");
  EXPECT_EQ(events.back()["error"]["type"], "server_error");
}

TEST(OpenAiServer, TokensOfATextAndBack) {
  TestServer server;
  const Answer ids = Post(server, "/tokenize", R"({"model": "prefix", "prompt": "abz"})");
  EXPECT_EQ(ids.body, Json({{"count", 3}, {"max_model_len", 1024}, {"tokens", {0, 1, 25}}}));
  EXPECT_EQ(Post(server, "/detokenize", R"({"tokens": [0, 1, 25]})").body["prompt"], "abz");
  EXPECT_EQ(Post(server, "/tokenize", R"({"messages": []})").body["error"]["message"],
            "messages: this model has no usable chat template, expected text or token_ids");
  EXPECT_EQ(Post(server, "/detokenize", R"({"tokens": [50]})").body["error"]["message"],
            "tokens[0] is 50, expected 0 to 49");
  EXPECT_EQ(Post(server, "/detokenize", "{}").code, 400);
}

// By the names that lm-eval's client reads (RemoteTokenizer in lm_eval/utils.py).
TEST(OpenAiServer, TellsWhatATokenizerNeedsBesideItsTokens) {
  const TestServer server({.chat_template = kTemplate});
  EXPECT_EQ(Get(server, "/tokenizer_info").body, Json({{"chat_template", kTemplate},
                                                       {"bos_token", nullptr},
                                                       {"eos_token", "xx"},
                                                       {"pad_token", nullptr},
                                                       {"unk_token", nullptr}}));
}

TEST(OpenAiServer, KeysAndTlsAreThoseOfGrpc) {
  const std::string path = TestPath("keys");
  WriteText(path, "key-0123456789abcdef alice 3\n");
  const auto keys = ApiKeys::Open(path, {});
  const TestCa ca;
  const TlsFiles files{
      .certificate = TestPath("crt"), .key = TestPath("key"), .ca = TestPath("ca")};
  const PemPair pair = ca.Sign();
  WriteText(files.certificate, pair.certificate);
  WriteText(files.key, pair.key);
  WriteText(files.ca, ca.pem());
  const auto tls = OpenSocketTls(files, "http/1.1", {});
  ASSERT_TRUE(keys.ok() && tls.ok());
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys->get(); };
  options.http.tls = tls->get();
  TestServer server(options);
  const auto ask = [&](const std::string& text, const PemPair& own) {
    TlsClient client(server.http_port(), {.ca = ca.pem(), .own = own});
    if (!client.Handshake()) return Answer();
    client.Send(text);
    return ReadExchange(client.ReadAll());
  };
  const std::string key = kClose + "Authorization: Bearer key-0123456789abcdef\r\n";
  const std::string body = R"({"prompt": "abc", "max_tokens": 2})";
  EXPECT_EQ(ask(PostText(kCompletions, body, key), ca.Sign()).code, 200);
  EXPECT_EQ(ask(PostText(kCompletions, body, key), {}).code, 0);
  const Answer stranger = ask(PostText(kCompletions, body, kClose), ca.Sign());
  EXPECT_EQ(stranger.code, 401);
  EXPECT_THAT(stranger.head, HasSubstr("WWW-Authenticate: Bearer\r\n"));
  EXPECT_EQ(stranger.body["error"]["code"], "invalid_api_key");
  EXPECT_EQ(stranger.body["error"]["message"],
            "no API key: expected the header 'authorization: Bearer KEY'");
  EXPECT_EQ(ask(HttpRequestText("GET /v1/models", "", kClose), ca.Sign()).code, 401);
  EXPECT_EQ(ask(HttpRequestText("GET /health", "", kClose), ca.Sign()).code, 200);
  EXPECT_EQ(ask(PostText("/tokenize", R"({"prompt": "a"})", kClose), ca.Sign()).code, 401);
  EXPECT_EQ(ask(PostText("/tokenize", R"({"prompt": "a"})", key), ca.Sign()).code, 200);
  // Two of three prompts are too many for the key.
  const Answer many = ask(PostText(kCompletions, R"({"prompt": ["a", "b", "c"]})", key), ca.Sign());
  EXPECT_EQ(many.code, 429);
  EXPECT_THAT(many.body["error"]["message"].get<std::string>(), HasSubstr("'alice' has used up"));
}

}  // namespace
}  // namespace treadle
