// A server that stores its requests is stopped in the middle of answers, and started again: clients
// get the rest over gRPC and HTTP, and what they have together is what an undisturbed server gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <regex>
#include <thread>

#include "base/status.h"
#include "server/durable/request_store.h"
#include "server/grpc/messages.h"
#include "tests/server/http/http_client.h"
#include "tests/server/test_server.h"
#include "tests/server/without_xgrammar.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int kTokens = 24;

class DurableServer {
 public:
  explicit DurableServer(const std::string& folder, const std::string& keys_file = "") {
    auto journal = RequestJournal::Open(folder, {}).value();
    auto store = RequestStore::Open(std::move(journal), {.fingerprint = "fp_1"}).value();
    store_ = std::move(store);
    if (!keys_file.empty()) keys_ = *ApiKeys::Open(keys_file, [](const LogEvent&) {});
    TestServerOptions options;
    options.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    options.scheduling.max_batch_tokens = 9;
    options.adjust = [this](ServiceOptions& service) {
      service.store = store_.get();
      service.keys = keys_.get();
    };
    server_ = std::make_unique<TestServer>(options);
  }
  TestServer* operator->() { return server_.get(); }
  TestServer& operator*() { return *server_; }

  // Runs iterations slowly until that is done, so that no answer comes to its own end first.
  template <typename T>
  T SlowlyUntil(std::future<T> done) {
    do {
      server_->gate().Allow(1);
    } while (done.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready);
    server_->gate().Open();
    return done.get();
  }
  // Ends what runs.
  void Stop() {
    SlowlyUntil(std::async(std::launch::async, [&] {
      return server_->server().DrainAndStop(std::chrono::milliseconds(0));
    }));
  }
  // Stops the server after so many iterations of what `ask` asks it; what that heard.
  template <typename Ask>
  auto CutOffAfter(int iterations, const Ask& ask) {
    server_->gate().Allow(iterations);
    std::thread stop([&] {
      server_->WaitLoad([](const v1::GetLoadResponse& load) { return load.running() > 0; });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      Stop();
    });
    auto heard = ask(*this);
    stop.join();
    return heard;
  }
  StreamOutcome Resume(const std::string& id, int from, const std::string& key = "") {
    v1::ResumeRequest request;
    request.set_request_id(id);
    request.set_from_token(from);
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    const auto reader = server_->stub().Resume(&context, request);
    return ReadAll(*reader);
  }
  // All that comes of a stream over HTTP/1.0, without its head; `first` gets that.
  std::string Http(const std::string& method_and_path, const std::string& headers,
                   const std::string& body, std::string* head = nullptr) {
    HttpClient client(server_->http_port());
    client.Send(Str(method_and_path, " HTTP/1.0\r\n", headers, "Content-Length: ", body.size(),
                    "\r\n\r\n", body));
    const std::string begin = client.ReadUntil("\r\n\r\n");
    if (head != nullptr) *head = begin;
    return client.ReadAll();
  }

 private:
  std::unique_ptr<RequestStore> store_;
  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<TestServer> server_;
};

class ResumeTest : public testing::Test {
 protected:
  std::string Folder(const std::string& name) const { return root_ / name; }

  const TestFolder root_;
};

int TokensOf(const v1::GenerateResponse& answer) {
  int tokens = answer.output().token_ids_size();
  for (const v1::Output& more : answer.more_candidates()) tokens += more.token_ids_size();
  return tokens;
}

// All but times and the number that Generate gives the first candidate.
std::string Said(v1::GenerateResponse answer) {
  answer.clear_timing();
  // Counts of cached and guessed tokens are those of the server that is asked.
  if (answer.has_usage()) {
    v1::Usage& usage = *answer.mutable_usage();
    usage.clear_cached_tokens();
    usage.clear_draft_tokens();
    usage.clear_accepted_draft_tokens();
  }
  return answer.DebugString();
}

// Requests of every kind.
std::vector<v1::GenerateRequest> Kinds() {
  std::vector<v1::GenerateRequest> kinds;
  const auto add = [&]() -> v1::GenerateRequest& {
    const auto kind = static_cast<int32_t>(kinds.size());
    kinds.push_back(MakeRequest("kind", 3 + kind, 1 + 13 * kind % 40, kTokens));
    return kinds.back();
  };
  add().mutable_sampling()->set_temperature(0);
  add().mutable_response()->set_logprobs(3);
  add().mutable_sampling()->set_num_candidates(3);
  {
    v1::GenerateRequest& request = add();
    request.mutable_sampling()->set_repetition_penalty(1.5);
    request.mutable_sampling()->set_frequency_penalty(0.5);
    request.mutable_response()->set_prompt_logprobs(2);
    request.mutable_response()->set_logprobs(0);
  }
  {
    v1::GenerateRequest& request = add();
    request.mutable_sampling()->set_num_candidates(4);
    request.mutable_stopping()->set_ignore_eos(false);
    request.mutable_response()->set_prompt_logprobs(0);
    for (const char c : std::string("aeiou")) request.mutable_stopping()->add_stop_strings({c, c});
  }
  add().mutable_stopping()->add_stop_strings("zz");
  add().mutable_sampling()->clear_seed();  // drawn by the server
  return kinds;
}

TEST_F(ResumeTest, AStreamThatWasCutGoesOnWhereItWas) {
  int cut = 0;
  for (size_t kind = 0; kind < Kinds().size(); ++kind) {
    for (const int iterations : {1, 6, 7, 12, 18, 23}) {
      SCOPED_TRACE(Str("kind ", kind, ", after ", iterations, " iterations"));
      v1::GenerateRequest request = Kinds()[kind];
      const std::string folder = Folder(Str(kind, "-", iterations));
      StreamOutcome first = DurableServer(folder).CutOffAfter(
          iterations, [&](DurableServer& server) { return GenerateStream(*server, request); });
      cut += !first.status.ok();
      DurableServer server(folder);
      // The request that comes again has the seed that was drawn.
      if (first.messages > 0) {
        request.mutable_sampling()->set_seed(first.all.prompt_info().seed());
      }
      request.set_request_id("undisturbed");
      StreamOutcome whole = GenerateStream(*server, request);
      ASSERT_TRUE(whole.status.ok()) << whole.status.error_message();
      whole.all.mutable_prompt_info()->set_request_id("kind");

      StreamOutcome rest = server.Resume("kind", TokensOf(first.all));
      ASSERT_TRUE(rest.status.ok()) << rest.status.error_message();
      EXPECT_TRUE(rest.prompt_info_first && rest.usage_last);
      if (kind == 6 && first.messages == 0) continue;  // nobody knows its seed
      v1::GenerateResponse all = first.all;
      Append(rest.all, all);
      for (int i = 0; i < rest.all.more_candidates_size(); ++i) {
        v1::GenerateResponse more;
        *more.mutable_output() = rest.all.more_candidates(i);
        if (!more.output().token_ids().empty() || more.output().has_finish_info()) {
          Append(more, all);
        }
      }
      EXPECT_EQ(Said(all), Said(whole.all));
      // From anywhere, and as often as one likes: it is stored now.
      const StreamOutcome again = server.Resume("kind", 0);
      EXPECT_EQ(Said(again.all), Said(whole.all));
      EXPECT_EQ(TokensOf(server.Resume("kind", 5).all), TokensOf(whole.all) - 5);
    }
  }
  EXPECT_GT(cut, 0);
}

TEST_F(ResumeTest, AConstraintHoldsAcrossTheCut) {
  v1::GenerateRequest request = MakeRequest("kind", 3, 5, 60);
  request.mutable_stopping()->set_ignore_eos(false);
  request.mutable_constraint()->set_regex("(ab|cde|f){8}");
  DurableServer undisturbed(Folder("undisturbed"));
  const StreamOutcome whole = GenerateStream(*undisturbed, request);
  if (IsWithoutXGrammar(whole.status.error_message())) GTEST_SKIP() << kWithoutXGrammar;
  ASSERT_TRUE(whole.status.ok()) << whole.status.error_message();
  for (const int iterations : {2, 5}) {
    const std::string folder = Folder(Str(iterations));
    StreamOutcome first = DurableServer(folder).CutOffAfter(
        iterations, [&](DurableServer& server) { return GenerateStream(*server, request); });
    ASSERT_FALSE(first.status.ok());
    DurableServer server(folder);
    const StreamOutcome rest = server.Resume("kind", TokensOf(first.all));
    ASSERT_TRUE(rest.status.ok()) << rest.status.error_message();
    v1::GenerateResponse all = first.all;
    Append(rest.all, all);
    EXPECT_EQ(Said(all), Said(whole.all));
  }
}

TEST_F(ResumeTest, AClientThatWentAwayComesBack) {
  DurableServer server(Folder("a"));
  const v1::GenerateRequest request = MakeRequest("gone", 3, 5, kTokens);
  int have = 0;
  {
    grpc::ClientContext context;
    server->gate().Allow(6);
    const auto reader = server->stub().GenerateStream(&context, request);
    v1::GenerateResponse message;
    while (have < 4 && reader->Read(&message)) have += message.output().token_ids_size();
    // Whoever has it is told to let go of it.
    v1::ResumeRequest resume;
    resume.set_request_id("gone");
    grpc::ClientContext other;
    const auto resumed = server->stub().Resume(&other, resume);
    const auto read_on = [&] {
      while (reader->Read(&message)) {
      }
      return reader->Finish();
    };
    EXPECT_FALSE(server.SlowlyUntil(std::async(std::launch::async, read_on)).ok());
    const StreamOutcome second = ReadAll(*resumed);
    EXPECT_TRUE(second.status.ok()) << second.status.error_message();
    EXPECT_EQ(TokensOf(second.all), kTokens);
  }
  // Generate's, too: its client has nothing yet.
  v1::GenerateResponse answer;
  v1::GenerateRequest unary = request;
  unary.set_request_id("unary");
  ASSERT_TRUE(Generate(*server, unary, answer).ok());
  EXPECT_EQ(Said(server.Resume("unary", 0).all), Said(answer));
}

TEST_F(ResumeTest, SaysWhatCannotBeResumed) {
  DurableServer server(Folder("a"));
  ASSERT_TRUE(GenerateStream(*server, MakeRequest("a", 3, 5, 4)).status.ok());
  EXPECT_EQ(GenerateStream(*server, MakeRequest("a", 3, 5, 4)).status.error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(server.Resume("b", 0).status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(server.Resume("b", 0).status.error_message(), HasSubstr("(--durable-keep)"));
  EXPECT_THAT(server.Resume("a", 5).status.error_message(),
              HasSubstr("from_token is 5, expected 0 to 4"));
  EXPECT_EQ(server.Resume(std::string(2000, 'x'), 0).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  const std::string body = R"({"prompt": "abc", "max_tokens": 3})";
  EXPECT_THAT(server.Http("POST /v1/completions", "X-Request-Id: a\r\n", body),
              HasSubstr("a request with the id"));
  EXPECT_THAT(server.Http("GET /v1/resume", "Last-Event-ID: a:0\r\n", ""),
              HasSubstr("was asked over gRPC"));
  EXPECT_THAT(server.Http("GET /v1/resume", "Last-Event-ID: a\r\n", ""),
              HasSubstr("Last-Event-ID is 'a', expected the id"));
  EXPECT_THAT(server.Http("GET /v1/resume", "", ""), HasSubstr("Last-Event-ID is missing"));
  std::string head;
  const std::string missing = server.Http("GET /v1/resume", "Last-Event-ID: b:0\r\n", "", &head);
  EXPECT_THAT(head, HasSubstr(" 404 "));
  EXPECT_THAT(missing, Not(HasSubstr("model")));
  server.Http("POST /v1/completions", "X-Request-Id: web\r\n", body);
  EXPECT_THAT(server.Resume("web", 0).status.error_message(), HasSubstr("was asked over HTTP"));

  TestServer forgetful;
  v1::ResumeRequest request;
  grpc::ClientContext context;
  const auto reader = forgetful.stub().Resume(&context, request);
  EXPECT_THAT(ReadAll(*reader).status.error_message(), HasSubstr("without --durable"));
}

TEST_F(ResumeTest, AnotherKeyDoesNotSeeIt) {
  const std::string keys = root_ / "keys";
  std::ofstream(keys) << "the-key-of-alice-0 alice\nthe-key-of-bob-0000 bob\n";
  DurableServer server(Folder("a"), keys);
  {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer the-key-of-alice-0");
    const auto reader = server->stub().GenerateStream(&context, MakeRequest("a", 3, 5, 4));
    ASSERT_TRUE(ReadAll(*reader).status.ok());
  }
  EXPECT_EQ(server.Resume("a", 0, "the-key-of-bob-0000").status.error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(server.Resume("a", 0).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(TokensOf(server.Resume("a", 0, "the-key-of-alice-0").all), 4);
}

// Over HTTP a stream is the same bytes, ids of events included.

struct WebKind {
  const char* path;
  const char* body;
};
constexpr WebKind kWebKinds[] = {
    {"/v1/completions",
     R"({"prompt": "abcdefgh", "max_tokens": 20, "seed": 5, "stream": true, "ignore_eos": true})"},
    {"/v1/completions",
     R"({"prompt": "abcde", "max_tokens": 20, "seed": 5, "stream": true, "ignore_eos": true,
         "echo": true, "logprobs": 2, "return_token_ids": true, "frequency_penalty": 0.5,
         "stream_options": {"include_usage": true, "continuous_usage_stats": true}})"},
    {"/v1/chat/completions",
     R"({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 20, "seed": 6,
         "stream": true, "ignore_eos": true, "logprobs": true, "top_logprobs": 2,
         "stop": ["zzz"], "stream_options": {"include_usage": true}})"},
};

// Whole events alone.
std::string Events(const std::string& stream) {
  const size_t end = stream.rfind("\n\n");
  return end == stream.npos ? "" : stream.substr(0, end + 2);
}
std::string LastId(const std::string& events) {
  const size_t at = events.rfind("id: ");
  return at == events.npos ? "web:0" : events.substr(at + 4, events.find('\n', at) - at - 4);
}
// An error's event has no id; what is behind the last id is not told again.
std::string WithoutError(const std::string& events) {
  const size_t error = events.find("data: {\"error\"");
  return error == events.npos ? events : events.substr(0, error);
}
std::string WithoutTime(const std::string& events) {
  return std::regex_replace(events, std::regex("\"created\":[0-9]+"), "\"created\":0");
}

TEST_F(ResumeTest, EventsOverHttpGoOnBehindTheLast) {
  int cut = 0;
  for (const WebKind& kind : kWebKinds) {
    const std::string headers = "X-Request-Id: web\r\n";
    const std::string post = Str("POST ", kind.path);
    std::string whole;
    {
      DurableServer server(Folder(Str(&kind - kWebKinds)));
      whole = WithoutTime(server.Http(post, headers, kind.body));
    }
    EXPECT_THAT(whole, HasSubstr("id: web:1\ndata: "));
    EXPECT_TRUE(whole.ends_with("data: [DONE]\n\n")) << whole;
    for (const int iterations : {1, 4, 9, 17}) {
      const std::string folder = Folder(Str(&kind - kWebKinds, "-", iterations));
      std::string first = DurableServer(folder).CutOffAfter(
          iterations, [&](DurableServer& server) { return server.Http(post, headers, kind.body); });
      cut += first.find("[DONE]") == first.npos;
      first = WithoutError(Events(first));
      DurableServer server(folder);
      // By the same request, or by the resource for that.
      const std::string resume = Str(headers, "Last-Event-ID: ", LastId(first), "\r\n");
      const std::string rest = iterations % 2 == 0 ? server.Http(post, resume, kind.body)
                                                   : server.Http("GET /v1/resume", resume, "");
      EXPECT_EQ(WithoutTime(first + rest), whole) << iterations;
    }
  }
  EXPECT_GT(cut, 3);
}

// A client that asks something else must not get this answer.
TEST_F(ResumeTest, AnotherBodyIsRefused) {
  struct Body {
    const char *path, *same, *other, *other_path;
  };
  for (
      const Body& body :
      {Body{"/v1/completions", R"({ "stream":true,"max_tokens":4, "seed":5,"prompt":"abcd"})",
            R"({"prompt": "abcx", "max_tokens": 4, "seed": 5, "stream": true})",
            "/v1/chat/completions"},
       Body{
           "/v1/chat/completions",
           R"({"stream":true,"max_tokens":4,"messages":[{"content":"abcd","role":"user"}]})",
           R"({"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 5, "stream": true})",
           "/v1/completions"}}) {
    const std::string first =
        body.path == std::string("/v1/completions")
            ? R"({"prompt": "abcd", "max_tokens": 4, "seed": 5, "stream": true})"
            : R"({"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 4, "stream": true})";
    DurableServer server(Folder(Str("of-", body.path[5])));
    const std::string post = Str("POST ", body.path);
    const std::string whole = server.Http(post, "X-Request-Id: web\r\n", first);
    ASSERT_THAT(whole, HasSubstr("[DONE]"));
    const std::string resume = "Last-Event-ID: web:0\r\n";
    EXPECT_EQ(WithoutTime(server.Http(post, resume, first)), WithoutTime(whole));
    EXPECT_EQ(WithoutTime(server.Http(post, resume, body.same)), WithoutTime(whole));
    EXPECT_EQ(WithoutTime(server.Http("GET /v1/resume", resume, "")), WithoutTime(whole));
    for (const auto& [path, sent] :
         {std::pair(body.path, std::string(body.other)),
          std::pair(body.path, std::string("no JSON")), std::pair(body.path, std::string()),
          std::pair(body.other_path, first), std::pair("/v1/embeddings", first)}) {
      SCOPED_TRACE(Str(path, " ", sent));
      std::string head;
      const std::string refused = server.Http(Str("POST ", path), resume, sent, &head);
      EXPECT_THAT(head, HasSubstr(" 400 "));
      EXPECT_THAT(refused, HasSubstr("the body is not the one of the request 'web'"));
    }
    EXPECT_EQ(WithoutTime(server.Http(post, resume, first)), WithoutTime(whole)) << "still there";
  }
}

TEST_F(ResumeTest, WithoutAStoreNothingHasAnId) {
  TestServer server;
  HttpClient client(server.http_port());
  const std::string body = kWebKinds[0].body;
  client.Send(
      Str("POST /v1/completions HTTP/1.0\r\nContent-Length: ", body.size(), "\r\n\r\n", body));
  EXPECT_THAT(client.ReadAll(), Not(HasSubstr("id: ")));
}

}  // namespace
}  // namespace treadle
