// Embeddings and what is made of them, over real sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "tests/server/http/http_exchange.h"
#include "tests/server/test_server.h"
#include "tests/support/prefix_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

HttpExchange Post(const TestServer& server, const std::string& path, const std::string& body,
                  const std::string& headers = "") {
  return Exchange(server.http_port(), "POST " + path, body, headers);
}

// The model's hidden state is the two halves of the prompt's hash; an embedding has length 1.
std::vector<double> Embedding(const std::string& text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(c - 'a');
  const uint32_t hash = PrefixModel::Hash(ids);
  const double x = hash & 0xffff, y = hash >> 16, length = std::sqrt(x * x + y * y);
  return {x / length, y / length};
}
double Cosine(const std::string& a, const std::string& b) {
  return Embedding(a)[0] * Embedding(b)[0] + Embedding(a)[1] * Embedding(b)[1];
}

TestServerOptions Embeds() {
  TestServerOptions options;
  options.adjust = [](ServiceOptions& service) { service.pooling = Pooling::kLast; };
  options.scheduling.max_queue = 128;
  return options;
}

TEST(EmbeddingServer, EmbeddingsAreThoseOfGrpc) {
  const char path[] = "/v1/embeddings";
  const std::string off = R"({"input": "abc"})";
  EXPECT_THAT(Post(TestServer(), path, off).body["error"]["message"].get<std::string>(),
              HasSubstr("started with --embedding-pooling none"));
  TestServer server(Embeds());
  const auto grpc = [&](const std::string& text) {
    v1::EmbedRequest request;
    request.set_text(text);
    v1::EmbedResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(server.stub().Embed(&context, request, &response).ok());
    EXPECT_EQ(response.prompt_tokens(), static_cast<int>(text.size()));
    return std::vector<float>(response.embedding().begin(), response.embedding().end());
  };
  const std::string longer(100, 'x');  // four chunks
  const HttpExchange both = Post(
      server, path,
      R"({"model": "prefix", "input": ["abc", ")" + longer + R"("], "encoding_format": "float"})");
  ASSERT_EQ(both.code, 200) << both.body;
  EXPECT_EQ(both.body["object"], "list");
  EXPECT_EQ(both.body["model"], "prefix");
  EXPECT_EQ(both.body["usage"], Json({{"prompt_tokens", 103}, {"total_tokens", 103}}));
  ASSERT_EQ(both.body["data"].size(), 2u);
  const std::string texts[] = {"abc", longer};
  for (size_t i = 0; i < 2; ++i) {
    const Json& data = both.body["data"][i];
    EXPECT_EQ(data["object"], "embedding");
    EXPECT_EQ(data["index"], i);
    const std::vector<float> embedding = data["embedding"].get<std::vector<float>>();
    EXPECT_EQ(embedding, grpc(texts[i]));
    ASSERT_EQ(embedding.size(), 2u);
    EXPECT_FLOAT_EQ(embedding[0], static_cast<float>(Embedding(texts[i])[0]));
    EXPECT_FLOAT_EQ(embedding[1], static_cast<float>(Embedding(texts[i])[1]));
  }
  const HttpExchange coded =
      Post(server, path, R"({"input": [0, 1, 2], "encoding_format": "base64", "user": "u"})");
  std::string bytes;
  ASSERT_TRUE(absl::Base64Unescape(coded.body["data"][0]["embedding"].get<std::string>(), &bytes));
  ASSERT_EQ(bytes.size(), 8u);
  float numbers[2];
  std::memcpy(numbers, bytes.data(), sizeof numbers);
  EXPECT_THAT(grpc("abc"), testing::ElementsAreArray(numbers));

  Json many = {{"input", Json::array()}};  // more than begin at once
  for (int i = 0; i < 300; ++i) many["input"].push_back({i % 50});
  const Json all = Post(server, path, many.dump()).body;
  ASSERT_EQ(all["data"].size(), 300u);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(all["data"][i]["index"], i);
    EXPECT_EQ(all["data"][i]["embedding"], all["data"][i % 50]["embedding"]);
    if (i == 0) continue;
    EXPECT_NE(all["data"][i]["embedding"], all["data"][i - 1]["embedding"]);
  }
  many["input"] = std::vector<std::string>(2049, "a");
  EXPECT_THAT(Post(server, path, many.dump()).body["error"]["message"].get<std::string>(),
              HasSubstr("input has 2049 entries, expected at most 2048"));

  const std::string full(1024, 'a');  // all of the context; nothing is generated
  EXPECT_EQ(Post(server, path, R"({"input": ")" + full + R"("})").code, 200);
  const std::pair<std::string, std::string> wrong[] = {
      {R"({"input": ")" + full + R"(a"})", "input has 1025 tokens, expected at most 1024"},
      {R"({"input": []})", "input is [], expected a string, token ids, or an array of either"},
      {R"({"input": ["a", ""]})", "input is empty, expected at least one token"},
      {R"({"input": [50]})", "input[0] is 50, expected 0 to 49"},
      {R"({"input": "a1"})", "input: '1' is no letter"},
      {R"({"input": [true]})", "input[0] is true, expected an array of token ids"},
      {R"({"input": "a", "dimensions": 9})", "dimensions is 9, expected 1 to 8"},
      {R"({"input": "a", "encoding_format": "hex"})", "encoding_format is \"hex\", expected"},
      {R"({"encoding_format": "float"})", "input is missing"}};
  for (const auto& [body, message] : wrong) {
    const HttpExchange answer = Post(server, path, body);
    EXPECT_EQ(answer.code, 400);
    EXPECT_THAT(answer.body["error"]["message"].get<std::string>(), HasSubstr(message));
  }
  EXPECT_EQ(Post(server, path, off, "X-Request-Timeout: 0.000001\r\n").code, 504);
}

// Shapes are those of vLLM's ScoreResponse and RerankResponse (entrypoints/pooling/score).
TEST(EmbeddingServer, ScoresAreCosines) {
  TestServer server(Embeds());
  for (const char* const path : {"/score", "/v1/score"}) {
    const HttpExchange one = Post(
        server, path, R"({"model": "prefix", "text_1": "abc", "text_2": ["xyz", "abc", "qq"]})");
    ASSERT_EQ(one.code, 200) << one.text;
    EXPECT_THAT(one.body["id"].get<std::string>(), testing::StartsWith("score-"));
    EXPECT_EQ(one.body["object"], "list");
    EXPECT_EQ(one.body["model"], "prefix");
    EXPECT_EQ(one.body["usage"], Json({{"prompt_tokens", 11}, {"total_tokens", 11}}));
    ASSERT_EQ(one.body["data"].size(), 3u);
    const std::string others[] = {"xyz", "abc", "qq"};
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(one.body["data"][i]["index"], i);
      EXPECT_EQ(one.body["data"][i]["object"], "score");
      EXPECT_NEAR(one.body["data"][i]["score"].get<double>(), Cosine("abc", others[i]), 1e-6);
    }
  }
  for (const auto& [first, second] : {std::pair("text_1", "text_2"),
                                      {"data_1", "data_2"},
                                      {"queries", "documents"},
                                      {"queries", "items"}}) {
    const Json asked = {{first, {"abc", "d"}}, {second, {"xyz", "ef"}}};
    const Json pairs = Post(server, "/v1/score", asked.dump()).body;
    ASSERT_EQ(pairs["data"].size(), 2u) << pairs;
    EXPECT_NEAR(pairs["data"][0]["score"].get<double>(), Cosine("abc", "xyz"), 1e-6);
    EXPECT_NEAR(pairs["data"][1]["score"].get<double>(), Cosine("d", "ef"), 1e-6);
  }
}

TEST(EmbeddingServer, ARankingBeginsWithTheNearest) {
  TestServer server(Embeds());
  const std::vector<std::string> documents = {"xyz", "abc", "qq", "mno"};
  for (const char* const path : {"/rerank", "/v1/rerank", "/v2/rerank"}) {
    for (const int top_n : {0, 1, 3, 9}) {
      const Json asked = {{"query", "abc"}, {"documents", documents}, {"top_n", top_n}};
      const Json body = Post(server, path, asked.dump()).body;
      const size_t most = top_n == 0 ? 4 : std::min(top_n, 4);
      ASSERT_EQ(body["results"].size(), most) << body;
      EXPECT_THAT(body["id"].get<std::string>(), testing::StartsWith("rerank-"));
      EXPECT_EQ(body["usage"]["total_tokens"], 14);
      EXPECT_EQ(body["results"][0]["index"], 1);  // the same text
      double last = 2;
      for (const Json& result : body["results"]) {
        const std::string text = documents[result["index"].get<size_t>()];
        EXPECT_EQ(result["document"]["text"], text);
        const double score = result["relevance_score"].get<double>();
        EXPECT_NEAR(score, Cosine("abc", text), 1e-6);
        EXPECT_LE(score, last);
        last = score;
      }
    }
  }
}

TEST(EmbeddingServer, ScoresThatCannotBeSayWhy) {
  const std::string off = R"({"text_1": "a", "text_2": "b"})";
  EXPECT_THAT(Post(TestServer(), "/v1/score", off).body["error"]["message"].get<std::string>(),
              HasSubstr("started with --embedding-pooling none"));
  TestServer server(Embeds());
  const std::string full(1025, 'a');
  const struct {
    const char* path;
    std::string body, message;
  } wrong[] = {
      {"/v1/score", R"({"text_1": "a"})", "text_2 is missing"},
      {"/v1/score", R"({"text_1": [], "text_2": "a"})", "text_1 is [], expected a string or"},
      {"/v1/score", R"({"text_1": "a", "text_2": ["b", 3]})", "text_2[1] is 3, expected a string"},
      {"/v1/score", R"({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})",
       "text_1 has 2 entries, expected 1, or as many as text_2 (3)"},
      {"/v1/score", R"({"text_1": "a", "text_2": ")" + full + "\"}",
       "a text has 1025 tokens, expected at most 1024"},
      {"/v1/score", R"({"text_1": "a", "text_2": "b", "text_3": "c"})", "text_3 is not supported"},
      {"/v1/rerank", R"({"query": ["a"], "documents": ["b"]})", "query is [\"a\"], expected a str"},
      {"/v1/rerank", R"({"query": "a", "documents": ["b"], "top_n": -1})", "top_n is -1, expected"},
      {"/v1/rerank", R"({"query": "a", "document": "b"})", "did you mean 'documents'"}};
  for (const auto& [path, body, message] : wrong) {
    const HttpExchange answer = Post(server, path, body);
    EXPECT_EQ(answer.code, 400) << body;
    EXPECT_THAT(answer.body["error"]["message"].get<std::string>(), HasSubstr(message));
  }
  const Json many = {{"query", "a"}, {"documents", std::vector<std::string>(2049, "a")}};
  EXPECT_THAT(Post(server, "/v1/rerank", many.dump()).body["error"]["message"].get<std::string>(),
              HasSubstr("documents has 2049 entries, expected at most 2048"));
}

}  // namespace
}  // namespace treadle
