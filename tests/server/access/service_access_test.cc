// TLS and API keys, over real channels.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <sstream>
#include <thread>

#include "base/status.h"
#include "server/access/tls_files.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/http_exchange.h"
#include "tests/server/http/tls_client.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const char kAlice[] = "alice-0123456789abcdef";
const char kBob[] = "bob-0123456789abcdef00";
const char kOperator[] = "operator-0123456789ab";
const char kMeagre[] = "meagre-0123456789abcde";
const char kSuspended[] = "suspended-0123456789abc";

// Files of one identity; written anew by Rotate.
struct Files {
  explicit Files(const std::string& name)
      : paths{.certificate = TestPath(name + ".crt"), .key = TestPath(name + ".key"), .ca = {}} {}
  void Rotate(const PemPair& pair) const {
    WriteText(paths.key, pair.key);
    WriteText(paths.certificate, pair.certificate);
  }
  TlsFiles paths;
};

class Lines {
 public:
  LogSink log() {
    return [this](const LogEvent& event) {
      MutexLock lock(mutex_);
      all_ += event.message + "\n";
    };
  }
  bool WaitFor(const std::string& text) {
    return ComesTrue([&] { return all().find(text) != std::string::npos; });
  }
  std::string all() {
    MutexLock lock(mutex_);
    return all_;
  }

 private:
  Mutex mutex_;
  std::string all_ ABSL_GUARDED_BY(mutex_);
};

std::shared_ptr<grpc::ChannelCredentials> Client(const TestCa& ca, const PemPair& own = {}) {
  return grpc::SslCredentials({ca.pem(), own.key, own.certificate});
}

// One call on a connection of its own.
grpc::Status Ask(TestServer& server, std::shared_ptr<grpc::ChannelCredentials> credentials) {
  const auto stub = v1::Inference::NewStub(server.Connect(std::move(credentials)));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  v1::GenerateResponse response;
  return stub->Generate(&context, MakeRequest("a", 1, 5, 5), &response);
}

std::unique_ptr<TestServer> Serve(const SocketTls& tls, const TestCa& ca, const PemPair& own = {}) {
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.tls = &tls; };
  options.channel_credentials = Client(ca, own);
  return std::make_unique<TestServer>(options);
}

TEST(Access, TlsServesThoseWhoTrustIt) {
  const TestCa ca, other;
  const Files files("tls");
  files.Rotate(ca.Sign());
  ASSERT_OK_AND_ASSIGN(const auto tls, OpenSocketTls(files.paths, "h2", [](const LogEvent&) {}));
  const auto server = Serve(*tls, ca);
  EXPECT_TRUE(Ask(*server, Client(ca)).ok());
  EXPECT_EQ(Ask(*server, Client(other)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(Ask(*server, grpc::InsecureChannelCredentials()).ok());
}

TEST(Access, MutualTlsWantsACertificateOfItsCa) {
  const TestCa ca, clients, other;
  Files files("mutual");
  files.Rotate(ca.Sign());
  files.paths.ca = TestPath("mutual.ca");
  WriteText(files.paths.ca, clients.pem());
  ASSERT_OK_AND_ASSIGN(const auto tls, OpenSocketTls(files.paths, "h2", [](const LogEvent&) {}));
  const auto server = Serve(*tls, ca, clients.Sign());
  EXPECT_TRUE(Ask(*server, Client(ca, clients.Sign())).ok());
  EXPECT_FALSE(Ask(*server, Client(ca)).ok());
  EXPECT_FALSE(Ask(*server, Client(ca, other.Sign())).ok());
  EXPECT_FALSE(Ask(*server, Client(ca, clients.Sign(-7200, -3600))).ok());
}

TEST(Access, CertificatesAreRotatedUnderLoadWithoutAFailure) {
  const TestCa old_ca, new_ca, third_ca;
  const Files files("rotated");
  files.Rotate(old_ca.Sign());
  Lines lines;
  ASSERT_OK_AND_ASSIGN(const auto tls, OpenSocketTls(files.paths, "h2", lines.log()));
  const auto server = Serve(*tls, old_ca);
  const std::string both = old_ca.pem() + new_ca.pem();
  const auto either = [&] { return grpc::SslCredentials({both, "", ""}); };
  std::atomic<bool> over = false;
  std::atomic<int> asked = 0;
  std::vector<std::string> failures;
  // The kept connection knows the old certificate's issuer only.
  v1::GenerateResponse first;
  ASSERT_TRUE(Generate(*server, MakeRequest("b", 2, 5, 5), first).ok());
  std::thread load([&] {
    while (!over) {
      const grpc::Status fresh = Ask(*server, either());
      v1::GenerateResponse response;
      const grpc::Status kept = Generate(*server, MakeRequest("b", 2, 5, 5), response);
      if (!fresh.ok()) failures.push_back("new: " + fresh.error_message());
      if (!kept.ok()) failures.push_back("kept: " + kept.error_message());
      ++asked;
    }
  });

  files.Rotate(new_ca.Sign());
  EXPECT_TRUE(lines.WaitFor("anew"));
  bool taken_over = false;
  for (int i = 0; i < 600 && !taken_over; ++i) {
    taken_over = Ask(*server, Client(new_ca)).ok();
    if (!taken_over) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_TRUE(taken_over);
  EXPECT_FALSE(Ask(*server, Client(old_ca)).ok());

  // A file that does not pass is not taken over.
  WriteText(files.paths.key, third_ca.Sign().key);
  EXPECT_TRUE(lines.WaitFor("does not belong to the certificate"));
  EXPECT_TRUE(Ask(*server, Client(new_ca)).ok());
  over = true;
  load.join();
  EXPECT_GT(asked, 0);
  EXPECT_THAT(failures, testing::IsEmpty());
}

TEST(Access, WhatIsWrongWithTlsFilesIsNamed) {
  const TestCa ca;
  const PemPair good = ca.Sign();
  const std::string crt = TestPath("bad.crt"), key = TestPath("bad.key"), root = TestPath("bad.ca");
  struct Case {
    std::string certificate, key, ca, message;
  };
  const Case cases[] = {
      {"", good.key, "", "cannot read " + crt + ": it is empty"},
      {"nonsense", good.key, "", crt + " has no certificate, expected PEM"},
      {good.certificate + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
       good.key, "", crt + " has a damaged certificate"},
      {good.certificate, "nonsense", "", key + " has no private key"},
      {good.certificate, ca.Sign().key, "",
       "the key in " + key + " does not belong to the certificate in " + crt},
      {ca.Sign(-7200, -3600).certificate, good.key, "", crt + " has expired on "},
      {ca.Sign(3600, 7200).certificate, good.key, "", crt + " is not valid before "},
      {good.certificate, good.key, "nonsense", root + " has no certificate"},
  };
  for (const Case& bad : cases) {
    WriteText(crt, bad.certificate);
    WriteText(key, bad.key);
    WriteText(root, bad.ca);
    const absl::Status status =
        ReadTlsFiles({.certificate = crt, .key = key, .ca = bad.ca.empty() ? "" : root}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  EXPECT_EQ(ReadTlsFiles({.certificate = "/no/such", .key = key, .ca = {}}).status().message(),
            "TLS: cannot read /no/such: No such file or directory");
}

struct Caller {
  explicit Caller(const std::string& key) {
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
  }
  grpc::ClientContext context;
};

class Keys : public testing::Test {
 protected:
  Keys() {
    WriteText(TestPath("keys"), Str(kAlice, " alice\n", kMeagre, " meagre 1\n", kSuspended,
                                    " gone 0\n", kBob, "\n", kOperator, " boss - - operator\n"));
    auto keys = ApiKeys::Open(TestPath("keys"), [](const LogEvent&) {});
    EXPECT_TRUE(keys.ok()) << keys.status();
    keys_ = *std::move(keys);
    TestServerOptions options;
    options.adjust = [&](ServiceOptions& service) { service.keys = keys_.get(); };
    server_ = std::make_unique<TestServer>(options);
  }
  grpc::Status Generate(const std::string& key, const std::string& id = "a") {
    Caller caller(key);
    v1::GenerateResponse response;
    return server_->stub().Generate(&caller.context, MakeRequest(id, 1, 5, 5), &response);
  }

  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<TestServer> server_;
};

TEST_F(Keys, EveryCallNeedsOneButTheProbes) {
  using grpc::StatusCode;
  for (const auto& [key, code] :
       {std::pair<std::string, StatusCode>{"", StatusCode::UNAUTHENTICATED},
        {"wrong-0123456789abcdef", StatusCode::UNAUTHENTICATED},
        {kSuspended, StatusCode::PERMISSION_DENIED},
        {kAlice, StatusCode::OK}}) {
    v1::Inference::Stub& stub = server_->stub();
    EXPECT_EQ(Generate(key).error_code(), code) << key;
    {
      Caller caller(key);
      const auto reader = stub.GenerateStream(&caller.context, MakeRequest("s", 1, 5, 5));
      EXPECT_EQ(ReadAll(*reader).status.error_code(), code) << key;
    }
    const auto check = [&, code = code](const grpc::Status& status) {
      EXPECT_EQ(status.error_code(), code) << key << ": " << status.error_message();
    };
    Caller one(key), two(key), three(key), four(key);
    v1::TokenizeRequest text;
    text.set_text("abc");
    v1::TokenizeResponse ids;
    v1::DetokenizeResponse back;
    v1::GetModelInfoResponse model;
    v1::GetLoadResponse load;
    check(stub.Tokenize(&one.context, text, &ids));
    check(stub.Detokenize(&two.context, {}, &back));
    check(stub.GetModelInfo(&three.context, {}, &model));
    check(stub.GetLoad(&four.context, {}, &load));
    EXPECT_EQ(model.vocab_size() > 0, code == StatusCode::OK);
    std::string reply;
    if (key.empty()) {
      check(RawCall(*server_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "",
                    reply));
    }
    Caller watcher(key);
    const auto reader = stub.WatchLedger(&watcher.context, {});
    v1::LedgerRecord record;
    if (code == StatusCode::OK) {
      watcher.context.TryCancel();
    } else {
      EXPECT_FALSE(reader->Read(&record));
      check(reader->Finish());
    }
  }
  EXPECT_TRUE(server_->WaitHealth("ready", true));
  EXPECT_TRUE(server_->WaitHealth("live", true));
}

// Whoever has a request's id can resume or end it.
TEST_F(Keys, TheLedgerShowsARequestsIdAndKeyToItsOwnerAndToOperators) {
  for (const char* const key : {kAlice, kBob}) EXPECT_TRUE(Generate(key, Str("of ", key)).ok());
  const auto ids = [&](const std::string& key) {
    Caller caller(key);
    v1::WatchLedgerRequest request;
    request.set_from_start(true);
    const auto reader = server_->stub().WatchLedger(&caller.context, request);
    std::vector<std::string> found;
    int ends = 0;
    for (v1::LedgerRecord record; ends < 2 && reader->Read(&record);) {
      for (const v1::LedgerArrival& arrival : record.arrivals()) {
        if (!arrival.key_name().empty()) found.push_back(arrival.key_name());
      }
      for (const v1::LedgerEnd& end : record.ends()) {
        ++ends;
        if (!end.request_id().empty()) found.push_back(end.request_id());
      }
    }
    caller.context.TryCancel();
    EXPECT_EQ(ends, 2);
    return found;
  };
  // A key without a name is called by the beginning of its digest, as sha256sum gives it.
  const std::string bob = "key-38597c0d";
  EXPECT_THAT(ids(kAlice), ElementsAre("alice", Str("of ", kAlice)));
  EXPECT_THAT(ids(kBob), ElementsAre(bob, Str("of ", kBob)));
  EXPECT_THAT(ids(kOperator), ElementsAre("alice", Str("of ", kAlice), bob, Str("of ", kBob)));
}

TEST_F(Keys, ALimitIsSaid) {
  EXPECT_TRUE(Generate(kMeagre).ok());
  const grpc::Status refused = Generate(kMeagre);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.error_message(), "the API key 'meagre' has used up its 1 requests per minute");
  EXPECT_TRUE(Generate(kAlice).ok());
}

// Each refusal below is one request more under its reason, and none under any other: over gRPC,
// HTTP and the gateways' protocol, for calls that generate and calls that do not.
TEST(Refusals, EachIsCountedOnceUnderItsReason) {
  // A prompt of 400 tokens uses up what a key of one token a minute gets in hours.
  WriteText(TestPath("keys"), Str(kAlice, " alice\n", kMeagre, " meagre - 1\n"));
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(TestPath("keys"), [](const LogEvent&) {}));
  TestServerOptions options{
      .scheduling = {.max_batch_size = 1, .max_batch_tokens = 32, .max_queue = 1},
      .max_context = 1024,
      .kv_pages = 32};
  options.gate_closed = true;
  options.http.body_bytes = 4096;
  options.adjust = [&](ServiceOptions& service) {
    service.keys = keys.get();
    service.limits.http2.message_bytes = 4096;
    service.work = {.entries = 64, .bytes = 2048};
  };
  TestServer server(options);
  server.server().AddTo(server.metrics());
  const auto counts = [&] {
    std::map<std::string, int> found;
    std::istringstream page(server.metrics().Scrape());
    for (std::string line; std::getline(page, line);) {
      if (!line.starts_with("treadle:requests_refused_total{")) continue;
      const size_t at = line.find("reason=\"") + 8;
      const int count = std::atoi(line.c_str() + line.rfind(' '));
      if (count > 0) found[line.substr(at, line.find('"', at) - at)] = count;
    }
    return found;
  };
  EXPECT_THAT(counts(), testing::IsEmpty());
  EXPECT_THAT(server.metrics().Scrape(), HasSubstr("reason=\"queue_full\"} 0\n"));

  const auto generate = [&](const v1::GenerateRequest& request, const char* key = kAlice) {
    Caller caller(key);
    caller.context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    v1::GenerateResponse response;
    EXPECT_FALSE(server.stub().Generate(&caller.context, request, &response).ok());
  };
  const auto post = [&](const std::string& path, const std::string& body,
                        const std::string& headers =
                            Str("Authorization: Bearer ", kAlice, "\r\n")) {
    EXPECT_NE(Exchange(server.http_port(), "POST " + path, body, headers).code, 200);
  };
  const auto raw = [&](const std::string& method, const std::string& request) {
    std::string reply;
    EXPECT_FALSE(RawCall(server, method, request, reply).ok());
  };
  const std::string completions = "/v1/completions";
  const std::string gateway = "/vllm.grpc.engine.VllmEngine/";
  const auto prompt = [](int tokens, int more) {
    std::string ids = "1";
    for (int i = 1; i < tokens; ++i) ids += ",1";
    return Str(R"({"model":"prefix","prompt":[)", ids, R"(],"max_tokens":)", more, "}");
  };

  std::map<std::string, int> expected;
  const auto refused = [&](const std::string& reason, const std::function<void()>& ask) {
    ask();
    ++expected[reason];
    EXPECT_EQ(counts(), expected) << reason;
  };
  refused("unauthorized", [&] { generate(MakeRequest("a", 1, 5, 5), "wrong-0123456789abcdef"); });
  refused("unauthorized", [&] { post(completions, prompt(3, 3), ""); });
  refused("unauthorized", [&] { post("/tokenize", "{}", ""); });
  for (const char* const method : {"Generate", "Embed", "Abort", "GetTokenizer", "GetModelInfo"}) {
    refused("unauthorized", [&] { raw(gateway + method, ""); });
  }
  refused("invalid", [&] {
    v1::GenerateRequest request = MakeRequest("a", 1, 5, 5);
    request.mutable_sampling()->set_top_p(2);
    generate(request);
  });
  refused("invalid", [&] { post(completions, "{}"); });
  refused("invalid", [&] { post("/tokenize", "{}"); });
  refused("invalid", [&] { post("/nowhere", "{}"); });
  refused("invalid", [&] {
    post(completions, prompt(3, 3),
         Str("Authorization: Bearer ", kAlice, "\r\nX-Request-Timeout: soon\r\n"));
  });
  refused("too_long", [&] { generate(MakeRequest("a", 1, 1024, 1)); });
  refused("too_long", [&] { generate(MakeRequest("a", 1, 5, 1024)); });
  refused("too_long", [&] { generate(MakeRequest("a", 1, 9000, 1)); });  // bytes, at the door
  refused("too_long", [&] { post(completions, std::string(5000, ' ')); });
  refused("unread_full", [&] { post(completions, std::string(3000, ' ')); });
  refused("unsatisfiable", [&] { generate(MakeRequest("a", 1, 5, 1000)); });

  const auto wait_for = [&](int64_t running, int64_t waiting) {
    const RequestPool& pool = server.stack().pool();
    EXPECT_TRUE(ComesTrue([&] {
      const PoolLoad load = pool.Load();
      return load.running == running && load.waiting == waiting;
    }));
  };
  Caller runs(kMeagre), waits(kAlice);
  const auto first = server.stub().GenerateStream(&runs.context, MakeRequest("r", 1, 400, 5));
  wait_for(1, 0);
  const auto second = server.stub().GenerateStream(&waits.context, MakeRequest("w", 1, 5, 5));
  wait_for(1, 1);
  refused("rate_limited", [&] { generate(MakeRequest("a", 1, 5, 5), kMeagre); });
  refused("queue_full", [&] { generate(MakeRequest("a", 1, 5, 5)); });
  refused("queue_full", [&] { post(completions, prompt(3, 3)); });
  server.stack().pool().Drain();
  refused("draining", [&] { generate(MakeRequest("a", 1, 5, 5)); });
  refused("draining", [&] { post(completions, prompt(3, 3)); });
  server.gate().Open();
  EXPECT_TRUE(ReadAll(*first).status.ok());
  EXPECT_TRUE(ReadAll(*second).status.ok());
  EXPECT_EQ(counts(), expected);
}

TEST_F(Keys, MetricsCanAskForOne) {
  ASSERT_OK_AND_ASSIGN(const auto port, server_->metrics().Listen("127.0.0.1:0", keys_.get()));
  EXPECT_THAT(HttpGet(port, "/metrics"), HasSubstr("401 Unauthorized"));
  EXPECT_THAT(HttpGet(port, "/metrics", Str("Authorization: Bearer ", kAlice, "\r\n")),
              HasSubstr("treadle:num_requests_running"));
}

TEST_F(Keys, MetricsOverTlsWantATokenOfTheirOwn) {
  const char first[] = "scrape-0123456789abcdef", second[] = "scrape-fedcba9876543210";
  const TestCa ca;
  const Files files("metrics");
  files.Rotate(ca.Sign());
  const std::string path = TestPath("tokens");
  WriteText(path, Str(first, "\n"));
  Lines lines;
  ASSERT_OK_AND_ASSIGN(const auto tls, OpenSocketTls(files.paths, "http/1.1", lines.log()));
  ASSERT_OK_AND_ASSIGN(const auto tokens, ApiKeys::Open(path, lines.log(), "--metrics-token-file"));
  // Listens until the server ends, and needs both.
  ASSERT_OK_AND_ASSIGN(const auto port,
                       server_->metrics().Listen("127.0.0.1:0", tokens.get(), tls.get()));
  const auto ask = [&](const std::string& authorization) {
    const std::string header =
        authorization.empty() ? "" : Str("Authorization: ", authorization, "\r\n");
    return HttpsGet(port, {.ca = ca.pem()}, "/metrics", header);
  };
  const auto bearer = [](const std::string& token) { return "Bearer " + token; };
  const std::string cut(first, sizeof first - 2);
  for (const std::string& wrong :
       {std::string(), std::string(first), bearer(""), bearer(cut), bearer(Str(first, "0")),
        bearer(second), bearer(kAlice), Str("Basic ", first)}) {
    const std::string reply = ask(wrong);
    EXPECT_THAT(reply, testing::StartsWith("HTTP/1.1 401 Unauthorized\r\n")) << wrong;
    EXPECT_THAT(reply, HasSubstr("\r\nWWW-Authenticate: Bearer\r\n")) << wrong;
    EXPECT_THAT(reply, testing::Not(HasSubstr("0123456789"))) << wrong;
    EXPECT_THAT(reply, testing::Not(HasSubstr("treadle:"))) << wrong;
  }
  EXPECT_THAT(ask(bearer(first)), HasSubstr("treadle:num_requests_running"));
  EXPECT_THAT(HttpGet(port, "/metrics"), testing::Not(HasSubstr("HTTP/")));

  const auto served = [&](const char* token, bool yes) {
    return ComesTrue(
        [&] { return (ask(bearer(token)).find(" 200 OK") != std::string::npos) == yes; });
  };
  WriteText(path, Str(first, "\n", second, "\n"));
  EXPECT_TRUE(served(second, true));
  EXPECT_TRUE(served(first, true));
  WriteText(path, second);
  EXPECT_TRUE(served(first, false));
  EXPECT_TRUE(served(second, true));
  // A secret that is gone, or is none, changes nothing.
  ASSERT_EQ(std::remove(path.c_str()), 0);
  EXPECT_TRUE(lines.WaitFor("--metrics-token-file: cannot read " + path));
  EXPECT_TRUE(served(second, true));
  WriteText(path, "short");
  EXPECT_TRUE(lines.WaitFor(path + " line 1: a key has 5 characters"));
  EXPECT_TRUE(served(second, true));
  EXPECT_EQ(lines.all().find("0123456789"), std::string::npos) << lines.all();
  EXPECT_EQ(lines.all().find("fedcba"), std::string::npos) << lines.all();
  server_.reset();
}

TEST(HealthServer, ShowsTheSameBoardOnAPortOfItsOwn) {
  const auto board = std::make_shared<HealthBoard>();
  ASSERT_OK_AND_ASSIGN(const auto port, HealthServer::Start("127.0.0.1:0", *board));
  TestServerOptions options;
  options.gate_closed = true;
  options.adjust = [&](ServiceOptions& service) {
    service.health = board;
    service.warm_up = true;
  };
  TestServer server(options);
  const auto says = [&](const std::string& name, bool serving) {
    return server.WaitHealth(name, serving) &&
           server.WaitHealth(name, serving, ToString(port->address()));
  };
  EXPECT_TRUE(says("started", true));
  EXPECT_TRUE(says("live", true));
  EXPECT_TRUE(says("ready", false));
  EXPECT_TRUE(says("", false));
  server.gate().Open();
  EXPECT_TRUE(says("ready", true));
  EXPECT_TRUE(says("treadle.v1.Inference", true));
  EXPECT_TRUE(server.server().DrainAndStop(std::chrono::seconds(60)));
  EXPECT_TRUE(server.WaitHealth("ready", false, ToString(port->address())));
  const auto taken = HealthServer::Start(ToString(port->address()), *board);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr("Address already in use"));
}

}  // namespace
}  // namespace treadle
