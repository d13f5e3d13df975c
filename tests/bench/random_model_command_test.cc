// --random-model as users meet it: the engine alone, an engine with a serving loop in one process,
// and the same load over gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/server/cli/served_binary.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

constexpr char kShape[] =
    "llama-3.2-1b,layers=2,hidden=64,heads=4,kv-heads=2,ffn=128,vocab=200,context=128";
const std::vector<std::string> kTrace = {"--num-prompts",     "20",   "--request-rate", "200,inf",
                                         "--input-len",       "4:60", "--output-len",   "1:20",
                                         "--num-warmups",     "2",    "--label",        "x",
                                         "--max-concurrency", "7",    "--json"};

struct Result {
  int code = 0;
  std::string output;  // both streams

  // The JSON line among them.
  Json Report() const {
    const size_t begin = output.find("{\"");
    if (begin == std::string::npos) return {};
    return Json::parse(output.substr(begin, output.find('\n', begin) - begin));
  }
};

// "kernels" is of treadle-bench, the others of treadle.
Result Bench(std::vector<std::string> arguments, const std::vector<std::string>& more = {}) {
  std::vector<std::string> program = {TREADLE_BENCH_BINARY};
  if (arguments.empty() || arguments[0] != "kernels") program = {TREADLE_BINARY, "bench"};
  arguments.insert(arguments.begin(), program.begin(), program.end());
  arguments.insert(arguments.end(), more.begin(), more.end());
  ChildProcess child(arguments);
  const int code = child.Wait();
  return {code, child.output()};
}

// The products of one layer of the model, in two formats, one of which is shown.
Result Kernels(const std::string& model) {
  return Bench({"kernels", "--random-model", model, "--formats", "bf16,nf4", "--rows", "1,3",
                "--filter", "/nf4/", "--threads", "1", "--seconds-per-case", "0.001",
                "--cold-memory", "1M", "--json"});
}

std::set<std::string> Keys(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

TEST(RandomModelCommand, IterationRunsAnyShapeInAnyFormat) {
  for (const std::string weights : {"nf4", "int8,lm_head=q4_0"}) {
    const Result result = Bench({"iteration", "--random-model", kShape, "--weights", weights,
                                 "--prompt-tokens", "12", "--new-tokens", "4", "--batch-sizes",
                                 "1,3", "--repeats", "1", "--threads", "1", "--json"});
    ASSERT_EQ(result.code, 0) << result.output;
    const Json report = result.Report();
    ASSERT_EQ(report["rows"].size(), 2u);
    EXPECT_EQ(report["model"], std::string("random:") + kShape);
    EXPECT_GT(report["weight_bytes"].get<int64_t>(), 0);
    EXPECT_GT(report["rows"][1]["decode_tokens_per_second"].get<double>(), 0);
  }
}

TEST(RandomModelCommand, KernelsOfALayer) {
  const Result result = Kernels(kShape);
  ASSERT_EQ(result.code, 0) << result.output;
  const Json report = Json::parse(result.output.substr(result.output.find('{')));
  std::vector<std::string> names;
  for (const Json& row : report["rows"]) {
    names.push_back(row["name"]);
    EXPECT_GT(row["seconds"].get<double>(), 0);
    EXPECT_GT(row["bandwidth_share"].get<double>(), 0);
  }
  EXPECT_THAT(names, testing::ElementsAre("qkv/nf4/rows=1", "qkv/nf4/rows=3", "out/nf4/rows=1",
                                          "out/nf4/rows=3", "up/nf4/rows=1", "up/nf4/rows=3",
                                          "down/nf4/rows=1", "down/nf4/rows=3"));
}

constexpr char kExperts[] =
    "qwen3-30b-a3b,layers=2,hidden=64,heads=4,kv-heads=2,ffn=64,vocab=200,context=128,experts=12";

TEST(RandomModelCommand, KernelsOfALayerWithExperts) {
  const Result result = Kernels(kExperts);
  ASSERT_EQ(result.code, 0) << result.output;
  const Json report = Json::parse(result.output.substr(result.output.find('{')));
  std::vector<std::string> names;
  for (const Json& row : report["rows"]) names.push_back(row["name"]);
  EXPECT_THAT(names,
              testing::ElementsAre("qkv/nf4/rows=1", "qkv/nf4/rows=3", "out/nf4/rows=1",
                                   "out/nf4/rows=3", "experts/nf4/rows=1", "experts/nf4/rows=3"));
  // Three matrices of 64 x 64, 4.5 bits a weight, of the 8 experts that the row uses.
  const Json& one = report["rows"][4];
  EXPECT_NEAR(one["gigabytes_per_second"].get<double>() * one["seconds"].get<double>(),
              8 * 3 * 64 * 64 * 4.5 / 8 * 1e-9, 1e-12);
}

TEST(RandomModelCommand, IterationSaysHowManyExpertsWereUsed) {
  const Result result =
      Bench({"iteration", "--random-model", kExperts, "--prompt-tokens", "12", "--new-tokens", "4",
             "--batch-sizes", "1,3", "--repeats", "1", "--threads", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.output;
  const Json report = result.Report();
  EXPECT_EQ(report["rows"][0]["decode_experts_per_layer"], 8);
  EXPECT_GT(report["rows"][1]["decode_experts_per_layer"], 8);
  EXPECT_LE(report["rows"][1]["decode_experts_per_layer"], 12);
}

TEST(RandomModelCommand, ServeInProcessGivesWhatAServerGives) {
  ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 1 --model random:", kShape));
  const Result remote = Bench({"serve", "--target", server.address()}, kTrace);
  ASSERT_EQ(remote.code, 0) << remote.output;
  const Json expected = remote.Report();
  EXPECT_EQ(expected["completed"], 20);
  for (const char* policy : {"fcfs", "request-level"}) {
    const Result local = Bench({"serve", "--in-process", "--random-model", kShape, "--policy",
                                policy, "--threads", "1", "--max-batch-size", "4"},
                               kTrace);
    ASSERT_EQ(local.code, 0) << local.output;
    const Json report = local.Report();
    EXPECT_EQ(report["target"], "in-process");
    EXPECT_EQ(Keys(report), Keys(expected));
    for (const char* key : {"completed", "failed", "total_input_tokens", "total_output_tokens"}) {
      EXPECT_EQ(report[key], expected[key]) << policy << " " << key;
    }
  }
}

TEST(RandomModelCommand, WrongUseSaysWhatIsWrong) {
  struct Row {
    std::vector<std::string> arguments;
    const char* message;
  };
  const Row rows[] = {
      {{"iteration", "--random-model", "llama-9"}, "no shape is named 'llama-9'"},
      {{"iteration", "--random-model", "gpt2-124m", "--model", "x"},
       "--model excludes --random-model"},
      {{"iteration"}, "--model is missing"},
      {{"kernels", "--rows", "1"}, "--rows requires --random-model"},
      {{"kernels", "--random-model", "gpt2-124m", "--formats", "nf5"}, "nf5"},
      {{"kernels", "--random-model", kShape, "--crossover-rows", "8"}, "only cuda has kernels"},
      {{"kernels", "--cold-memory", "much"}, "--cold-memory: 'much'"},
      {{"serve", "--in-process"}, "--model is missing"},
      {{"serve", "--random-model", "gpt2-124m"}, "--random-model requires --in-process"},
      {{"serve", "--weights", "nf4"}, "--weights requires --in-process"},
      {{"serve", "--policy", "fcfs"}, "--policy requires --in-process"},
      {{"serve", "--in-process", "--target", "localhost:1"}, "--target excludes --in-process"},
      {{"serve", "--in-process", "--random-model", kShape, "--policy", "lifo"}, "lifo"},
      {{"serve", "--in-process", "--random-model", kShape, "--max-context", "40"},
       "the server's context is 40"},
  };
  for (const Row& row : rows) {
    const Result result = Bench(row.arguments);
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr(row.message));
  }
}

}  // namespace
}  // namespace treadle
