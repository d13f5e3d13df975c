// --max-ttft as clients see it: a request that would have its first token too late is refused when
// it comes, in the error of each protocol, and says when to try again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "base/status.h"
#include "tests/server/http/http_client.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Metrics follow the ledger, whose last record may come with a heartbeat.
void AwaitMetric(TestServer& server, const std::string& line) {
  while (server.metrics().Scrape().find(line) == std::string::npos) std::this_thread::yield();
}

TEST(MaxTtft, IsAnErrorOfEachProtocol) {
  TestServerOptions options;
  options.scheduling.max_ttft = std::chrono::nanoseconds(1);  // no server is that fast
  TestServer server(options);
  // The cost of iterations is not known yet.
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, MakeRequest("first", 1, 10, 40), response).ok());

  for (const bool stream : {false, true}) {
    const v1::GenerateRequest request = MakeRequest(Str("late-", stream), 1, 10, 4);
    const grpc::Status refused =
        stream ? GenerateStream(server, request).status : Generate(server, request, response);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("s of --max-ttft"));
    EXPECT_THAT(refused.error_details(), HasSubstr("google.rpc.RetryInfo"));
    const auto end = server.EndOf(request.request_id());
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->reason, "refused");
    EXPECT_EQ(end->output_tokens, 0);
    EXPECT_GT(end->predicted_first_token, 0);

    const std::string body =
        Str(R"({"prompt": [1, 2, 3], "max_tokens": 4, "stream": )", stream ? "true" : "false", "}");
    HttpClient client(server.http_port());
    client.Send(Str("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: ",
                    body.size(), "\r\nContent-Type: application/json\r\n\r\n", body));
    const std::string answer = client.ReadAnswer();
    EXPECT_THAT(answer, testing::StartsWith("HTTP/1.1 429"));
    EXPECT_THAT(answer, HasSubstr("Retry-After: "));
    EXPECT_THAT(answer, HasSubstr("s of --max-ttft"));
  }
  AwaitMetric(server, "{finished_reason=\"refused\",model_name=\"prefix\"} 4\n");
}

TEST(MaxTtft, ShowsHowFarItWasWrong) {
  TestServerOptions options;
  options.scheduling.max_ttft = std::chrono::hours(1);
  TestServer server(options);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(server, MakeRequest("first", 1, 10, 40), response).ok());
  ASSERT_TRUE(Generate(server, MakeRequest("second", 1, 10, 4), response).ok());
  ASSERT_TRUE(server.EndOf("second").has_value());
  EXPECT_GT(server.EndOf("second")->predicted_first_token, 0);
  AwaitMetric(server, "time_to_first_token_error_seconds_count{model_name=\"prefix\"} 1\n");
}

}  // namespace
}  // namespace treadle
