// `treadle simulate` as users run it: what a server recorded of its plans is made again by the same
// scheduler on an engine of virtual time, and bad input is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Simulate(const std::string& words, int code) {
  return RunToEnd(Treadle("simulate " + words), code);
}

// Twelve requests of other lengths, three clients at a time, to a server that records.
void Record(const std::string& file, const std::string& flags) {
  TinyModelOptions tiny;
  tiny.layers = 4;
  tiny.context = 512;
  ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 1 --max-batch-size 2 ",
                          "--max-batch-tokens 8 ", flags, " --record ", file, " --model ",
                          OwnModel(tiny)));
  std::vector<std::thread> clients;
  for (int client = 0; client < 3; ++client) {
    clients.emplace_back([&server, client] {
      for (int i = 0; i < 4; ++i) {
        v1::GenerateRequest request = GreedyRequest(1 + (7 * client + 5 * i) % 23);
        request.set_text(std::string(static_cast<size_t>(3 + 9 * i + client), 'a'));
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
        v1::GenerateResponse response;
        const auto reader = server.stub().GenerateStream(&context, request);
        while (reader->Read(&response)) {
        }
        const grpc::Status status = reader->Finish();
        EXPECT_TRUE(status.ok()) << status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  ASSERT_EQ(server.Stop(), 0) << server.output();
}

TEST(SimulateBinary, MakesARecordingsPlansAgain) {
  const char* const servers[] = {
      "", "--engine-depth 1 --prefix-cache off", "--pipeline-parallel 2",
      "--policy faster-transformer --microbatch-size 1 --pipeline-parallel 2"};
  for (size_t i = 0; i < std::size(servers); ++i) {
    SCOPED_TRACE(servers[i]);
    const std::string file = OwnFolder() / Str("recording", i);
    Record(file, Str("--speculate off ", servers[i]));
    EXPECT_THAT(Simulate("--recording " + file, 0),
                AllOf(HasSubstr("plans of 13 requests are made again"),  // the warm-up is one
                      testing::Not(HasSubstr("; plan "))));
  }
  // Another scheduler's are others, and the first one that differs is told.
  const std::string file = OwnFolder() / "recording0";
  EXPECT_THAT(Simulate("--policy request-level --recording " + file, 1),
              AllOf(HasSubstr("; plan "), HasSubstr("; recorded sequence ")));
}

TEST(SimulateBinary, RefusesRecordingsThatDoNotSayEnough) {
  const std::string file = OwnFolder() / "auto";
  Record(file, "--speculate ngram");
  EXPECT_THAT(Simulate("--recording " + file, 2),
              HasSubstr("was recorded with --speculate on or auto"));
  EXPECT_THAT(Simulate("--recording /nonexistent", 2), HasSubstr("/nonexistent"));
}

// Measurements depend on the machine; the use of all of them does not.
TEST(SimulateBinary, MeasuresThisMachine) {
  const std::string report = Simulate(
      "--calibrate --max-context 256 --input-len 8 --output-len 4 --num-prompts 5 --model " +
          OwnModel(),
      0);
  EXPECT_THAT(report, AllOf(HasSubstr("an iteration takes "), HasSubstr("request throughput"),
                            HasSubstr("iterations of ")));
  EXPECT_THAT(Simulate("--calibrate --count 2 --goodput itl:5 --model " + OwnModel(), 2),
              HasSubstr("--calibrate is of one machine"));
}

TEST(SimulateBinary, TakesTheMachineOfALedger) {
  const TestFolder folder;
  const std::string ledger = folder / "ledger.jsonl";
  {
    ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 1 --speculate off --ledger-file ",
                            ledger, " --model ", OwnModel()));
    Generate(server, GreedyRequest(60));
    ASSERT_EQ(server.Stop(), 0) << server.output();
  }
  const std::string of = "--max-context 256 --input-len 8 --output-len 4 --num-prompts 5 --model " +
                         OwnModel() + " --ledger ";
  EXPECT_THAT(Simulate(of + ledger, 0),
              AllOf(HasSubstr("iterations of " + ledger), HasSubstr("request throughput")));
  EXPECT_THAT(Simulate(of + ledger + " --count 2 --goodput itl:5", 2),
              HasSubstr("--ledger is of one machine"));
  EXPECT_THAT(Simulate(of + "/none", 2), HasSubstr("/none: cannot be opened"));
}

TEST(SimulateBinary, ReportsATraceAndNamesWhatIsWrong) {
  EXPECT_THAT(Simulate("--model llama-3.1-8b --hardware h100 --num-prompts 20", 0),
              AllOf(HasSubstr("NVIDIA H100 data sheet"), HasSubstr("request throughput"),
                    HasSubstr("stages at work")));
  EXPECT_THAT(Simulate("--model llama-3.1-8b --hardware h100 --count 2 --num-prompts 20 "
                       "--goodput ttft:500,itl:50 --max-batch-size 8,16",
                       0),
              AllOf(HasSubstr("requests/s"), HasSubstr("as stored")));
  const std::string page = OwnFolder() / "sweep.html";
  Simulate(
      "--model llama-3.1-8b --count 2 --num-prompts 20 --goodput ttft:500,itl:50 "
      "--max-batch-size 8 --sweep " +
          page,
      0);
  std::stringstream drawn;
  drawn << std::ifstream(page).rdbuf();
  EXPECT_THAT(drawn.str(), AllOf(HasSubstr("2 x 1, batch 8"), HasSubstr("1 x 2, batch 8"),
                                 HasSubstr("ttft at most 500 ms"), HasSubstr("<svg")));
  const std::pair<const char*, const char*> bad[] = {
      {"", "--model is missing, expected a model's file or folder, or a shape: llama-3.1-8b"},
      {"--model none", "no shape is named 'none'"},
      {"--model llama-3.1-8b --hardware tpu", "expected one of: a100-40g, a100-80g, h100, h200"},
      {"--model llama-3.1-8b --count 2", "--goodput is missing"},
      {"--model llama-3.1-8b --goodput ttft", "--goodput ttft: expected ttft:MS"},
      {"--model llama-3.1-8b --policy sjf", "scheduling policy 'sjf' is unknown"},
      {"--model llama-3.1-8b --weights nf5", "nf5"},
      {"--model llama-3.1-8b --input-len 200000", "has 200"},
      {"--model llama-3.1-8b --max-batch-size 1,2", "are for a search, with --count"},
      {"--figure 10d", "figure '10d' is unknown"},
  };
  for (const auto& [words, what] : bad) {
    SCOPED_TRACE(words);
    EXPECT_THAT(Simulate(words, 2), HasSubstr(what));
  }
  EXPECT_THAT(Simulate("--model orca-175b", 1), HasSubstr("expected at least 5 of them"));
  const TestFolder folder;
  const std::string turns = folder.path() + "/turns.json";
  std::ofstream(turns) << R"([{"conversations": [{"from": "human", "value": "a"},
                                                 {"from": "gpt", "value": "b"}]}])";
  EXPECT_THAT(Simulate("--model llama-3.1-8b --trace " + turns, 2),
              HasSubstr("has conversations, expected a trace of lengths and arrivals"));
}

}  // namespace
}  // namespace treadle
