// Requests over HTTP: heads and bodies, which mean the same however they are cut, and the same to
// another parser (Boost.Beast, which takes more), and then what OpenAI's APIs and Anthropic's read
// of their JSON. The first byte of an input says whose body the rest is, or that the rest is the
// request as it comes over the wire: there, most changes of a body's length leave no request.
#include <boost/beast/http.hpp>

#include "base/json_file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/anthropic/messages_request.h"
#include "server/http/http_parser.h"
#include "server/openai/openai_request.h"
#include "server/openai/scoring_request.h"
#include "server/responses/responses_request.h"
#include "server/session/request_validation.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/fuzzed_model.h"

namespace treadle {
namespace {

constexpr size_t kHeadBytes = 512, kBodyBytes = 2048;
constexpr std::string_view kPaths[] = {
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize",
    "/v1/messages",    "/v1/responses",        "/v1/score",      "/v1/rerank"};

// Nothing: the request was refused, or is not whole. `rest`: how many bytes follow it.
std::optional<HttpRequest> Take(std::string_view bytes, size_t cut, size_t& rest) {
  HttpParser parser(kHeadBytes, kBodyBytes);
  std::string waiting;
  for (; !bytes.empty() && !parser.whole(); bytes.remove_prefix(std::min(cut, bytes.size()))) {
    waiting += bytes.substr(0, cut);
    if (const auto refusal = parser.Take(waiting)) {
      TREADLE_CHECK(refusal->code >= 400 && !refusal->message.empty());
      return {};
    }
    TREADLE_CHECK(parser.body_bytes() <= kBodyBytes);
  }
  if (!parser.whole()) return {};
  rest = waiting.size() + bytes.size();
  return parser.Release();
}

absl::StatusOr<OpenAiRequest> ReadGenerating(std::string_view path, std::string_view body) {
  const ServedModel& model = FuzzedModel();
  if (path == "/v1/embeddings") return ReadEmbeddings(body, model);
  if (path == "/v1/messages") return ReadMessagesRequest(body, model);
  if (path == "/v1/score" || path == "/v1/rerank") {
    ScoringQuestion question{.rank = path == "/v1/rerank"};
    auto read = ReadScoring(body, model, question);
    TREADLE_CHECK(!read.ok() || (question.top_n >= 0 && question.first < read->prompts.size()));
    return read;
  }
  if (path != "/v1/responses") {
    return ReadOpenAiRequest(body, path == "/v1/chat/completions", model);
  }
  TREADLE_ASSIGN_OR_RETURN(ResponsesRequest read,
                           ReadResponsesRequest(body, model, [](const std::string& id) {
                             return id == "r" ? std::make_shared<const KeptResponse>() : nullptr;
                           }));
  TREADLE_CHECK(ParseJsonObject("{" + read.echo + "}", "").ok());
  return OpenAiRequest(std::move(read));
}

void Read(std::string_view path, std::string_view body) {
  const auto check = [](const absl::Status& status) { TREADLE_CHECK(!status.message().empty()); };
  if (path == "/tokenize") return ReadTokenize(body, FuzzedModel()).IgnoreError();
  if (path == "/detokenize") return ReadDetokenize(body, FuzzedModel()).IgnoreError();
  const auto read = ReadGenerating(path, body);
  if (!read.ok()) return check(read.status());
  TREADLE_CHECK(!read->prompts.empty());
  for (size_t i = 0; i < read->prompts.size(); ++i) {
    const auto valid = ValidateRequest(read->For(i), FuzzedModel(),
                                       {.max_batch_size = 4, .pooling = Pooling::kMean}, 1);
    if (!valid.ok()) check(valid.status());
  }
}

// `rest`: what follows the request in `bytes`.
void CompareWithBeast(const HttpRequest& request, std::string_view bytes, size_t rest) {
  namespace http = boost::beast::http;
  http::request_parser<http::string_body> parser;
  parser.eager(true);
  parser.header_limit(2 * kHeadBytes);
  boost::system::error_code error;
  const size_t taken = parser.put(boost::asio::buffer(bytes.data(), bytes.size()), error);
  if (error == http::error::bad_value) return;  // of Connection, which is no list of words
  TREADLE_CHECK(!error && parser.is_done() && taken + rest == bytes.size());
  TREADLE_CHECK(parser.get().body() == request.body);
}

void TakeAndRead(std::string_view bytes) {
  size_t rest = 0;
  const auto whole = Take(bytes, bytes.size() + 1, rest);
  for (const size_t cut : {1, 7}) {
    size_t ignored = 0;
    const auto pieces = Take(bytes, cut, ignored);
    TREADLE_CHECK(pieces.has_value() == whole.has_value());
    if (!whole) continue;
    TREADLE_CHECK(pieces->path == whole->path);
    TREADLE_CHECK(pieces->query == whole->query);
    TREADLE_CHECK(pieces->headers == whole->headers);
    TREADLE_CHECK(pieces->body == whole->body);
  }
  if (!whole) return;
  CompareWithBeast(*whole, bytes, rest);
  Read(whole->path, whole->body);
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const size_t path = input.Choose(std::size(kPaths) + 1);
  if (path == std::size(kPaths)) return TakeAndRead(input.Rest());
  Read(kPaths[path], input.Rest());
}

std::vector<std::string> Seeds() {
  const std::pair<size_t, const char*> bodies[] = {
      {0, R"({"model":"","prompt":["ab","b"],"max_tokens":3,"n":2,"stop":["a"],"logprobs":1,)"
          R"("logit_bias":{"1":-3.5},"seed":7,"stream":true,)"
          R"("stream_options":{"include_usage":true}})"},
      {0, R"({"prompt":"a","structured_outputs":{"json":{"type":"object","properties":{)"
          R"("a":{"enum":["x",1]},"b":{"$ref":"#/$defs/d"},)"
          R"("c":{"anyOf":[{"type":"null"},{"type":"integer","minimum":-3}]}},"required":["a"],)"
          R"("$defs":{"d":{"type":"array","items":{"type":"string","pattern":"^a"}}}}}})"},
      {0, R"({"prompt":"a","structured_outputs":{"regex":"(a|[^b-d\\d\u00e9]{2,3}?)+.\\."}})"},
      {0, R"({"prompt":"a","structured_outputs":{"grammar":"root ::= \"a\" x{2} | [^b]*\n)"
          R"(x ::= (root | \"\")?"}})"},
      {0, R"({"prompt":"a","structured_outputs":{"choice":["ab","b\""]}})"},
      {1, R"({"messages":[{"role":"user","content":[{"type":"text","text":"ab"}]}],"tools":[{)"
          R"("type":"function","function":{"name":"f","parameters":{"type":"object"}}}],)"
          R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}})"},
      {1, R"({"messages":[{"role":"assistant","tool_calls":[{"id":"i","type":"function",)"
          R"("function":{"name":"f","arguments":"{}"}}]},)"
          R"({"role":"tool","tool_call_id":"i","content":"b"}],)"
          R"("tools":[{"type":"function","function":{"name":"f","strict":true}}],)"
          R"("tool_choice":{"type":"function","function":{"name":"f"}}})"},
      {2, R"({"input":[[1,2],[3]],"encoding_format":"base64"})"},
      {3, R"({"prompt":"abba","add_special_tokens":false})"},
      {4, R"({"tokens":[1,2,257]})"},
      {7, R"({"text_1":["a","b"],"text_2":["c","d"]})"},
      {8, R"({"query":"a","documents":["b","a"],"top_n":1})"},
      {5,
       R"({"max_tokens":3,"system":[{"type":"text","text":"a"}],"messages":[{"role":"assistant",)"
       R"("content":[{"type":"tool_use","id":"i","name":"f","input":{"b":1,"a":[2.5]}}]},)"
       R"({"role":"user","content":[{"type":"tool_result","tool_use_id":"i","content":"b"},)"
       R"({"type":"text","text":"c"}]}],"tools":[{"name":"f","input_schema":{}}],)"
       R"("tool_choice":{"type":"tool","name":"f"},"stop_sequences":["a"],)"
       R"("output_config":{"format":{"type":"json_schema","schema":{}}}})"},
      {6, R"({"input":[{"role":"user","content":[{"type":"input_text","text":"a"}]},)"
          R"({"type":"function_call","call_id":"i","name":"f","arguments":"{\"b\":1}"},)"
          R"({"type":"function_call_output","call_id":"i","output":"b"}],"store":true,)"
          R"("instructions":"c","previous_response_id":"r","metadata":{"d":"e"},)"
          R"("tools":[{"type":"function","name":"f","parameters":{}}],)"
          R"("text":{"format":{"type":"json_schema","name":"n","schema":{}}}})"}};
  const auto wire = static_cast<char>(std::size(kPaths));
  std::vector<std::string> seeds = {
      wire +
          std::string(
              "POST /v1/completions?a=b%20c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
              "Expect: 100-continue\r\n\r\n10;x=\"y\\\"\"\r\n{\"prompt\": \"ab\"}\r\n0\r\n"
              "Trailer: t\r\n\r\nGET / HTTP/1.1\r\n"),
      wire +
          std::string("POST /tokenize HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\n"
                      "\r\n0\r\n\r\n"),
      wire + std::string("GET / HTTP/1.0\r\nConnection: close, keep-alive\r\nHost: a\r\n"
                         "Origin: http://a\r\nX: 1\r\nX: 2\r\n\r\n")};
  for (const auto& [path, text] : bodies) {
    const std::string body = text;
    seeds.push_back(static_cast<char>(path) + body);
    seeds.push_back(wire + Str("POST ", kPaths[path], " HTTP/1.1\r\nHost: a\r\nContent-Length: ",
                               body.size(), "\r\n\r\n", body));
  }
  return seeds;
}

}  // namespace

const FuzzTarget kHttpRequestsTarget = {"http_requests", 2048, Seeds, Run};

}  // namespace treadle
