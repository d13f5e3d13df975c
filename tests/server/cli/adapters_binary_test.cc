// `treadle serve --lora`: adapters by name, over gRPC and HTTP, in one process and in several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>

#include "tests/server/cli/served_binary.h"
#include "tests/server/http/http_exchange.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

const std::string kBase = TREADLE_TESTDATA "/models/llama-grouped";
const std::string kAdapters = TREADLE_TESTDATA "/adapters/";
constexpr char kOperator[] = "operator-0123456789ab";
constexpr char kUser[] = "user-0123456789abcdef";

std::string WithKey(const std::string& key) { return "Authorization: Bearer " + key + "\r\n"; }

// The greedy tokens behind a prompt, with the log probability of each.
std::vector<float> Ask(const ServedBinary& server, const std::string& adapter) {
  v1::GenerateRequest request = GreedyRequest(12);
  request.mutable_token_ids()->mutable_ids()->Add(5);
  for (int id = 0; id < 20; ++id) request.mutable_token_ids()->add_ids(id * 7 % 131);
  request.mutable_response()->set_logprobs(0);
  request.set_adapter(adapter);
  const v1::GenerateResponse response = Generate(server, request);
  std::vector<float> answer;
  for (const int32_t id : response.output().token_ids()) answer.push_back(static_cast<float>(id));
  for (const auto& token : response.output().logprobs()) answer.push_back(token.logprob());
  return answer;
}

std::vector<std::string> Flags(const std::string& more = {}) {
  std::vector<std::string> words = Treadle(more);
  words.erase(words.begin());
  words.insert(words.end(), {"--model", kBase, "--lora", "one=" + kAdapters + "llama", "--lora-dir",
                             kAdapters.substr(0, kAdapters.size() - 1)});
  return words;
}

TEST(AdaptersBinary, AnswersAreTheSameInSeveralProcessesAndBesideOthers) {
  std::vector<std::vector<float>> first;
  const std::string exact = std::string(ServedBinary::kGrpcOnly) + "--compute exact --threads 1 ";
  for (const char* const flags : {"", "--pipeline-parallel 2", "--max-loras 1"}) {
    ServedBinary server(exact + flags, Flags());
    std::vector<std::vector<float>> answers;
    for (const char* const name :
         {"", "one", "llama-second", "llama", "llama-bf16", "soft-llama"}) {
      answers.push_back(Ask(server, name));
      EXPECT_FALSE(answers.back().empty());
    }
    EXPECT_NE(answers[0], answers[1]);
    EXPECT_NE(answers[1], answers[2]);
    EXPECT_EQ(answers[1], answers[3]);  // one adapter of two names
    EXPECT_NE(answers[5], answers[0]);
    // A prompt is cached for each of them.
    EXPECT_EQ(Ask(server, "llama-second"), answers[2]);
    EXPECT_EQ(Ask(server, "soft-llama"), answers[5]);
    EXPECT_EQ(Ask(server, ""), answers[0]);
    if (first.empty()) first = answers;
    EXPECT_EQ(answers, first) << flags;
  }
}

TEST(AdaptersBinary, ARecordingRunsAgainWithTheSameAdapters) {
  const TestFolder folder;
  std::filesystem::copy(kAdapters + "llama", folder / "mine");
  const std::string record = folder / "record";
  const std::vector<std::string> words = {"--model",  kBase, "--lora", "mine=" + (folder / "mine"),
                                          "--record", record};
  {
    ServedBinary server(std::string(ServedBinary::kGrpcOnly) + "--threads 1", words);
    EXPECT_NE(Ask(server, "mine"), Ask(server, ""));
    EXPECT_EQ(server.Stop(), 0);
  }
  RunToEnd(Treadle("replay", {record}), 0);
  // With another one in its place nothing is run.
  std::filesystem::remove_all(folder / "mine");
  std::filesystem::copy(kAdapters + "llama-bf16", folder / "mine");
  EXPECT_THAT(RunToEnd(Treadle("replay", {record}), 2), HasSubstr("the recording had"));
}

// The rest of a stored answer, after a restart.
grpc::Status ResumeStatus(const ServedBinary& server) {
  v1::ResumeRequest request;
  request.set_request_id("stored");
  grpc::ClientContext context;
  const auto reader = server.stub().Resume(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  return reader->Finish();
}

TEST(AdaptersBinary, AStoredRequestGoesOnWithTheSameContentsAlone) {
  const TestFolder folder;
  std::filesystem::copy(kAdapters + "llama", folder / "mine");
  const std::vector<std::string> words = {"--model",   kBase,
                                          "--lora",    "mine=" + (folder / "mine"),
                                          "--durable", folder.Folder("stored")};
  const std::string flags = std::string(ServedBinary::kGrpcOnly) + "--threads 1";
  {
    ServedBinary server(flags, words);
    v1::GenerateRequest request = GreedyRequest(8);
    request.mutable_token_ids()->add_ids(5);
    request.set_request_id("stored");
    request.set_adapter("mine");
    Generate(server, request);
  }
  {
    ServedBinary server(flags, words);
    const grpc::Status status = ResumeStatus(server);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  std::filesystem::remove_all(folder / "mine");
  std::filesystem::copy(kAdapters + "llama-bf16", folder / "mine");
  ServedBinary server(flags, words);
  const grpc::Status status = ResumeStatus(server);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("it was accepted with"));
}

// log(softmax(logits)[token])
double LogProbability(std::span<const float> logits, int32_t token) {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit});
  return double{logits[static_cast<size_t>(token)]} - std::log(sum);
}

// PEFT's log probabilities of a text behind a soft prompt, which is no part of what a client hears.
// A log probability is the difference of two values within the tolerance of logits.
TEST(AdaptersBinary, ASoftPromptIsNoText) {
  const Json oracle = Json::parse(std::ifstream(kAdapters + "soft-llama/oracle.json"));
  const std::vector<int32_t> ids = oracle["token_ids"];
  const std::vector<float> logits = ReadFloats(kAdapters + "soft-llama/logits.f32");
  const size_t vocab = logits.size() / (ids.size() + 11);
  const double tolerance = 2 * 8 * oracle["fp32_rounding"].get<double>();

  ServedBinary server(
      std::string("--metrics-listen none --compute exact --kv-dtype f32 "
                  "--max-context 64 --max-batch-tokens 16 --max-batch-size 4 --page-size 16"),
      Flags());
  Json body = {{"model", "soft-llama"},
               {"prompt", ids},
               {"max_tokens", 13},
               {"temperature", 0},
               {"prompt_logprobs", 0},
               {"ignore_eos", true},
               {"n", 2},
               {"return_token_ids", true}};
  const auto ask = [&] {
    return Exchange(server.http_port(), "POST /v1/completions", body.dump());
  };
  for (int time = 0; time < 2; ++time) {
    const auto answer = ask();
    ASSERT_EQ(answer.code, 200) << answer.text;
    EXPECT_EQ(answer.body["usage"]["prompt_tokens"], ids.size());
    const Json& choice = answer.body["choices"][0];
    EXPECT_EQ(choice["prompt_token_ids"], Json(ids));
    const Json& told = choice["prompt_logprobs"];
    ASSERT_EQ(told.size(), ids.size());
    EXPECT_TRUE(told[0].is_null());
    for (size_t i = 1; i < ids.size(); ++i) {
      const auto row = std::span(logits).subspan((11 + i - 1) * vocab, vocab);
      EXPECT_NEAR(told[i][std::to_string(ids[i])]["logprob"].get<double>(),
                  LogProbability(row, ids[i]), tolerance)
          << i;
    }
    EXPECT_EQ(choice["token_ids"], oracle["penalty 1.0"]);
    EXPECT_EQ(choice["token_ids"], answer.body["choices"][1]["token_ids"]);
  }
  body["repetition_penalty"] = 1.3;  // of the text alone
  EXPECT_EQ(ask().body["choices"][0]["token_ids"], oracle["penalty 1.3"]);
  body.erase("repetition_penalty");
  // Cached tokens are told of the text alone: 48 of 51 positions here.
  body.erase("prompt_logprobs");
  ask();
  const Json usage = ask().body["usage"];
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 48 - 11) << usage;
  // The context has room for 64 - 11 tokens of text and answer.
  body["max_tokens"] = 14;
  EXPECT_THAT(ask().text, HasSubstr("after 51 prompt tokens (11 of them the adapter's), expected "
                                    "at most 13"));
  body["truncate_prompt_tokens"] = -1;
  body["prompt"] = std::vector<int32_t>(60, 5);
  body["max_tokens"] = 1;
  EXPECT_EQ(ask().body["usage"]["prompt_tokens"], 64 - 11 - 1);
  body.erase("truncate_prompt_tokens");
  EXPECT_THAT(ask().text, HasSubstr("71 tokens (11 of them the adapter's), expected at most 63"));
}

TEST(AdaptersBinary, HttpNamesThemAsModels) {
  ServedBinary server("--metrics-listen none", Flags());
  const auto ask = [&](const std::string& model) {
    const Json body = {{"model", model},
                       {"prompt", {5, 7, 9}},
                       {"max_tokens", 6},
                       {"temperature", 0},
                       {"return_token_ids", true}};
    return Exchange(server.http_port(), "POST /v1/completions", body.dump());
  };
  const Json models = Exchange(server.http_port(), "GET /v1/models").body["data"];
  std::vector<std::string> names;
  for (const Json& model : models) names.push_back(model["id"]);
  EXPECT_THAT(names, testing::IsSupersetOf({"llama-grouped", "one", "llama-bf16", "gpt2"}));
  EXPECT_EQ(models[0].value("parent", ""), "");
  EXPECT_EQ(models[1]["parent"], "llama-grouped");
  EXPECT_EQ(Exchange(server.http_port(), "GET /v1/models/one").body["parent"], "llama-grouped");
  EXPECT_EQ(Exchange(server.http_port(), "GET /v1/models/two").code, 404);
  const auto base = ask("llama-grouped"), one = ask("one"), unknown = ask("two"),
             other = ask("gpt2");
  EXPECT_EQ(one.body["model"], "one");
  EXPECT_NE(base.body["system_fingerprint"], one.body["system_fingerprint"]);
  EXPECT_NE(base.body["choices"][0]["token_ids"], one.body["choices"][0]["token_ids"]);
  EXPECT_EQ(unknown.code, 404);
  EXPECT_EQ(other.code, 400);
  EXPECT_THAT(other.text, HasSubstr("gpt2"));
  // Without keys nobody is an operator.
  EXPECT_EQ(Exchange(server.http_port(), "POST /v1/load_lora_adapter",
                     R"({"lora_name":"x","lora_path":"/tmp"})")
                .code,
            403);
}

TEST(AdaptersBinary, OperatorsLoadAndUnload) {
  const TestFolder folder;
  const std::string keys =
      folder.Write("keys", Str(kOperator, " boss - - operator\n", kUser, " user\n"));
  ServedBinary server("--metrics-listen none --model " + kBase, {"--api-keys-file", keys});
  const auto post = [&](const std::string& path, const Json& body, const std::string& key) {
    return Exchange(server.http_port(), "POST " + path, body.dump(), WithKey(key));
  };
  const Json load = {{"lora_name", "mine"}, {"lora_path", kAdapters + "llama"}};
  EXPECT_EQ(post("/v1/load_lora_adapter", load, kUser).code, 403);
  EXPECT_EQ(post("/v1/load_lora_adapter", load, kOperator).code, 200);
  const auto refused = post("/v1/load_lora_adapter",
                            {{"lora_name", "bad"}, {"lora_path", kAdapters + "gpt2"}}, kOperator);
  EXPECT_EQ(refused.code, 400);
  EXPECT_THAT(refused.text, HasSubstr("is no matrix of a llama model"));
  EXPECT_EQ(post("/v1/load_lora_adapter",
                 {{"lora_name", "llama-grouped"}, {"lora_path", kAdapters + "llama"}}, kOperator)
                .code,
            409);
  const Json body = {{"model", "mine"}, {"prompt", {5, 7, 9}}, {"max_tokens", 2}};
  EXPECT_EQ(post("/v1/completions", body, kUser).code, 200);

  const auto with_key = [](grpc::ClientContext& context) {
    context.AddMetadata("authorization", Str("Bearer ", kOperator));
  };
  grpc::ClientContext listing, loading, unloading;
  for (grpc::ClientContext* context : {&listing, &loading, &unloading}) with_key(*context);
  v1::LoadAdapterRequest more;
  more.set_name("more");
  more.set_path(kAdapters + "llama-bf16");
  v1::LoadAdapterResponse loaded;
  EXPECT_TRUE(server.stub().LoadAdapter(&loading, more, &loaded).ok());
  v1::ListAdaptersResponse list;
  ASSERT_TRUE(server.stub().ListAdapters(&listing, {}, &list).ok());
  ASSERT_EQ(list.adapters_size(), 2);
  EXPECT_EQ(list.adapters(0).name(), "mine");
  EXPECT_TRUE(list.adapters(0).loaded());
  EXPECT_EQ(list.adapters(0).requests(), 1);
  EXPECT_EQ(list.adapters(1).rank(), 8);
  EXPECT_FALSE(list.adapters(1).loaded());
  v1::UnloadAdapterRequest mine;
  mine.set_name("mine");
  v1::UnloadAdapterResponse unloaded;
  EXPECT_TRUE(server.stub().UnloadAdapter(&unloading, mine, &unloaded).ok());
  EXPECT_EQ(post("/v1/completions", body, kUser).code, 404);
  EXPECT_EQ(post("/v1/unload_lora_adapter", {{"lora_name", "mine"}}, kOperator).code, 404);
}

TEST(AdaptersBinary, MetricsSayWhichAreInUse) {
  ServedBinary server(
      "--http-listen none --metrics-listen 127.0.0.1:0 --metrics-dialect both --max-loras 3",
      Flags());
  Ask(server, "one");
  const std::string port = WordAfter(server.listens(), "metrics at http://127.0.0.1:");
  ASSERT_NE(port, "") << server.listens();
  const std::string text = ExchangeText(std::stoi(port), "GET /metrics", "", kClose);
  EXPECT_THAT(text, HasSubstr("treadle:lora_loads_total"));
  EXPECT_THAT(text, HasSubstr("treadle:loras_loaded"));
  EXPECT_THAT(text, HasSubstr("vllm:lora_requests_info{"));
  EXPECT_THAT(text, HasSubstr("max_lora=\"3\""));
}

TEST(AdaptersBinary, ABenchmarkRunsBatchesWithoutAndWithThem) {
  const std::string adapters = kAdapters + "llama," + kAdapters + "llama-second";
  const std::string table =
      RunToEnd(Treadle("bench iteration --prompt-tokens 8 --new-tokens 4 --batch-sizes 1,3 "
                       "--repeats 1 --max-context 64 --model " +
                       kBase + " --adapters " + adapters));
  EXPECT_THAT(table, HasSubstr("  1 adapters\n"));
  EXPECT_THAT(table, HasSubstr("  2 adapters\n"));
}

TEST(AdaptersBinary, BadFlagsEndTheStart) {
  EXPECT_THAT(RunToEnd(ServedBinary::Command("--model " + kBase + " --lora x=/none"), 2),
              HasSubstr("--lora: /none: no such adapter"));
  EXPECT_THAT(RunToEnd(ServedBinary::Command("--model " + kBase + " --lora x"), 2),
              HasSubstr("--lora: has 'x', expected NAME=PATH"));
  EXPECT_THAT(RunToEnd(ServedBinary::Command("--model " + kBase + " --lora-dir /none"), 2),
              HasSubstr("--lora-dir: /none is no folder"));
}

}  // namespace
}  // namespace treadle
