// Requests over HTTP: heads and bodies, which mean the same however they are cut, and then what
// OpenAI's API reads of their JSON.
#include "base/status.h"
#include "base/utf8.h"
#include "server/http/http_parser.h"
#include "server/openai/openai_request.h"
#include "server/session/request_validation.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/fuzzed_model.h"

namespace treadle {
namespace {

constexpr size_t kHeadBytes = 512, kBodyBytes = 2048;

struct Taken {
  int refusal = 0;  // its code; 0: none
  std::optional<HttpRequest> request;
};

Taken Take(std::string_view bytes, size_t cut) {
  HttpParser parser(kHeadBytes, kBodyBytes);
  std::string waiting;
  for (; !bytes.empty() && !parser.whole(); bytes.remove_prefix(std::min(cut, bytes.size()))) {
    waiting += bytes.substr(0, cut);
    if (const auto refusal = parser.Take(waiting)) {
      TREADLE_CHECK(refusal->code >= 400 && !refusal->message.empty());
      return {refusal->code, {}};
    }
    TREADLE_CHECK(parser.body_bytes() <= kBodyBytes);
  }
  if (!parser.whole()) return {};
  return {0, parser.Release()};
}

void Read(const HttpRequest& request) {
  const auto check = [](const absl::Status& status) { TREADLE_CHECK(!status.message().empty()); };
  if (request.path == "/tokenize") return ReadTokenize(request.body, FuzzedModel()).IgnoreError();
  if (request.path == "/detokenize") {
    return ReadDetokenize(request.body, FuzzedModel()).IgnoreError();
  }
  const auto read =
      request.path == "/v1/embeddings"
          ? ReadEmbeddings(request.body, FuzzedModel())
          : ReadOpenAiRequest(request.body, request.path == "/v1/chat/completions", FuzzedModel());
  if (!read.ok()) return check(read.status());
  TREADLE_CHECK(!read->prompts.empty());
  for (size_t i = 0; i < read->prompts.size(); ++i) {
    const auto valid = ValidateRequest(read->For(i), FuzzedModel(),
                                       {.max_batch_size = 4, .pooling = Pooling::kMean}, 1);
    if (!valid.ok()) check(valid.status());
  }
}

void Run(std::string_view bytes) {
  const Taken whole = Take(bytes, bytes.size() + 1);
  for (const size_t cut : {1, 7}) {
    const Taken pieces = Take(bytes, cut);
    TREADLE_CHECK(pieces.refusal == whole.refusal);
    TREADLE_CHECK(pieces.request.has_value() == whole.request.has_value());
    if (!whole.request) continue;
    TREADLE_CHECK(pieces.request->path == whole.request->path);
    TREADLE_CHECK(pieces.request->query == whole.request->query);
    TREADLE_CHECK(pieces.request->headers == whole.request->headers);
    TREADLE_CHECK(pieces.request->body == whole.request->body);
  }
  if (whole.request) Read(*whole.request);
}

std::vector<std::string> Seeds() {
  const auto post = [](const std::string& path, const std::string& body) {
    return Str("POST ", path, " HTTP/1.1\r\nHost: a\r\nContent-Length: ", body.size(), "\r\n\r\n",
               body);
  };
  return {
      post(
          "/v1/completions",
          R"({"model":"","prompt":["ab","b"],"max_tokens":3,"n":2,"stop":["a"],"logprobs":1,)"
          R"("logit_bias":{"1":-3.5},"seed":7,"stream":true,"stream_options":{"include_usage":true}})"),
      post("/v1/chat/completions",
           R"({"messages":[{"role":"user","content":[{"type":"text","text":"ab"}]}],"tools":[{)"
           R"("type":"function","function":{"name":"f","parameters":{"type":"object"}}}],)"
           R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}})"),
      post("/v1/embeddings", R"({"input":[[1,2],[3]],"encoding_format":"base64"})"),
      post("/tokenize", R"({"prompt":"abba","add_special_tokens":false})"),
      post("/detokenize", R"({"tokens":[1,2,257]})"),
      "POST /v1/completions?a=b%20c HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue"
      "\r\n\r\n10;x=y\r\n{\"prompt\": \"ab\"}\r\n0\r\nTrailer: t\r\n\r\n"};
}

}  // namespace

const FuzzTarget kHttpRequestsTarget = {"http_requests", 2048, Seeds, Run};

}  // namespace treadle
