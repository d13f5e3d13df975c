// The treadle binary as an operator meets it: configuration from several places, files that are
// wrong, TLS and keys, probes, exit codes.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>

#include "net/address.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/http/tls_client.h"
#include "tests/server/without_xgrammar.h"
#include "tests/support/default_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::Not;

const char kKey[] = "alice-0123456789abcdef";
const char kToken[] = "scrape-0123456789abcdef";

// Beside what this test process was given.
class Environment {
 public:
  Environment(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Environment() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST(Operations, PrintConfigShowsWhatHoldsAndWhereItIsFrom) {
  const std::string file = TestPath("config");
  WriteText(file, "max-queue = 7\nmax-batch-size = 3\nmodel = a.gguf\n");
  const Environment queue("TREADLE_MAX_QUEUE", "8");
  const Environment config("TREADLE_CONFIG", file);
  const std::string first = RunToEnd(Treadle("serve --model b.gguf --print-config"));
  EXPECT_THAT(first, HasSubstr("# from the command line\nmodel = b.gguf\n"));
  EXPECT_THAT(first, HasSubstr("# from TREADLE_MAX_QUEUE\nmax-queue = 8\n"));
  EXPECT_THAT(first, HasSubstr(" line 2\nmax-batch-size = 3\n"));
  EXPECT_THAT(first, HasSubstr("# by default: kv-dtype = f16\n"));

  // Its output is such a file.
  const std::string printed = TestPath("printed");
  WriteText(printed, first);
  const std::string second = RunToEnd(Treadle("serve --print-config --config " + printed));
  EXPECT_THAT(second, HasSubstr("\nmodel = b.gguf\n"));
  EXPECT_THAT(second, HasSubstr("\nmax-batch-size = 3\n"));
}

TEST(Operations, AWrongFileIsOneLineAndExitCodeTwoBeforeAnythingIsLoaded) {
  const TestCa ca;
  const PemPair pair = ca.Sign();
  const PemPair expired = ca.Sign(-7200, -3600);
  const std::string crt = TestPath("crt"), key = TestPath("key"), late = TestPath("late"),
                    other = TestPath("other"), keys = TestPath("keys"), conf = TestPath("conf"),
                    fake = TestPath("model");
  WriteText(crt, pair.certificate);
  WriteText(key, pair.key);
  WriteText(late, expired.certificate);
  WriteText(other, ca.Sign().key);
  WriteText(keys, "sesame\n");
  WriteText(conf, "tls-crt = x\n");
  WriteText(fake, "no model\n");
  const std::pair<std::vector<std::string>, std::string> uses[] = {
      {{"--tls-cert", crt}, "--tls-key is missing"},
      {{"--tls-client-ca", crt}, "--tls-client-ca needs --tls-cert"},
      {{"--tls-cert", crt, "--tls-key", "/no/such"}, "cannot read /no/such: No such file"},
      {{"--tls-cert", crt, "--tls-key", other}, "does not belong to the certificate in " + crt},
      {{"--tls-cert", late, "--tls-key", key}, late + " has expired on "},
      {{"--tls-cert", key, "--tls-key", key}, key + " has no certificate"},
      {{"--control-tls", "/no/such"}, "--control-tls needs --workers"},
      {{"--control-tls", "/no/such", "--workers", "a:1"}, "cannot read /no/such/tls.crt"},
      {{"--control-secret-file", keys}, "--control-secret-file needs --workers"},
      {{"--control-secret-file", keys, "--workers", "a:1"}, "has 6 characters, expected 16 to"},
      {{"--api-keys-file", keys}, keys + " line 1: a key has 6 characters"},
      {{"--metrics-auth", "api-key"}, "there is no --api-keys-file"},
      {{"--metrics-tls-cert", crt}, "--metrics-tls-key is missing"},
      {{"--metrics-tls-cert", "/no/such", "--metrics-tls-key", key}, "cannot read /no/such"},
      {{"--metrics-tls-cert", crt, "--metrics-tls-key", other},
       "does not belong to the certificate in " + crt},
      {{"--metrics-tls-cert", late, "--metrics-tls-key", key}, late + " has expired on "},
      {{"--metrics-tls-cert", crt, "--metrics-tls-key", key, "--metrics-tls-client-ca", keys},
       keys + " has no certificate"},
      {{"--metrics-token-file", "/no/such"}, "--metrics-token-file: cannot read /no/such"},
      {{"--metrics-token-file", keys},
       "--metrics-token-file: " + keys + " line 1: a key has 6 characters"},
      {{"--config", conf}, "'tls-crt' is no setting; did you mean 'tls-cert'?"},
      {{"--config", "/no/such"}, "cannot read /no/such"},
      {{"--health-listen", "x"}, "--health-listen"},
      {{"--model-sha256", "abc"}, "expected 64 hexadecimal digits"},
      {{"--model-sha256", std::string(64, '0')},
       fake + " has 38af35bf3a1ac4a394cc7c60519f8f13883f95fe5d877cd9ac3b0cbb0f5b714b"},
  };
  for (const auto& [flags, message] : uses) {
    const std::string& model = flags[0] == "--model-sha256" ? fake : OwnModel();
    const std::string said =
        RunToEnd(ServedBinary::Command(Str(ServedBinary::kGrpcOnly, "--model ", model), flags), 2);
    EXPECT_THAT(said, HasSubstr(message));
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
    EXPECT_THAT(said, Not(HasSubstr("sesame")));
  }
  EXPECT_THAT(RunToEnd(Treadle("worker --listen 127.0.0.1:0 --control-tls /no/such"), 2),
              HasSubstr("cannot read /no/such/tls.crt"));
  WorkerBinary open("", {}, "0.0.0.0:0");
  if (!open.address().empty()) open.Signal(SIGTERM);  // it must not listen
  EXPECT_EQ(open.Wait(), 2);
  EXPECT_THAT(open.output(), HasSubstr("--listen is 0.0.0.0:0, which other machines reach"));
  EXPECT_THAT(open.output(), HasSubstr("expected --control-secret-file or --control-tls"));
  EXPECT_THAT(RunToEnd(Treadle("generate --prompt a --tls-ca /no/such"), 2),
              HasSubstr("cannot read /no/such"));
}

TEST(Operations, HelpSaysTheExitCodes) {
  for (const char* command : {"serve", "worker"}) {
    EXPECT_THAT(RunToEnd(Treadle(Str(command, " --help"))), HasSubstr("Exit codes: 0 done"));
  }
}

// The default model, in little memory.
std::string Small(const std::string& model) {
  return Str("--max-context 1024 --kv-memory 64M --model ", model, " ", ServedBinary::kGrpcOnly);
}

TEST(Operations, TlsKeysAndProbesTogether) {
  NEEDS_DEFAULT_MODEL(model);
  const TestCa ca;
  const PemPair pair = ca.Sign();
  const std::string crt = TestPath("crt"), key = TestPath("key"), root = TestPath("ca"),
                    keys = TestPath("keys"), token = TestPath("token");
  WriteText(crt, pair.certificate);
  WriteText(key, pair.key);
  WriteText(root, ca.pem());
  WriteText(keys, std::string(kKey) + " alice\n");
  WriteText(token, kToken);
  const std::string as_client = Str(" --tls-cert ", crt, " --tls-key ", key);
  ServedBinary server(Str("--health-listen 127.0.0.1:0 --http-listen none --metrics-listen",
                          " 127.0.0.1:0 --metrics-tls-cert ", crt, " --metrics-tls-key ", key,
                          " --metrics-tls-client-ca ", root, " --metrics-token-file ", token,
                          " --max-context 1024 --kv-memory 256M --tls-client-ca ", root, as_client,
                          " --api-keys-file ", keys, " --model ", model));
  const std::string line = server.listens();
  EXPECT_THAT(line, HasSubstr("(gRPC, TLS)"));
  EXPECT_NE(WordAfter(line, "probes at "), "");
  ASSERT_NE(server.WaitForLine("ready"), "");

  const std::string metrics = WordAfter(line, "metrics at https://");
  const auto scraped = ParseAddress(metrics.substr(0, metrics.find('/')));
  ASSERT_TRUE(scraped.ok()) << line;
  const auto scrape = [&](const PemPair& own, const std::string& secret) {
    return HttpsGet(scraped->port, {.ca = ca.pem(), .own = own}, "/metrics",
                    "Authorization: Bearer " + secret + "\r\n");
  };
  EXPECT_THAT(scrape(pair, kToken), HasSubstr("treadle:num_requests_running"));
  EXPECT_THAT(scrape(pair, kKey), HasSubstr("401 Unauthorized"));
  EXPECT_EQ(scrape({}, kToken), "");

  const auto run = [&](const std::string& access, int code) {
    return RunToEnd(Treadle(Str("generate --target ", server.address(),
                                " --max-new-tokens 4 --timeout 1m ", access),
                            {"--prompt", "Once upon"}),
                    code);
  };
  const std::string ca_flag = "--tls-ca " + root, key_flag = " --api-key-file " + keys;
  run(ca_flag + as_client + key_flag, 0);
  EXPECT_THAT(run(ca_flag + as_client, 1), HasSubstr("UNAUTHENTICATED"));
  run(ca_flag + key_flag, 1);
  run(key_flag, 1);
  const std::string bench = RunToEnd(Treadle(
      Str("bench serve --num-prompts 2 --request-rate inf --input-len 8 --output-len 4 --json",
          " --target ", server.address(), " ", ca_flag, as_client, key_flag)));
  EXPECT_THAT(bench, HasSubstr("\"failed\":0"));
  for (const char* said : {R"("num_prompts":2)", R"("input_len":"8")", R"("output_len":"4")",
                           R"("burstiness":1.0)", R"("end_of_sequence":"ignored")"}) {
    EXPECT_THAT(bench, HasSubstr(said));  // what ran
  }
  EXPECT_EQ(server.Stop(), 0);
  for (const char* secret : {kKey, kToken}) EXPECT_THAT(server.output(), Not(HasSubstr(secret)));
}

TEST(Operations, TheVocabularyIsReadBeforeAConstraintAsksForIt) {
  NEEDS_DEFAULT_MODEL(model);
  ServedBinary server(Small(model));
  v1::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_constraint()->set_regex("a+");
  request.mutable_stopping()->set_max_new_tokens(2);
  grpc::ClientContext context;
  v1::GenerateResponse response;
  const grpc::Status status = server.stub().Generate(&context, request, &response);
  if (IsWithoutXGrammar(status.error_message())) GTEST_SKIP() << kWithoutXGrammar;
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.Stop(), 0);
  // Not with the request, which would not say so.
  EXPECT_THAT(server.output(), HasSubstr("constraints: the vocabulary is read"));
}

TEST(Operations, RequestsThatAreCutOffShowInTheExitCode) {
  NEEDS_DEFAULT_MODEL(model);
  ServedBinary server(Str("--drain-timeout 1ms --model ", model, " ", ServedBinary::kGrpcOnly));
  grpc::ClientContext context;
  const auto reader = server.stub().GenerateStream(&context, GreedyRequest(1000));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  server.Signal(SIGTERM);
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.Wait(), 3) << server.output();
}

}  // namespace
}  // namespace treadle
