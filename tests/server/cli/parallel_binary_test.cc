// The treadle binary over several ranks and worker processes: the same answers as one process
// gives, and what its users see when a worker dies, hangs, or does not fit.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"
#include "tests/server/cli/streamed_answers.h"
#include "tests/support/process_losses.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

const char kBinary[] = TREADLE_BINARY;
constexpr int kLongAnswer = 3000;

// For this process alone.
const std::string& Directory() {
  static const std::string path = [] {
    std::string own = testing::TempDir() + "/parallel-" + std::to_string(getpid());
    std::filesystem::create_directories(own);
    return own;
  }();
  return path;
}

// Big enough that an answer is under way for a while.
const std::string& Model() {
  static const std::string path = [] {
    TinyModelOptions options;
    options.layers = 4;
    options.hidden = 128;
    options.ffn_hidden = 256;
    options.context = 4096;
    auto written = WriteTinyLlamaGguf(Directory(), options);
    TREADLE_CHECK(written.ok());
    return *written;
  }();
  return path;
}

std::vector<std::string> Command(const char* command, const std::vector<std::string>& more) {
  std::vector<std::string> all = {kBinary, command};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Whether the process goes within a minute.
bool Goes(int process) {
  for (int i = 0; i < 600; ++i) {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    if (!std::getline(file, line) || line[line.rfind(')') + 2] == 'Z') return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return false;
}

class Server {
 public:
  explicit Server(const std::vector<std::string>& more) : child_(Arguments(more)) {
    const std::string line = child_.WaitForLine("listening on 127.0.0.1:");
    const size_t begin = line.find("127.0.0.1:");
    if (begin == std::string::npos) return;
    address_ = line.substr(begin, line.find(' ', begin) - begin);
    stub_ =
        v1::Inference::NewStub(grpc::CreateChannel(address_, grpc::InsecureChannelCredentials()));
    workers_ = ChildrenOf(child_.pid());
  }

  bool serves() const { return stub_ != nullptr; }
  ChildProcess& child() { return child_; }
  const std::vector<int>& workers() const { return workers_; }  // when it began, by stage

  // The tokens of an answer, or why there is none.
  grpc::Status Ask(int tokens, std::vector<int>* answer = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    const auto reader = stub_->GenerateStream(&context, Request(tokens));
    return Read(*reader, answer);
  }

  // Does something to the server while a long answer is under way; how that answer ends.
  grpc::Status AskAndDisturb(const std::function<void()>& disturb,
                             std::vector<int>* answer = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    const auto reader = stub_->GenerateStream(&context, Request(kLongAnswer));
    return Read(*reader, answer, disturb);
  }
  // A long answer is the same, whatever is done meanwhile.
  void ExpectUndisturbed(const std::function<void()>& disturb) {
    std::vector<int> undisturbed, answer;
    EXPECT_TRUE(Ask(kLongAnswer, &undisturbed).ok());
    const grpc::Status status = AskAndDisturb(disturb, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer.size(), size_t{kLongAnswer});
    EXPECT_EQ(answer, undisturbed);
  }

  grpc::Status Ask(const v1::GenerateRequest& request, Said& said,
                   std::atomic<int>* messages = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
    const auto reader = stub_->GenerateStream(&context, request);
    for (v1::GenerateResponse message; reader->Read(&message);) {
      if (messages != nullptr) ++*messages;
      Hear(message, said);
    }
    return reader->Finish();
  }

  v1::GetModelInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetModelInfoResponse info;
    stub_->GetModelInfo(&context, {}, &info);
    return info;
  }

 private:
  // Calls `then` after the first message.
  static grpc::Status Read(grpc::ClientReader<v1::GenerateResponse>& reader,
                           std::vector<int>* answer, std::function<void()> then = {}) {
    for (v1::GenerateResponse message; reader.Read(&message);) {
      const auto& tokens = message.output().token_ids();
      if (answer != nullptr) answer->insert(answer->end(), tokens.begin(), tokens.end());
      if (then) std::exchange(then, {})();
    }
    return reader.Finish();
  }
  static std::vector<std::string> Arguments(const std::vector<std::string>& more) {
    std::vector<std::string> all =
        Command("serve", {"--model", Model(), "--listen", "127.0.0.1:0", "--http-listen", "none",
                          "--metrics-listen", "none", "--threads", "2", "--pin-threads", "off"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static v1::GenerateRequest Request(int tokens) {
    v1::GenerateRequest request;
    request.set_text("Once upon a time");
    request.mutable_sampling()->set_temperature(0);
    request.mutable_stopping()->set_max_new_tokens(tokens);
    request.mutable_stopping()->set_ignore_eos(true);
    return request;
  }

  ChildProcess child_;
  std::string address_;
  std::unique_ptr<v1::Inference::Stub> stub_;
  std::vector<int> workers_;
};

#define ASSERT_SERVES(server) ASSERT_TRUE((server).serves()) << (server).child().output()

std::vector<int> AnswerInProcess(const std::vector<std::string>& more) {
  std::vector<std::string> command =
      Command("generate", {"--model", Model(), "--prompt", "Once upon a time", "--max-new-tokens",
                           "40", "--ignore-eos", "--json", "--threads", "2"});
  command.insert(command.end(), more.begin(), more.end());
  ChildProcess child(command);
  if (child.Wait() != 0) return {};
  const std::string& output = child.output();
  return nlohmann::json::parse(
      output.substr(output.find('{'), output.rfind('}') + 1 - output.find('{')))["token_ids"];
}

class RemoveDirectory : public testing::Environment {
  // For the sockets of servers that are killed, too.
  void SetUp() override { setenv("TMPDIR", Directory().c_str(), /*overwrite=*/1); }
  void TearDown() override { std::filesystem::remove_all(Directory()); }
};
const auto* const kRemoveDirectory = testing::AddGlobalTestEnvironment(new RemoveDirectory);

TEST(ParallelBinary, WorkersGiveTheSameAnswerAsOneProcess) {
  const std::vector<int> expected = AnswerInProcess({});
  ASSERT_EQ(expected.size(), 40u);
  EXPECT_EQ(AnswerInProcess({"--pipeline-parallel", "3"}), expected);
  EXPECT_EQ(AnswerInProcess({"--pipeline-parallel", "3", "--plan-forwarding", "late"}), expected);
  for (const char* from : {"file", "master"}) {
    Server server({"--pipeline-parallel", "2", "--weights-from", from});
    ASSERT_SERVES(server);
    EXPECT_EQ(server.workers().size(), 2u);
    std::vector<int> answer;
    const grpc::Status status = server.Ask(40, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer, expected);
    EXPECT_THAT(server.Info().backend(), HasSubstr("2 stages of cpu"));
    EXPECT_THAT(server.child().output(), HasSubstr("pipeline-parallel = 2\n"));
    server.child().Signal(SIGTERM);
    EXPECT_EQ(server.child().Wait(), 0) << server.child().output();
    for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
  }
}

// Ranks and stages together: any split into stages gives the same tokens.
TEST(ParallelBinary, TheWholeGridAnswers) {
  for (const char* ranks : {"1", "2", "4"}) {
    const std::vector<int> expected = AnswerInProcess({"--tensor-parallel", ranks});
    EXPECT_EQ(expected.size(), 40u);
    for (const char* stages : {"2", "3", "4"}) {
      EXPECT_EQ(AnswerInProcess({"--tensor-parallel", ranks, "--pipeline-parallel", stages}),
                expected)
          << stages << " stages of " << ranks << " ranks";
    }
  }
}

TEST(ParallelBinary, RanksShareOneProcess) {
  Server server({"--tensor-parallel", "2", "--compute", "exact"});
  ASSERT_SERVES(server);
  EXPECT_TRUE(server.workers().empty());
  EXPECT_THAT(server.Info().backend(), HasSubstr("2 ranks of cpu"));
  std::vector<int> answer;
  EXPECT_TRUE(server.Ask(40, &answer).ok());
  EXPECT_EQ(answer.size(), 40u);
  std::vector<int> again;
  EXPECT_TRUE(server.Ask(40, &again).ok());
  EXPECT_EQ(again, answer);
}

TEST(ParallelBinary, AWorkerThatDiesIsReplaced) {
  Server server({"--pipeline-parallel", "2"});
  ASSERT_SERVES(server);
  ASSERT_EQ(server.workers().size(), 2u);
  for (const int victim : {1, 0}) {
    const std::vector<int> workers = ChildrenOf(server.child().pid());
    ASSERT_EQ(workers.size(), 2u);
    server.ExpectUndisturbed([&] { kill(workers[static_cast<size_t>(victim)], SIGKILL); });
  }
  const std::vector<int> workers = ChildrenOf(server.child().pid());
  server.child().Signal(SIGTERM);
  EXPECT_EQ(server.child().Wait(), 0);
  EXPECT_THAT(server.child().output(), HasSubstr("was killed by signal 9; it is started again"));
  for (const int worker : workers) EXPECT_TRUE(Goes(worker));
}

TEST(ParallelBinary, AWorkerThatHangsIsReplaced) {
  Server server({"--pipeline-parallel", "2"});
  ASSERT_SERVES(server);
  ASSERT_EQ(server.workers().size(), 2u);
  const int victim = server.workers()[1];
  server.ExpectUndisturbed([&] { kill(victim, SIGSTOP); });
  server.child().Signal(SIGTERM);
  EXPECT_EQ(server.child().Wait(), 0);
  EXPECT_TRUE(Goes(victim)) << server.child().output();
}

// Requests of every kind, in the prompt, while decoding and while another loss is being recovered
// from. TREADLE_KILLS: how many workers are lost, in every way there is.
TEST(ParallelBinary, WorkersThatDieAtAnyTimeChangeNoAnswer) {
  const char* const asked = std::getenv("TREADLE_KILLS");
  const int kills = asked == nullptr ? 12 : std::atoi(asked);
  Server server({"--pipeline-parallel", "3", "--max-batch-tokens", "48", "--kv-dtype", "int8"});
  ASSERT_SERVES(server);
  std::vector<Said> undisturbed(kRequestKinds);
  for (int kind = 0; kind < kRequestKinds; ++kind) {
    const grpc::Status status = server.Ask(RequestOfKind(kind), undisturbed[kind]);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  std::atomic<bool> done = false;
  std::atomic<int> next = 0, answers = 0, messages = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      while (!done) {
        const int kind = next++ % kRequestKinds;
        Said said;
        const grpc::Status status = server.Ask(RequestOfKind(kind), said, &messages);
        EXPECT_TRUE(status.ok()) << kind << ": " << status.error_message();
        EXPECT_TRUE(said == undisturbed[kind]) << kind;
        ++answers;
      }
    });
  }
  std::mt19937 random(1);
  std::array<int, std::size(kProcessLosses)> happened = {};
  for (int killed = 0; killed < kills;) {
    // Two of three come once streams have gone on after the last one.
    const int heard = messages;
    const bool patient = random() % 3 != 0;
    for (int wait = 0; patient && messages < heard + 20 && wait < 6000; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
    const std::vector<int> workers = ChildrenOf(server.child().pid());
    if (workers.empty()) continue;
    const size_t loss = random() % std::size(kProcessLosses);
    kProcessLosses[loss].happen(workers[random() % workers.size()]);
    ++happened[loss];
    ++killed;
  }
  done = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answers, 0);
  for (size_t loss = 0; loss < happened.size(); ++loss) {
    std::cout << happened[loss] << " workers " << kProcessLosses[loss].name << "\n";
  }
  std::cout << "beside " << answers << " answers\n";
  server.child().Signal(SIGTERM);
  EXPECT_EQ(server.child().Wait(), 0);
}

// A crashed worker leaves its successor an empty memory. The successor is lost in an epoch that
// never stands, and leaves that memory to the next one.
TEST(ParallelBinary, AnEmptyMemoryIsNeverTakenForAFullOne) {
  for (const int crash : {SIGABRT, SIGSEGV}) {
    Server server({"--pipeline-parallel", "2"});
    ASSERT_SERVES(server);
    ASSERT_EQ(server.workers().size(), 2u);
    const int stopped = server.workers()[0], crashed = server.workers()[1];
    server.ExpectUndisturbed([&] {
      kill(stopped, SIGSTOP);
      kill(crashed, crash);
      int successor = crashed;
      for (int wait = 0; successor == crashed && wait < 6000; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (const int worker : ChildrenOf(server.child().pid())) {
          if (worker != stopped && worker != crashed) successor = worker;
        }
      }
      ASSERT_NE(successor, crashed);
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      kill(successor, SIGKILL);
      kill(stopped, SIGCONT);
    });
  }
}

TEST(ParallelBinary, OrWhatRanEnds) {
  Server server({"--pipeline-parallel", "2", "--on-worker-loss", "restart"});
  ASSERT_SERVES(server);
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] { kill(server.workers()[1], SIGKILL); });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(lost.error_message(), HasSubstr("treadle-")) << "names the worker's address";
  const grpc::Status back = server.Ask(40);
  EXPECT_TRUE(back.ok()) << back.error_message();
}

TEST(ParallelBinary, OrTheServerEnds) {
  Server server({"--pipeline-parallel", "2", "--on-worker-loss", "fail"});
  ASSERT_SERVES(server);
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] { kill(server.workers()[0], SIGKILL); });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.child().Wait(), 1);
  EXPECT_THAT(server.child().output(), HasSubstr("treadle serve: the engine failed: "));
  for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
}

TEST(ParallelBinary, WorkersDoNotOutliveAServerThatIsKilled) {
  Server server({"--pipeline-parallel", "2"});
  ASSERT_SERVES(server);
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] {
    kill(server.workers()[1], SIGSTOP);
    server.child().Signal(SIGKILL);
  });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE) << lost.error_message();
  for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
}

// A worker started by hand.
class HandWorker {
 public:
  explicit HandWorker(const std::vector<std::string>& more,
                      const std::string& listen = "127.0.0.1:0")
      : child_(Arguments(listen, more)) {
    const std::string line = child_.WaitForLine("listening on ");
    if (!line.empty()) address_ = line.substr(line.find("127.0.0.1"));
  }
  const std::string& address() const { return address_; }
  ChildProcess& child() { return child_; }

 private:
  static std::vector<std::string> Arguments(const std::string& listen,
                                            const std::vector<std::string>& more) {
    std::vector<std::string> all = Command("worker", {"--listen", listen, "--threads", "1"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  ChildProcess child_;
  std::string address_;
};

TEST(ParallelBinary, WorkersStartedByHandServeOneServerAfterTheOther) {
  const std::vector<int> expected = AnswerInProcess({});
  HandWorker first({"--model", Model()});
  HandWorker second({});  // gets its weights from the master
  ASSERT_NE(first.address(), "") << first.child().output();
  ASSERT_NE(second.address(), "") << second.child().output();
  for (int i = 0; i < 2; ++i) {
    Server server(
        {"--workers", first.address() + "," + second.address(), "--weights-from", "master"});
    ASSERT_SERVES(server);
    EXPECT_TRUE(server.workers().empty());
    std::vector<int> answer;
    const grpc::Status status = server.Ask(40, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer, expected);
    server.child().Signal(SIGTERM);
    EXPECT_EQ(server.child().Wait(), 0) << server.child().output();
  }
  for (HandWorker* worker : {&first, &second}) {
    worker->child().Signal(SIGTERM);
    EXPECT_EQ(worker->child().Wait(), 0) << worker->child().output();
  }
}

TEST(ParallelBinary, AWorkerThatComesBackIsUsedAgain) {
  auto second = std::make_unique<HandWorker>(std::vector<std::string>{"--model", Model()});
  HandWorker first({"--model", Model()});
  const std::string address = second->address();
  Server server({"--workers", first.address() + "," + address});
  ASSERT_SERVES(server);
  server.ExpectUndisturbed([&] {
    second.reset();  // SIGKILL
    second = std::make_unique<HandWorker>(std::vector<std::string>{"--model", Model()}, address);
    EXPECT_EQ(second->address(), address) << second->child().output();
  });
}

TEST(ParallelBinary, AWorkerThatIsAskedLeavesItsStageToASpare) {
  const std::string secret = Directory() + "/secret";
  std::ofstream(secret) << "sixteen letters at least\n";
  const std::vector<std::string> known = {"--control-secret-file", secret};
  const auto more = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), known.begin(), known.end());
    return arguments;
  };
  HandWorker first(more({"--model", Model()})), second(more({"--model", Model()}));
  HandWorker spare(more({"--model", Model()}));
  const std::string workers = first.address() + "," + second.address() + "," + spare.address();
  Server server(more({"--workers", workers, "--spares", "1"}));
  ASSERT_SERVES(server);
  ChildProcess stranger(Command("drain-worker", {second.address()}));
  EXPECT_EQ(stranger.Wait(), 1);
  EXPECT_THAT(stranger.output(), HasSubstr("wants proof of its control secret"));
  server.ExpectUndisturbed([&] {
    ChildProcess asks(Command("drain-worker", more({second.address()})));
    EXPECT_EQ(asks.Wait(), 0) << asks.output();
    EXPECT_THAT(asks.output(), HasSubstr("leaves its stage"));
    EXPECT_EQ(second.child().Wait(), 0) << second.child().output();
  });
  EXPECT_NE(spare.child().WaitForLine("a master attached"), "") << "it did not take the stage";
}

TEST(ParallelBinary, WhatCannotBeIsSaidBeforeAnythingIsLoaded) {
  struct Case {
    std::vector<std::string> flags;
    const char* message;
  };
  const Case cases[] = {
      {{"--tensor-parallel", "3"}, "4 attention heads cannot be divided by 3; 2 or 4 would work"},
      {{"--pipeline-parallel", "5"}, "--pipeline-parallel is 5, expected at most 4"},
      {{"--pipeline-parallel", "3", "--workers", "a:1,b:1"}, "but --workers has 2"},
      {{"--wire", "int8"}, "with one stage nothing is sent"},
      {{"--plan-forwarding", "late"}, "with one stage nothing is passed on"},
      {{"--plan-forwarding", "never"}, "expected early or late"},
      {{"--weights-from", "master"}, "there are no workers"},
      {{"--pipeline-parallel", "2", "--device", "cpu", "--kv-dtype", "bf16"},
       "expected f16, f32 or int8 on the CPU"},
  };
  for (const Case& bad : cases) {
    std::vector<std::string> command =
        Command("serve", {"--model", Model(), "--listen", "127.0.0.1:0", "--http-listen", "none",
                          "--metrics-listen", "none"});
    command.insert(command.end(), bad.flags.begin(), bad.flags.end());
    ChildProcess child(command);
    EXPECT_EQ(child.Wait(), 2) << child.output();
    EXPECT_THAT(child.output(), HasSubstr(bad.message));
    EXPECT_EQ(child.output().find("loading"), std::string::npos) << child.output();
  }
}

// Whether this machine has GPUs or not.
TEST(ParallelBinary, WorkersKeepToTheDeviceThatTheyWereGiven) {
  HandWorker worker({"--model", Model(), "--device", "cpu"});
  Server server({"--workers", worker.address(), "--device", "cuda"});
  EXPECT_FALSE(server.serves());
  EXPECT_NE(server.child().Wait(), 0);
  EXPECT_THAT(server.child().output(), HasSubstr("runs on cpu, this master wants cuda"));
}

TEST(ParallelBinary, AForeignWorkerIsRefused) {
  TinyModelOptions other;
  other.layers = 4;
  other.seed = 2;
  const auto written = WriteTinyGpt2Gguf(Directory(), other);
  ASSERT_TRUE(written.ok());
  HandWorker first({"--model", Model()});
  HandWorker second({"--model", *written});
  Server server({"--workers", first.address() + "," + second.address()});
  EXPECT_FALSE(server.serves());
  EXPECT_EQ(server.child().Wait(), 1);
  EXPECT_THAT(server.child().output(), HasSubstr(second.address()));
}

}  // namespace
}  // namespace treadle
